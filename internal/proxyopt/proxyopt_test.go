package proxyopt

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
)

func TestProxyForm(t *testing.T) {
	for in, want := range map[string]string{
		`{}`:                           "none until_reply",
		`{"proxy_protocol": "none"}`:   "none until_reply",
		`{"proxy_protocol": "v1"}`:     "v1 until_reply",
		`{"proxy_protocol": "v2-udp"}`: "v2-udp until_reply",
		`{"proxy_protocol": "v2-udp", "proxy_protocol_udp": "first"}`:                                      "v2-udp first",
		`{"proxy_protocol": "spp", "proxy_protocol_udp": "every"}`:                                         "spp every",
		`{"proxy_protocol": "v2", "proxy_protocol_tlvs": ["crc32c", "authority"]}`:                         "v2 until_reply authority crc32c",
		`{"proxy_protocol": "v3"}`:                                                                         `proxy_protocol: "v3" is none of`,
		`{"proxy_protocol": "v2-udp", "proxy_protocol_udp": "all"}`:                                        `proxy_protocol_udp: "all" is none of`,
		`{"proxy_protocol": "v2", "proxy_protocol_udp": "first"}`:                                          "proxy_protocol_udp: proxy_protocol is v2",
		`{"proxy_protocol_udp": "every"}`:                                                                  "proxy_protocol_udp: proxy_protocol is none",
		`{"proxy_protocol": "spp", "proxy_protocol_udp": "first"}`:                                         "proxy_protocol_udp: first, but spp",
		`{"proxy_protocol": "v1", "proxy_protocol_tlvs": ["crc32c"]}`:                                      "proxy_protocol_tlvs: proxy_protocol is v1",
		`{"proxy_protocol": "v2", "proxy_protocol_tlvs": ["alpn"]}`:                                        `proxy_protocol_tlvs[0]: "alpn" is none of`,
		`{"proxy_protocol": "v2", "proxy_protocol_tlvs": ["crc32c", "unique_id", "crc32c"]}`:               "proxy_protocol_tlvs[2]: crc32c is listed twice",
		`{"proxy_protocol": "v2-udp", "proxy_protocol_tlvs": ["unique_id"], "proxy_protocol_udp":"every"}`: "v2-udp every unique_id",
	} {
		t.Run(in, func(t *testing.T) {
			var o Options
			if err := json.Unmarshal([]byte(in), &o); err != nil {
				t.Fatal(err)
			}
			f, err := o.ProxyForm()
			got := fmt.Sprint(f.Version, " ", f.Mode)
			for name, on := range map[string]bool{" authority": f.Authority, " unique_id": f.UniqueID} {
				if on {
					got += name
				}
			}
			if f.CRC {
				got += " crc32c"
			}
			if err != nil {
				got = err.Error()
			}
			if !strings.HasPrefix(got, want) {
				t.Errorf("got %s, want %s", got, want)
			}
		})
	}
}

func TestCaddyfile(t *testing.T) {
	for in, want := range map[string]string{
		"proxy_protocol v2":                                     `{"proxy_protocol":"v2"}`,
		"proxy_protocol v2-udp every":                           `{"proxy_protocol":"v2-udp","proxy_protocol_udp":"every"}`,
		"proxy_protocol v2\n proxy_protocol_tlvs crc32c":        `{"proxy_protocol":"v2","proxy_protocol_tlvs":["crc32c"]}`,
		"proxy_protocol":                                        "proxy_protocol: a value is missing, at Testfile:2",
		"proxy_protocol v4":                                     `proxy_protocol: "v4" is none of none, v1, v2, v2-udp, spp, at Testfile:2`,
		"proxy_protocol spp often":                              `"often" is none of first, until_reply, every, at Testfile:2`,
		"proxy_protocol v2-udp first last":                      `unexpected argument "last"`,
		"proxy_protocol_tlvs":                                   "a value is missing",
		"proxy_protocol v2-udp first\n proxy_protocol_tlvs a b": `{"proxy_protocol":"v2-udp","proxy_protocol_udp":"first","proxy_protocol_tlvs":["a","b"]}`,
	} {
		t.Run(in, func(t *testing.T) {
			d := caddyfile.NewTestDispenser("x {\n " + in + "\n}")
			d.Next()
			var o Options
			var got string
			if err := caddyopt.Block(d, o.ProxyOptions()); err != nil {
				got = err.Error()
			} else {
				b, _ := json.Marshal(o)
				got = string(b)
			}
			if !strings.Contains(got, want) {
				t.Errorf("got %s, want %s", got, want)
			}
		})
	}
}

func TestFits(t *testing.T) {
	for v, want := range map[proxyproto.Version][2]bool{ // TCP, UDP
		proxyproto.None: {true, true}, proxyproto.V1: {true, false}, proxyproto.V2: {true, false}, proxyproto.V2UDP: {false, true}, proxyproto.SPP: {false, true},
	} {
		for i, udp := range []bool{false, true} {
			if err := Fits(proxyproto.Form{Version: v}, udp); (err == nil) != want[i] {
				t.Errorf("%v, UDP %v: %v", v, udp, err)
			}
		}
	}
}
