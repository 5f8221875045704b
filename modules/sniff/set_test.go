package sniff_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
	_ "github.com/wayhouse-proxy/wayhouse/modules/sniff/native"
)

func newContext(t *testing.T) caddy.Context {
	ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
	t.Cleanup(cancel)
	return ctx
}

// foreign is a host of sniffers that are of no native module.
type foreign []string

func (f foreign) Sniffers(add func(name, place string, s sniff.Sniffer) error) error {
	for _, name := range f {
		if err := add(name, "/sniffers/"+name+".wasm", never{}); err != nil {
			return err
		}
	}
	return nil
}

type never struct{}

func (never) Sniff(*sniff.Input, *sniff.Hint) sniff.Verdict { return sniff.Unrecognised }

// declared is the host of native sniffers with a config.
func declared(t *testing.T, ctx caddy.Context, config string) sniff.Host {
	t.Helper()
	m, err := ctx.LoadModuleByID("wayhouse.sniffer_hosts.native", json.RawMessage(config))
	if err != nil {
		t.Fatal(err)
	}
	return m.(sniff.Host)
}

func TestNames(t *testing.T) {
	ctx := newContext(t)
	for name, tc := range map[string]struct {
		native  string
		foreign foreign
		err     string
	}{
		"nothing":                 {`{}`, nil, ""},
		"both":                    {`{"one": {"sniffer": "regex_first_bytes", "pattern": "hex:00"}}`, foreign{"two"}, ""},
		"a kind under its name":   {`{"quic": {"sniffer": "quic"}}`, nil, ""},
		"a kind under another":    {`{"quic": {"sniffer": "a2s"}}`, nil, `two sniffers are named "quic": the native module wayhouse.sniffers.quic, which needs no declaration, and one of sniffers.native.quic`},
		"declared and foreign":    {`{"one": {"sniffer": "a2s"}}`, foreign{"one"}, `two sniffers are named "one": one of sniffers.native.one, one of /sniffers/one.wasm`},
		"foreign twice":           {`{}`, foreign{"one", "one"}, `two sniffers are named "one"`},
		"foreign with a native's": {`{}`, foreign{"minecraft"}, `two sniffers are named "minecraft": the native module wayhouse.sniffers.minecraft, which needs no declaration, and one of /sniffers/minecraft.wasm`},
		"no name":                 {`{}`, foreign{""}, "a sniffer's name is empty"},
		"a bad name":              {`{}`, foreign{"a.b"}, `the sniffer name "a.b" has '.' in it`},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := sniff.NewSet(ctx, map[string]any{"native": declared(t, ctx, tc.native), "wasm": tc.foreign})
			switch {
			case err == nil && tc.err != "", err != nil && (tc.err == "" || !strings.Contains(err.Error(), tc.err)):
				t.Errorf("%v, want %s", err, tc.err)
			}
		})
	}
}

func TestGet(t *testing.T) {
	ctx := newContext(t)
	set, err := sniff.NewSet(ctx, map[string]any{"native": declared(t, ctx, `{"mine": {"sniffer": "regex_first_bytes", "pattern": "hex:00"}}`)})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"mine": "", "quic": "", "": "no sniffer is named",
		"minecarft":         `no sniffer is named "minecarft"; did you mean minecraft?`,
		"regex_first_bytes": "declare it under a name of its own in sniffers.native",
	} {
		n, err := set.Get(name)
		if want == "" && (err != nil || n.Name != name) || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: %v, want %s", name, err, want)
		}
		if again, _ := set.Get(name); again != n {
			t.Errorf("%q is another one the second time", name)
		}
	}
	if got, err := sniff.From(set.In(ctx)); got != set || err != nil {
		t.Errorf("the set of a context with one: %v", err)
	}
	if got, err := sniff.From(ctx); got == set || err != nil {
		t.Errorf("the set of a context without one: %v", err)
	}
	if _, err := sniff.NewSet(ctx, map[string]any{"odd": 7}); err == nil {
		t.Error("a number is a host of sniffers")
	}
}

func TestCaddyfile(t *testing.T) {
	for in, want := range map[string]string{
		"sniffers native {\n a regex_first_bytes \"key:x|hex:00\"\n b a2s\n}": `{"native":{"a":{"pattern":"key:x|hex:00","sniffer":"regex_first_bytes"},"b":{"sniffer":"a2s"}}}`,
		"sniffers":                                       "sniffers: the host is missing",
		"sniffers natvie {\n}":                           `unrecognized host of sniffers "natvie"`,
		"sniffers native x":                              `unexpected argument "x"`,
		"sniffers native {\n a\n}":                       "a: the kind is missing",
		"sniffers native {\n a quicc\n}":                 `unrecognized sniffer "quicc"; did you mean quic?`,
		"sniffers native {\n a quic x\n}":                `unexpected argument "x"`,
		"sniffers native {\n a quic {\n x\n}\n}":         `unrecognized option "x"`,
		"sniffers native {\n a quic\n a a2s\n}":          "a: there is a sniffer of this name already, at Testfile:3",
		"sniffers native {\n a regex_first_bytes\n}":     "regex_first_bytes: a value is missing",
		"sniffers native {\n a regex_first_bytes b c\n}": `unexpected argument "c"`,
	} {
		d := caddyfile.NewTestDispenser(in)
		d.Next()
		var mods caddy.ModuleMap
		err := sniff.CaddyfileOption(&mods).Read(d)
		got, _ := json.Marshal(mods)
		if err != nil {
			got = []byte(err.Error())
		}
		if strings.HasPrefix(want, "{") && string(got) != want || !strings.Contains(string(got), want) {
			t.Errorf("%q: %s, want %s", in, got, want)
		}
	}
}
