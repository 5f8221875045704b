package console

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	_ "github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"

	_ "github.com/wayhouse-proxy/wayhouse/modules/proxy"
)

// TestPromotePool has a pool and one thing that operators want of it.
func TestPromotePool(t *testing.T) {
	for name, tc := range map[string]struct {
		pool  string
		entry entryView
		want  string // the pool after that; "": as before
		left  string // of what is left out; "": nothing is
	}{
		"added":                  {`{"targets":["10.0.0.1:7"]}`, entryView{Addr: "10.0.0.2:7", Change: "added", Weight: 1}, `{"targets":["10.0.0.1:7","10.0.0.2:7"]}`, ""},
		"added already":          {`{"targets":["10.0.0.1:7"]}`, entryView{Addr: "10.0.0.1:7", Change: "added", Weight: 1}, "", ""},
		"added with a weight":    {`{"targets":["10.0.0.1:7"],"balancer":{"policy":"weighted"}}`, entryView{Addr: "10.0.0.2:7", Change: "added", Weight: 5}, `{"targets":["10.0.0.1:7","10.0.0.2:7"],"balancer":{"policy":"weighted","weights":{"10.0.0.2:7":5}}}`, ""},
		"added with a new one":   {`{"targets":["10.0.0.1:7"],"balancer":{"policy":"weighted","weights":{"10.0.0.1:7":2}}}`, entryView{Addr: "10.0.0.1:7", Change: "added", Weight: 5}, `{"targets":["10.0.0.1:7"],"balancer":{"policy":"weighted","weights":{"10.0.0.1:7":5}}}`, ""},
		"a weight of no use":     {`{"targets":["10.0.0.1:7"]}`, entryView{Addr: "10.0.0.2:7", Change: "added", Weight: 5}, `{"targets":["10.0.0.1:7","10.0.0.2:7"]}`, "no weights"},
		"removed":                {`{"targets":["10.0.0.1:7","10.0.0.2:7"],"hold":1}`, entryView{Addr: "10.0.0.1:7", Change: "removed"}, `{"targets":["10.0.0.2:7"],"hold":1}`, ""},
		"removed, mapped":        {`{"targets":["[::ffff:10.0.0.1]:7","10.0.0.2:7"]}`, entryView{Addr: "10.0.0.1:7", Change: "removed"}, `{"targets":["10.0.0.2:7"]}`, ""},
		"removed with weight":    {`{"targets":["10.0.0.1:7","10.0.0.2:7"],"balancer":{"policy":"weighted","weights":{"10.0.0.1:7":2}}}`, entryView{Addr: "10.0.0.1:7", Change: "removed"}, `{"targets":["10.0.0.2:7"],"balancer":{"policy":"weighted"}}`, ""},
		"removed already":        {`{"targets":["10.0.0.1:7"]}`, entryView{Addr: "10.0.0.2:7", Change: "removed"}, "", ""},
		"removed, maybe by name": {`{"targets":["game.example.com:7"]}`, entryView{Addr: "10.0.0.2:7", Change: "removed"}, "", "game.example.com:7 is a name"},
		"the last one removed":   {`{"targets":["10.0.0.1:7"]}`, entryView{Addr: "10.0.0.1:7", Change: "removed"}, "", "has to have a target"},
		"draining":               {`{"targets":["10.0.0.1:7"]}`, entryView{Addr: "10.0.0.1:7", Change: "state", State: "draining"}, "", "is draining: a config does not say that"},
		"a source":               {`{"source":"consul"}`, entryView{Addr: "10.0.0.1:7", Change: "removed"}, "", "from the source consul"},
		"an inline source":       {`{"source":{"source":"dns_srv","record":"x"}}`, entryView{Addr: "10.0.0.1:7", Change: "added", Weight: 1}, "", "from the source dns_srv"},
		"not there":              {"", entryView{Addr: "10.0.0.1:7", Change: "added", Weight: 1}, "", "no such pool"},
	} {
		t.Run(name, func(t *testing.T) {
			pools := `{"other":{"targets":["10.9.9.9:9"]}`
			if tc.pool != "" {
				pools += `,"game":` + tc.pool
			}
			config := `{"admin":{"listen":"x"},"apps":{"http":{"k":1},"wayhouse":{"workers":3,"pools":` + pools + `}}}}`
			e := tc.entry
			e.Pool = "game"
			p, err := promote([]byte(config), []entryView{e})
			if err != nil {
				t.Fatal(err)
			}
			want := config
			if tc.want != "" {
				want = strings.Replace(config, tc.pool, tc.want, 1)
			}
			if !sameJSON(t, p.config, []byte(want)) {
				t.Errorf("the config is\n%s, want\n%s", p.config, want)
			}
			if (len(p.changed) > 0) != (tc.want != "") {
				t.Errorf("changed: %q", p.changed)
			}
			if left := strings.Join(p.left, "\n"); tc.left == "" && left != "" || !strings.Contains(left, tc.left) {
				t.Errorf("left out is %q, want %q", left, tc.left)
			}
		})
	}
}

func TestPromoteNoConfig(t *testing.T) {
	for _, config := range []string{"", "null", "[]", "{", `{"apps":3}`, `{"apps":{"wayhouse":{"pools":[]}}}`, `{"apps":{"wayhouse":{"pools":{"game":3}}}}`, `{"apps":{"wayhouse":{"pools":{"game":{"targets":3}}}}}`} {
		p, err := promote([]byte(config), []entryView{{Pool: "game", Addr: "10.0.0.1:7", Change: "added", Weight: 1}})
		if err == nil && (len(p.changed) > 0 || len(p.left) == 0) {
			t.Errorf("%s: %+v", config, p)
		}
	}
}

