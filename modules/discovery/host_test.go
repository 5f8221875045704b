package discovery

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

func ctxOf(t *testing.T) caddy.Context {
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	t.Cleanup(cancel)
	return ctx
}

func init() {
	caddy.RegisterModule(new(guestModule))
	caddy.RegisterModule(new(notASource))
	caddy.RegisterModule(new(cleansUp))
}

// guestModule is a kind of source of a third party, which checks nothing.
type guestModule struct {
	held
	N int `json:"n,omitempty"`
	M struct {
		A int `json:"a,omitempty"`
		B int `json:"b,omitempty"`
	} `json:"m,omitzero"`
}

func (*guestModule) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "wayhouse.sources.guest", New: func() caddy.Module { return new(guestModule) }}
}

// Provision says nothing of what it embeds, as a careless guest may.
func (*guestModule) Provision(caddy.Context) error { return nil }

type notASource struct{}

func (*notASource) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "wayhouse.sources.stone", New: func() caddy.Module { return new(notASource) }}
}

type cleansUp struct{ guestModule }

func (*cleansUp) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "wayhouse.sources.cleaner", New: func() caddy.Module { return new(cleansUp) }}
}

func (*cleansUp) Cleanup() error { return nil }

func TestLoad(t *testing.T) {
	for in, want := range map[string]string{
		`"match"`:                     "match/guest",
		`"guest"`:                     "guest/guest",
		`"static"`:                    "static/guest", // a name wins over a kind
		`{"source": "guest", "n": 1}`: "guest/guest",
		`{"source": "guest", "refresh_interval": "1s"}`: "guest/guest",
		`"mtach"`:                       `: no source is named "mtach" in apps.wayhouse.sources, and no kind is; did you mean match?`,
		`""`:                            `: no source is named ""`,
		`7`:                             `: 7 is not an object, as in {"source": "dns_srv"`,
		`{}`:                            `.source: the kind is missing`,
		`{"source": "gest"}`:            `.source: there is no wayhouse.sources.gest; did you mean guest?`,
		`{"source": "guest", "nn": 1}`:  `.nn: `,
		`{"source": "guest", "n": "x"}`: `.n: `,
		`{"source": "guest", "refresh_interval": "999ms"}`:                                   `.refresh_interval: 999ms is less than 1s`,
		`{"source": "static"}`:                                                               `.targets: none; give at least one`,
		`{"source": "static", "targets": ["10.0.0.1:1"], "refresh_interval": "0s"}`:          `.refresh_interval: 0s is less than 1s`,
		`{"source": "stone"}`:                                                                `: *discovery.notASource is not a source`,
		`{"source": "cleaner"}`:                                                              `has a Cleanup`,
		`{"source": "dns", "name": "10.0.0.1", "port": 1}`:                                   `.name: "10.0.0.1" is not a host name`,
		`{"source": "dns", "name": "a.test"}`:                                                `.port: 0 is not a number from 1 to 65535`,
		`{"source": "dns", "port": 1}`:                                                       `.name: missing`,
		`{"source": "dns", "name": "a.test", "port": 1, "resolvers": ["1.1.1.1", "x"]}`:      `.resolvers[1]: "x" is neither ip nor ip:port`,
		`{"source": "dns", "name": "a.test", "port": 1, "resolvers": ["0.0.0.0:53"]}`:        `.resolvers[0]: "0.0.0.0:53" is not the address of a server`,
		`{"source": "dns", "name": "a.test", "port": 1, "resolvers": ["[::1]:5353", "::1"]}`: "dns/dns",
		`{"source": "dns_srv"}`:                                                              `.record: missing, as in _game._udp.example.com`,
		`{"source": "dns_srv", "record": "a b"}`:                                             `.record: "a b" is not the name of a record`,
		`{"source": "dns_srv", "record": "_g._udp.A.test."}`:                                 "dns_srv/dns_srv",
		`{"source": "file"}`:                                                                 `.path: missing`,
		`{"source": "file", "path": "/no/such/file"}`:                                        "file/file",
	} {
		ctx := ctxOf(t)
		named, err := NewSources(ctx, map[string]json.RawMessage{
			"match": json.RawMessage(`{"source": "guest"}`), "static": json.RawMessage(`{"source": "guest"}`),
		})
		if err != nil {
			t.Fatal(err)
		}
		u, err := Load(named.In(ctx), json.RawMessage(in))
		var got string
		if err != nil {
			got = err.Error()
		} else {
			got = u.Name() + "/" + u.Kind()
			u.Close()
		}
		if !strings.Contains(got, want) || strings.HasPrefix(want, ".") && !strings.HasPrefix(got, want) {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
		named.Close()
	}
	if n := held0(); n != 0 {
		t.Errorf("%d sources are held", n)
	}
}

func held0() (n int) {
	tasks.Range(func(any, any) bool { n++; return true })
	return n
}

// The same options are the same source however they are written.
func TestSourcesAreShared(t *testing.T) {
	ctx := ctxOf(t)
	load := func(in string) *Use {
		u, err := Load(ctx, json.RawMessage(in))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(u.Close)
		return u
	}
	a := load(`{"source": "guest", "n": 1, "m": {"a": 1, "b": 2}}`)
	for in, same := range map[string]bool{
		`{"m": {"b": 2,  "a": 1}, "n": 1, "source": "guest"}`: true,
		`{"source": "guest", "n": 2, "m": {"a": 1, "b": 2}}`:  false,
		`{"source": "guest", "n": 1, "m": {"a": 1, "b": 3}}`:  false,
		`{"source": "guest", "n": 1}`:                         false,
	} {
		if got := load(in); (got.task == a.task) != same {
			t.Errorf("%s shares: %v, want %v", in, got.task == a.task, same)
		}
	}
}

func TestSourcesErrors(t *testing.T) {
	_, err := NewSources(ctxOf(t), map[string]json.RawMessage{
		"a": json.RawMessage(`{"source": "guest"}`), "b": json.RawMessage(`{"source": "guest", "nn": 1}`),
	})
	if err == nil || !strings.HasPrefix(err.Error(), "b.nn: ") {
		t.Errorf("error %v", err)
	}
	if n := held0(); n != 0 {
		t.Errorf("%d sources are held", n)
	}
	(*Sources)(nil).Close()
}

func TestUnmarshalUse(t *testing.T) {
	for in, want := range map[string]string{
		"source match":                           `"match"`,
		"source guest":                           `"guest"`,
		"source dns a.test 7":                    `{"name":"a.test","port":7,"source":"dns"}`,
		"source dns {\n name a.test\n port 7\n}": `{"name":"a.test","port":7,"source":"dns"}`,
		"source dns a.test 7 {\n resolvers 10.0.0.1 10.0.0.2:5353\n refresh_interval 5s\n}": `{"name":"a.test","port":7,"refresh_interval":5000000000,"resolvers":["10.0.0.1","10.0.0.2:5353"],"source":"dns"}`,
		"source dns_srv _g._udp.a.test":               `{"record":"_g._udp.a.test","source":"dns_srv"}`,
		"source dns_srv {\n record _g._udp.a.test\n}": `{"record":"_g._udp.a.test","source":"dns_srv"}`,
		"source file /run/b.json":                     `{"path":"/run/b.json","source":"file"}`,
		"source static {\n}":                          `{"source":"static"}`,

		"source":                                 "source: the name or the kind is missing",
		"source statik 10.0.0.1:1":               `unrecognized source kind "statik"; did you mean static?`,
		"source match {\n}":                      `unrecognized source kind "match"`,
		"source dns a.test":                      "the port is missing, as in dns a.test 7777",
		"source dns a.test x":                    `port: "x" is not a whole number`,
		"source dns a.test 7 8":                  `unexpected argument "8"`,
		"source dns a.test 7 {\n name b.test\n}": `unrecognized option "name"`,
		"source dns_srv a b":                     `unexpected argument "b"`,
		"source static 10.0.0.1:1 {\n refresh_intervall 5s\n}": "did you mean refresh_interval?",
		"source file /a {\n path /b\n}":                        `unrecognized option "path"`,
	} {
		d := caddyfile.NewTestDispenser("pool {\n" + in + "\nmore x\n}")
		d.Next()
		d.NextBlock(0)
		raw, err := UnmarshalUse(d)
		got := string(raw)
		if err != nil {
			got = err.Error()
		} else if !d.NextBlock(0) || d.Val() != "more" {
			t.Errorf("%s: what follows is %q", in, d.Val())
		}
		if strings.HasPrefix(want, "{") && got != want || !strings.Contains(got, want) {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}
