package pool

import (
	"encoding/json"
	"net/netip"
	"reflect"
	"strings"
	"testing"
)

func TestTargetPort(t *testing.T) {
	four := []uint16{30000, 30001, 30002, 30003}
	for name, tc := range map[string]struct {
		in   string
		hit  []uint16
		from uint16
		want uint16 // 0: it has none
		err  string
	}{
		"same":                        {in: `"same"`, hit: four, from: 30002, want: 30002},
		"offset":                      {in: `"offset 100"`, hit: four, from: 30002, want: 30102},
		"offset below":                {in: `"offset -29999"`, hit: four, from: 30000, want: 1},
		"offset to nothing":           {in: `"offset -30000"`, hit: four, err: "port 30000 of the listener would be 0"},
		"offset too far":              {in: `"offset 35533"`, hit: four, err: "port 30003 of the listener would be 65536"},
		"offset beyond anything":      {in: `"offset 99999"`, err: "is not between -65535 and 65535"},
		"offset from elsewhere":       {in: `"offset 35533"`, hit: four[:2], from: 40000},
		"list":                        {in: `[7000, "7010-7012"]`, hit: four, from: 30003, want: 7012},
		"list to one port":            {in: `[7000, 7000]`, hit: four[:2], from: 30001, want: 7000},
		"list, port redirected":       {in: `[7000, 7001]`, hit: four[:2], from: 30002},
		"list too long":               {in: `["7000-7004"]`, hit: four, err: "5 ports for a listener that has 4"},
		"list of nothing":             {in: `[]`, hit: four, err: "0 ports for a listener that has 4"},
		"list on a port that varies":  {in: `[7000]`, hit: []uint16{0}, err: "port 0"},
		"list on a server of another": {in: `[7000]`, err: "which this is not"},
		"same on a server of another": {in: `"same"`, from: 5, want: 5},
	} {
		t.Run(name, func(t *testing.T) {
			var tp TargetPort
			if err := json.Unmarshal([]byte(tc.in), &tp); err != nil {
				t.Fatal(err)
			}
			var again TargetPort
			b, err := json.Marshal(tp)
			if err == nil {
				err = json.Unmarshal(b, &again)
			}
			if err != nil || !reflect.DeepEqual(again, tp) {
				t.Errorf("%s is written as %s: %v", tc.in, b, err)
			}
			m, err := tp.portsOf(tc.hit)
			if (err != nil) != (tc.err != "") || err != nil && !strings.Contains(err.Error(), tc.err) {
				t.Fatalf("portsOf(%d ports): %v, want %q", len(tc.hit), err, tc.err)
			}
			if err != nil {
				return
			}
			backend := netip.MustParseAddrPort("10.0.0.5:9")
			to, ok := m.target(backend, netip.AddrPortFrom(netip.IPv4Unspecified(), tc.from))
			if ok != (tc.want != 0) || ok && to != netip.AddrPortFrom(backend.Addr(), tc.want) {
				t.Errorf("port %d becomes %v, %v; want %d", tc.from, to, ok, tc.want)
			}
		})
	}
}

func FuzzTargetPort(f *testing.F) {
	for _, s := range []string{`"same"`, `"offset -5"`, `[1, "2-3"]`, `[]`, `{}`, `null`, `"offset"`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		var tp TargetPort
		if json.Unmarshal([]byte(s), &tp) != nil {
			return
		}
		m, err := tp.portsOf([]uint16{30000, 30001})
		if err != nil {
			return
		}
		if p, ok := m.of(30001); ok && p == 0 {
			t.Fatalf("%s maps to port 0", s)
		}
	})
}
