package sniffer

import (
	"testing"

	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

func TestKeys(t *testing.T) {
	hint := new(sniff.Hint)
	hint.SetKey("minecraft")
	hint.AddPart("state", "login")
	hint.AddNumber("protocol", 765)
	foreign, bare := new(sniff.Hint), new(sniff.Hint)
	foreign.SetKey("token=abc=d")
	for _, tc := range []struct {
		keys                []string
		hint, foreign, bare bool
	}{
		{nil, true, true, true},
		{[]string{"minecraft"}, true, false, false},
		{[]string{"a2s", "minecraft"}, true, false, false},
		{[]string{"a2s"}, false, false, false},
		{[]string{"state=login"}, true, false, false},
		{[]string{"state=status", "state=login"}, true, false, false},
		{[]string{"state=login", "protocol=765"}, true, false, false},
		{[]string{"state=login", "protocol=764"}, false, false, false},
		{[]string{"minecraft", "state=login", "protocol=764", "protocol=765"}, true, false, false},
		{[]string{"version=1"}, false, false, false},
		{[]string{"token=abc=d"}, false, true, false},
		{[]string{"token=abc"}, false, false, false},
	} {
		k, err := parseKeys(tc.keys)
		if err != nil {
			t.Fatal(err)
		}
		for name, c := range map[string]struct {
			h    *sniff.Hint
			want bool
		}{"hint": {hint, tc.hint}, "foreign": {foreign, tc.foreign}, "bare": {bare, tc.bare}} {
			if got := k.match(c.h); got != c.want {
				t.Errorf("%s, %v: %v", name, tc.keys, got)
			}
		}
	}
	for _, bad := range []string{"", "=", "state=", "=login"} {
		if _, err := parseKeys([]string{"ok", bad}); err == nil {
			t.Errorf("%q is a key", bad)
		}
	}
}
