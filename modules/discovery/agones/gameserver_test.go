package agones

import (
	"encoding/json"
	"testing"
)

func TestAdd(t *testing.T) {
	const full = `{"metadata": {"name": "g-1"},
		"spec": {"ports": [{"name": "game", "containerPort": 7654, "hostPort": 7001, "protocol": "UDP"}, {"name": "query", "containerPort": 27015}]},
		"status": {"state": "Ready", "address": "203.0.113.5",
			"ports": [{"name": "game", "port": 7001}, {"name": "query", "port": 7002}],
			"addresses": [{"type": "Hostname", "address": "node-1"}, {"type": "InternalIP", "address": "10.0.0.5"}, {"type": "InternalIP", "address": "fd00::5"},
				{"type": "ExternalIP", "address": "203.0.113.5"}, {"type": "PodIP", "address": "10.4.1.9"}],
			"counters": {"players": {"count": 3, "capacity": 64}}, "lists": {"rooms": {"capacity": 8, "values": ["a"]}, "full": {"capacity": 0}, "bad": {"capacity": -1}}}}`
	server := func(status string) string {
		return `{"metadata": {"name": "g-1"}, "status": {"state": "Ready", ` + status + `}}`
	}
	both := []string{"Ready", "Allocated"}
	for name, tc := range map[string]struct {
		text string
		w    wants
		want string // "" not in the list; the address, or why it has none
		max  int64
	}{
		"as it is":             {text: full, want: "203.0.113.5:7001"},
		"port by name":         {text: full, w: wants{port: "query"}, want: "203.0.113.5:7002"},
		"no such port":         {text: full, w: wants{port: "rcon"}, want: `it has no port named "rcon"`},
		"inside":               {text: full, w: wants{address: "InternalIP"}, want: "10.0.0.5:7001"},
		"outside":              {text: full, w: wants{address: "ExternalIP"}, want: "203.0.113.5:7001"},
		"the pod":              {text: full, w: wants{address: "PodIP"}, want: "10.4.1.9:7654"},
		"the pod, by name":     {text: full, w: wants{address: "PodIP", port: "query"}, want: "10.4.1.9:27015"},
		"the pod, none":        {text: full, w: wants{address: "PodIP", port: "x"}, want: `it has no port named "x"`},
		"counter":              {text: full, w: wants{counter: "players"}, want: "203.0.113.5:7001", max: 64},
		"list":                 {text: full, w: wants{list: "rooms"}, want: "203.0.113.5:7001", max: 8},
		"no such counter":      {text: full, w: wants{counter: "rooms"}, want: "203.0.113.5:7001"},
		"capacity 0":           {text: full, w: wants{list: "full"}, want: "203.0.113.5:7001"},
		"capacity below 0":     {text: full, w: wants{list: "bad"}, want: "203.0.113.5:7001"},
		"another state":        {text: full, w: wants{states: []string{"Allocated"}}},
		"no state":             {text: `{"metadata": {"name": "g-1"}}`},
		"being deleted":        {text: `{"metadata": {"name": "g-1", "deletionTimestamp": "2026-11-30T12:00:00Z"}, "status": {"state": "Ready", "address": "10.0.0.1", "ports": [{"port": 1}]}}`},
		"a name, and its node": {text: server(`"address": "node-1.example.com", "ports": [{"port": 7000}], "addresses": [{"type": "InternalIP", "address": "10.0.0.5"}, {"type": "ExternalIP", "address": "x"}]`), want: "10.0.0.5:7000"},
		"a name":               {text: server(`"address": "node-1.example.com", "ports": [{"port": 7000}]`), want: `its address "node-1.example.com" is not an IP address, and its node has none`},
		"nothing yet":          {text: server(`"address": "", "ports": null`), want: `its address "" is not an IP address, and its node has none`},
		"no port":              {text: server(`"address": "10.0.0.1", "ports": []`), want: "it has no port"},
		"port 0":               {text: server(`"address": "10.0.0.1", "ports": [{"port": 0}]`), want: "its port is 0"},
		"port 65536":           {text: server(`"address": "10.0.0.1", "ports": [{"port": 65536}]`), want: "its port is 65536"},
		"no such address":      {text: server(`"address": "10.0.0.1", "ports": [{"port": 7000}]`), w: wants{address: "PodIP"}, want: "it has no PodIP"},
		"IPv6":                 {text: server(`"address": "2001:db8::5", "ports": [{"port": 7000}]`), want: "[2001:db8::5]:7000"},
		"v4-mapped":            {text: server(`"address": "::ffff:10.0.0.1", "ports": [{"port": 7000}]`), want: "10.0.0.1:7000"},
		"unspecified":          {text: server(`"address": "0.0.0.0", "ports": [{"port": 7000}]`), want: `its address "0.0.0.0" is not an IP address, and its node has none`},
	} {
		t.Run(name, func(t *testing.T) {
			var g gameServer
			if err := json.Unmarshal([]byte(tc.text), &g); err != nil {
				t.Fatal(err)
			}
			if tc.w.states == nil {
				tc.w.states = both
			}
			list := tc.w.add(nil, &g)
			got := ""
			var most int64
			if len(list) == 1 {
				if got = list[0].left; got == "" {
					got = list[0].at.Addr.String()
				} else if list[0].at.Addr.IsValid() {
					t.Errorf("left out, and at %v", list[0].at)
				}
				most = list[0].at.MaxSessions
			}
			if got != tc.want || most != tc.max {
				t.Errorf("got %q with %d, want %q with %d", got, most, tc.want, tc.max)
			}
		})
	}
}

func FuzzConcerns(f *testing.F) {
	for _, s := range []string{
		`{}`, `null`, `[]`, `{"metadata": {"name": "g", "deletionTimestamp": null}, "status": {"state": "Ready", "address": "10.0.0.1", "ports": [{"name": "game", "port": 7000}]}}`,
		`{"spec": {"ports": [{"containerPort": 1}]}, "status": {"state": "Ready", "addresses": [{"type": "PodIP", "address": "::1"}], "counters": {"players": {"capacity": 5}}}}`,
		`{"status": {"state": "Ready", "counters": {"players": null}, "lists": []}}`,
	} {
		f.Add([]byte(s), true)
		f.Add([]byte(s), false)
	}
	f.Fuzz(func(t *testing.T, b []byte, deleted bool) {
		for _, w := range []wants{{states: states, counter: "players"}, {states: states, address: podIP, list: "rooms"}} {
			a := &Source{wants: w}
			a.concerns(deleted, b)
			var g gameServer
			if json.Unmarshal(b, &g) != nil {
				continue
			}
			for _, s := range w.add(nil, &g) {
				if s.left == "" && (!s.at.Addr.Addr().IsValid() || s.at.Addr.Port() == 0 || s.at.MaxSessions < 0) {
					t.Errorf("%s: %+v", b, s)
				}
			}
		}
	})
}
