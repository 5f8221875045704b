package matchers_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/mholt/caddy-l4/layer4"

	"github.com/wayhouse-proxy/wayhouse/modules/listener"
)

// Each line of a Caddyfile becomes this JSON, or this error of the parser.
func TestCaddyfile(t *testing.T) {
	for in, want := range map[string]string{
		"client_cidr 10.0.0.0/8 192.0.2.1": `{"cidrs":["10.0.0.0/8","192.0.2.1"]}`,
		"client_cidr":                      "client_cidr: a value is missing",
		"client_cidr 10.0.0.0/8 {\n x\n}":  `unrecognized option "x"`,
		"dst 10.0.0.1":                     `{"cidrs":["10.0.0.1"]}`,
		"dst":                              "dst: a value is missing",
		"port 30001 30002-30010":           `{"ports":[30001,"30002-30010"]}`,
		"port":                             "port: a value is missing",
		"port 0":                           `port: "0" is neither a port from 1 to 65535`,
		"port 70000":                       `port: "70000" is neither a port`,
		"port 1-70000":                     `port: "1-70000" is neither a port`,
		"port 9-1":                         `port: "9-1" runs backwards: 1-9 is the range`,
		"port http":                        `port: "http" is neither a port`,
		"first_bytes hex:ff":               `{"prefix":"hex:ff"}`,
		"first_bytes hex:ff {\n offset 2\n length 4 10\n}": `{"prefix":"hex:ff","offset":2,"length":{"min":4,"max":10}}`,
		"first_bytes {\n prefix ascii:a\n length 4\n}":     `{"prefix":"ascii:a","length":{"min":4}}`,
		"first_bytes hex:ff hex:00":                        `unexpected argument "hex:00" of first_bytes`,
		"first_bytes hex:ff {\n prefix hex:00\n}":          "prefix: given twice",
		"first_bytes {\n lenght 4\n}":                      `unrecognized option "lenght" of first_bytes; did you mean length?`,
		"first_bytes {\n length\n}":                        "length: one or two numbers",
		"first_bytes {\n length 1 2 3\n}":                  "length: one or two numbers",
		"first_bytes {\n length x\n}":                      `length: "x" is not a whole number`,
		"first_bytes {\n length 1 {\n 2\n}\n}":             "length: takes no block",
		"sni a.example *.b.example":                        `{"host":["a.example","*.b.example"]}`,
		"sni":                                              "sni: a value is missing",
		"sni a.example {\n}":                               `{"host":["a.example"]}`,
		"sniffer minecraft":                                `{"name":"minecraft"}`,
		"sniffer minecraft a.example b.example {\n key state=login\n key protocol=765\n}": `{"name":"minecraft","host":["a.example","b.example"],"key":["state=login","protocol=765"]}`,
		"sniffer":                    "sniffer: the name is missing",
		"sniffer quic {\n keys x\n}": `unrecognized option "keys" of sniffer; did you mean key?`,
		"sniffer quic {\n key\n}":    "key: a value is missing",
	} {
		d := caddyfile.NewTestDispenser(in)
		name, _, _ := strings.Cut(strings.Fields(in)[0], " ")
		d.Next()
		m, err := caddyfile.UnmarshalModule(d, "layer4.matchers."+name)
		got, _ := json.Marshal(m)
		if err != nil {
			got = []byte(err.Error())
		}
		if strings.HasPrefix(want, "{") && string(got) != want || !strings.Contains(string(got), want) {
			t.Errorf("%q: %s, want %s", in, got, want)
		}
	}
}

// What cannot work is refused at load, with the key that is wrong.
func TestRefused(t *testing.T) {
	for in, want := range map[string]string{
		`{"client_cidr": {}}`: "cidrs: none", `{"client_cidr": {"cidrs": ["10.0.0.0/8", "10.0.0.1/8"]}}`: "cidrs[1]: \"10.0.0.1/8\" has bits behind its prefix",
		`{"client_cidr": {"cidr": ["10.0.0.0/8"]}}`: `cidr: unknown key; did you mean cidrs?`, `{"dst": {"cidrs": ["x"]}}`: `cidrs[0]: "x" is no network`, `{"dst": {}}`: "cidrs: none",
		`{"port": {}}`: "ports: none", `{"port": {"ports": [0]}}`: `ports[0]: "0" is neither a port`, `{"port": {"ports": [1, "1-"]}}`: `ports[1]: "1-" is neither a port`,
		`{"port": {"port": [1]}}`: `port: unknown key; did you mean ports?`, `{"sni": {"hosts": ["a.example"]}}`: `hosts: unknown key; did you mean host?`,
		`{"first_bytes": {"length": {"maximum": 5}}}`: `length.maximum: unknown key; there are max, min`, `{"sniffer": {"nam": "quic"}}`: `nam: unknown key; did you mean name?`,
		`{"dst": {"cidrs": ["{env.NO_SUCH_NETWORK}"]}}`: "cidrs[0]: ",
		`{"port": {"ports": [1.5]}}`:                    `"1.5" is neither a port`, `{"port": {"ports": [true]}}`: `"true" is neither a port`, `{"port": {"ports": [-1]}}`: `"-1" is neither`,
		`{"first_bytes": {}}`: "neither prefix nor length", `{"first_bytes": {"prefix": "x"}}`: "prefix: ", `{"first_bytes": {"length": {}}}`: "every flow would match",
		`{"first_bytes": {"offset": 4, "length": {"min": 1}}}`: "offset: there is no prefix", `{"first_bytes": {"prefix": "hex:00", "offset": -1}}`: "offset: -1",
		`{"first_bytes": {"prefix": "hex:00", "offset": 4097}}`: "offset: 4097", `{"first_bytes": {"length": {"min": 5, "max": 4}}}`: "length.max: 4 is less",
		`{"first_bytes": {"length": {"min": -5}}}`: "length.min: -5",
		`{"sni": {}}`: "host: none", `{"sni": {"host": ["a..b"]}}`: "host[0]: ", `{"sni": {"host": ["*"]}}`: "a star is for all labels",
		`{"sniffer": {}}`: "name: no sniffer is named", `{"sniffer": {"name": "mincraft"}}`: "name: no sniffer is named \"mincraft\"; did you mean minecraft?",
		`{"sniffer": {"name": "quic", "host": [""]}}`: "host[0]: ", `{"sniffer": {"name": "quic", "key": ["a="]}}`: "key[0]: ",
		`{"sniffer": {"name": "regex_first_bytes"}}`: "declare it under a name of its own",
	} {
		ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
		var mods map[string]json.RawMessage
		if err := json.Unmarshal([]byte(in), &mods); err != nil {
			t.Fatal(err)
		}
		for name, config := range mods {
			if _, err := ctx.LoadModuleByID("layer4.matchers."+name, config); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %s", in, err, want)
			}
		}
		cancel()
	}
}

// Those that need no bytes say so.
func TestAddrMatchers(t *testing.T) {
	for name, want := range map[string]bool{"client_cidr": true, "dst": true, "port": true, "first_bytes": false, "sni": false, "sniffer": false} {
		info, err := caddy.GetModule("layer4.matchers." + name)
		if err != nil {
			t.Fatal(err)
		}
		m := info.New().(layer4.ConnMatcher)
		if _, ok := m.(listener.AddrMatcher); ok != want {
			t.Errorf("%s: %v", name, ok)
		}
	}
}