func sameJSON(t *testing.T, a, b []byte) bool {
	t.Helper()
	var x, y any
	if err := json.Unmarshal(a, &x); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &y); err != nil {
		t.Fatal(err)
	}
	return reflect.DeepEqual(x, y)
}

// TestBlock writes pools that people have written as Caddyfiles back.
func TestBlock(t *testing.T) {
	for name, body := range map[string]string{
		"least":     "to 10.0.0.1:7",
		"every":     "to 10.0.0.1:7 game.example.com:7 [2001:db8::1]:7\nbalancer weighted {\n\tweight 10.0.0.1:7 3\n}\nhealth http {\n\tfall 4\n\thost example.com\n\tinterval 5s\n\tpath `/a b`\n\tport 8080\n\trise 1\n\tstatus 204\n\ttimeout 250ms\n}\non_backend_down hold 1m30s\non_backend_removed drain 10m\nproxy_protocol v2-udp every\nconnect_timeout 1s\nidle_timeout 2h\nkeepalive 45s\nmax_lifetime 24h\nmax_new_per_sec 50\nmax_sessions 100\nmax_tries 3\nnodelay off\non_all_down try_all\nproxy_protocol_tlvs authority crc32c\nsource_addresses 10.0.0.9 10.0.0.10",
		"hash":      "to 10.0.0.1:7\nbalancer consistent_hash src_ip_port\nhealth none\non_backend_down close\non_backend_removed close\nproxy_protocol v1",
		"udp_probe": "to 10.0.0.1:7\nhealth udp_probe {\n\tsend hex:ffffffff\n\texpect \"ascii:a \\\"b\\\" `\"\n}",
		"keepalive": "to 10.0.0.1:7\nkeepalive off",
		"a name":    "to 10.0.0.1:7",
	} {
		t.Run(name, func(t *testing.T) {
			source := "{\nwayhouse {\npool `" + name + "` {\n" + body + "\n}\n}\n}\n"
			pool := adapted(t, source, name)
			text, err := block(name, pool)
			if err != nil {
				t.Fatalf("%v of %s", err, pool)
			}
			if !strings.HasPrefix(text, "pool ") || !strings.HasSuffix(text, "\n}\n") {
				t.Errorf("it is no block:\n%s", text)
			}
			if again := adapted(t, "{\nwayhouse {\n"+text+"}\n}\n", name); !sameJSON(t, again, pool) {
				t.Errorf("it means\n%s, want\n%s:\n%s", again, pool, text)
			}
		})
	}
}

// TestBlockRefuses wants pools that would not come out as they were to be
// refused.
func TestBlockRefuses(t *testing.T) {
	for _, pool := range []string{
		`{"targets":["10.0.0.1:7"],"of_the_future":true}`,
		`{"targets":["10.0.0.1:7"],"balancer":{"policy":"weighted","weights":{"10.0.0.1:7":{}}}}`,
		`{"targets":["10.0.0.1:7"],"health":{"check":"none","nested":{"x":1}}}`,
		`{"targets":["10.0.0.1:7"],"proxy_protocol_udp":"every"}`,
		`{"targets":[{}]}`,
	} {
		if text, err := block("game", []byte(pool)); err == nil {
			t.Errorf("%s becomes\n%s", pool, text)
		}
	}
}

func adapted(t *testing.T, source, pool string) json.RawMessage {
	t.Helper()
	out, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(source), nil)
	if err != nil {
		t.Fatalf("%v:\n%s", err, source)
	}
	var doc struct {
		Apps struct {
			Wayhouse struct{ Pools map[string]json.RawMessage }
		}
	}
	if err := json.Unmarshal(out, &doc); err != nil {
		t.Fatal(err)
	}
	return doc.Apps.Wayhouse.Pools[pool]
}

// FuzzPromote has configs of anybody. Whatever becomes of them is JSON, and a
// block means what it is made of or is refused.
func FuzzPromote(f *testing.F) {
	f.Add(`{"apps":{"wayhouse":{"pools":{"game":{"targets":["10.0.0.1:7"],"balancer":{"policy":"weighted","weights":{"10.0.0.1:7":3}}}}}}}`, "10.0.0.2:7", uint32(2))
	f.Add(`{"apps":{"wayhouse":{"pools":{"game":{"source":"x"}}}}}`, "", uint32(0))
	f.Add(`{"apps":{"wayhouse":{"pools":{"game":{"targets":["a b:1"],"health":{"check":"none","x":"\u0000"},"on_backend_down":7,"hold":"1s"}}}}}`, "10.0.0.1:7", uint32(1))
	f.Fuzz(func(t *testing.T, config, addr string, weight uint32) {
		for _, change := range []string{"added", "removed", "state", ""} {
			p, err := promote([]byte(config), []entryView{{Pool: "game", Addr: addr, Change: change, Weight: weight}})
			if err != nil {
				continue
			}
			if len(p.changed) > 0 && !json.Valid(p.config) {
				t.Errorf("it becomes %s", p.config)
			}
			for _, name := range p.changed {
				block(name, p.pools[name])
			}
		}
	})
}
