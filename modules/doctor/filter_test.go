package doctor

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
)

// ruleset is as nft prints it: rules of a table inet, and what is around them.
func ruleset(more string, rules ...string) string {
	s := `{"nftables": [{"metainfo": {"version": "1.0.6", "release_name": "Lester Gooch #5", "json_schema_version": 1}},
		{"table": {"family": "inet", "name": "w", "handle": 1}}, ` + more + `
		{"chain": {"family": "inet", "table": "w", "name": "p", "handle": 1, "type": "filter", "hook": "prerouting", "prio": -150, "policy": "accept"}}`
	for _, r := range rules {
		chain := "p"
		if name, rest, ok := strings.Cut(r, ": "); ok && !strings.Contains(name, "{") {
			chain, r = name, rest
		}
		s += fmt.Sprintf(`, {"rule": {"family": "inet", "table": "w", "chain": %q, "handle": 2, "expr": [%s]}}`, chain, r)
	}
	return s + "]}"
}

const (
	daddr4   = `{"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "daddr"}}, "right": {"prefix": {"addr": "198.51.100.0", "len": 24}}}}`
	l4both   = `{"match": {"op": "==", "left": {"meta": {"key": "l4proto"}}, "right": {"set": ["tcp", "udp"]}}}`
	dportTCP = `{"match": {"op": "==", "left": {"payload": {"protocol": "tcp", "field": "dport"}}, "right": "@ports"}}`
	socket   = `{"match": {"op": "==", "left": {"socket": {"key": "transparent"}}, "right": 1}}`
	mark1    = `{"mangle": {"key": {"meta": {"key": "mark"}}, "value": 1}}`
	accept   = `{"accept": null}`
)

func TestReadNft(t *testing.T) {
	for name, tc := range map[string]struct {
		more  string
		rules []string
		want  Filter
	}{
		"nothing":     {},
		"for IPv4":    {rules: []string{daddr4 + "," + l4both + `, {"tproxy": {"family": "ip", "port": 7777}}, ` + mark1 + "," + accept}, want: Filter{Tproxy: []Tproxy{{"ip", both, 7777, 1}}}},
		"for both":    {rules: []string{l4both + `, {"tproxy": {"port": 7777}}, ` + mark1}, want: Filter{Tproxy: []Tproxy{{"", both, 7777, 1}}}},
		"by address":  {rules: []string{daddr4 + `, {"tproxy": {"port": 7777}}, ` + mark1}, want: Filter{Tproxy: []Tproxy{{"ip", both, 7777, 1}}}},
		"over TCP":    {rules: []string{dportTCP + `, {"tproxy": {"family": "ip6", "port": 7777}}, ` + mark1}, want: Filter{Tproxy: []Tproxy{{"ip6", TCP, 7777, 1}}}},
		"by number":   {rules: []string{`{"match": {"op": "==", "left": {"meta": {"key": "l4proto"}}, "right": 17}}, {"tproxy": {"port": 7}}`}, want: Filter{Tproxy: []Tproxy{{"", UDP, 7, 0}}}},
		"but not TCP": {rules: []string{`{"match": {"op": "!=", "left": {"payload": {"protocol": "ip", "field": "protocol"}}, "right": "tcp"}}, {"tproxy": {"port": 7}}`}, want: Filter{Tproxy: []Tproxy{{"", both, 7, 0}}}},
		"to a map of ports": {
			rules: []string{`{"tproxy": {"family": "ip", "port": {"map": {"key": {"payload": {"protocol": "th", "field": "dport"}}, "data": {"set": [[7, 77], [{"range": [8, 9]}, 88]]}}}}}, ` + mark1},
			want:  Filter{Tproxy: []Tproxy{{"ip", both, 77, 1}, {"ip", both, 88, 1}}},
		},
		"to a map with a name": {
			more:  `{"map": {"family": "inet", "name": "to", "table": "w", "type": "inet_service", "handle": 3, "map": "inet_service", "elem": [[7, 77]]}}, {"map": {"family": "ip", "name": "to", "table": "w", "elem": [[7, 78]]}},`,
			rules: []string{`{"tproxy": {"family": "ip", "port": {"map": {"key": {"payload": {"protocol": "th", "field": "dport"}}, "data": "@to"}}}}, ` + mark1},
			want:  Filter{Tproxy: []Tproxy{{"ip", both, 77, 1}}},
		},
		"marked before":    {rules: []string{mark1, `{"tproxy": {"port": 7}}`}, want: Filter{Tproxy: []Tproxy{{"", both, 7, 1}}}},
		"marked elsewhere": {rules: []string{"q: " + mark1, `{"tproxy": {"port": 7}}`}, want: Filter{Tproxy: []Tproxy{{"", both, 7, 0}}}},
		"marked besides": {
			rules: []string{`{"tproxy": {"port": 7}}, {"mangle": {"key": {"meta": {"key": "mark"}}, "value": {"|": [{"meta": {"key": "mark"}}, 16]}}}`},
			want:  Filter{Tproxy: []Tproxy{{"", both, 7, 16}}},
		},
		"answers":               {rules: []string{l4both + "," + socket + "," + mark1 + "," + accept}, want: Filter{Marked: [families]Protos{both, both}}},
		"answers over TCP":      {rules: []string{daddr4 + "," + dportTCP + "," + socket + "," + mark1}, want: Filter{Marked: [families]Protos{TCP, 0}}},
		"answers by a chain":    {rules: []string{socket + `, {"jump": {"target": "divert"}}`, "divert: " + mark1}, want: Filter{Marked: [families]Protos{both, both}}},
		"answers without":       {rules: []string{socket + "," + accept, socket + `, {"goto": {"target": "divert"}}`, "divert: " + accept, mark1}},
		"UDP is not tracked":    {rules: []string{`{"match": {"op": "==", "left": {"payload": {"protocol": "udp", "field": "dport"}}, "right": 7}}, {"notrack": null}`}, want: Filter{NoTrack: UDP}},
		"tracked by a state":    {rules: []string{`{"vmap": {"key": {"ct": {"key": "state"}}, "data": {"set": [["established", {"accept": null}]]}}}`}, want: Filter{Tracked: true}},
		"tracked for NAT":       {more: `{"chain": {"family": "ip", "table": "n", "name": "post", "handle": 1, "type": "nat", "hook": "postrouting", "prio": 100, "policy": "accept"}},`, want: Filter{Tracked: true}},
		"managed by iptables":   {rules: []string{`{"xt": null}`, `{"xt": {"type": "target", "name": "TPROXY"}}`}},
		"other shapes than now": {rules: []string{`{"tproxy": 7}, {"mangle": {"key": "x", "value": {"set": []}}}, {"match": null}, {"jump": 3}`}},
	} {
		t.Run(name, func(t *testing.T) {
			var got Filter
			if err := got.readNft([]byte(ruleset(tc.more, tc.rules...))); err != nil || !reflect.DeepEqual(got, tc.want) {
				t.Errorf("read as %+v, %v, want %+v", got, err, tc.want)
			}
		})
	}
	if err := new(Filter).readNft([]byte("table inet w {")); err == nil {
		t.Error("text is read as JSON")
	}
}

func TestReadIptables(t *testing.T) {
	for name, tc := range map[string]struct {
		saved string
		v6    bool
		want  Filter
	}{
		"nothing": {saved: "# Generated by iptables-save\n*mangle\n:PREROUTING ACCEPT [0:0]\nCOMMIT\n"},
		"both protocols": {
			saved: "*mangle\n:DIVERT - [0:0]\n" +
				"-A PREROUTING -p tcp -m socket --transparent -j DIVERT\n-A PREROUTING -p udp -m socket --transparent -j DIVERT\n" +
				"-A PREROUTING -d 198.51.100.0/24 -p tcp -m tcp --dport 7777 -j TPROXY --on-port 7777 --on-ip 0.0.0.0 --tproxy-mark 0x1/0xffffffff\n" +
				"-A PREROUTING -d 198.51.100.0/24 -p udp -m udp --dport 7777 -j TPROXY --on-port 7777 --on-ip 0.0.0.0 --tproxy-mark 0x1/0x1\n" +
				"-A DIVERT -j MARK --set-xmark 0x1/0xffffffff\n-A DIVERT -j ACCEPT\nCOMMIT\n",
			want: Filter{Tproxy: []Tproxy{{"ip", TCP, 7777, 1}, {"ip", UDP, 7777, 1}}, Marked: [families]Protos{both, 0}},
		},
		"IPv6, any protocol": {
			saved: "*mangle\n-A PREROUTING -m socket -j MARK --set-mark 2\n-A PREROUTING -m comment --comment \"to \\\"us\\\", -p tcp\" -j TPROXY --on-port 7 --tproxy-mark 2\n", v6: true,
			want: Filter{Tproxy: []Tproxy{{"ip6", both, 7, 2}}, Marked: [families]Protos{0, both}},
		},
		"no mark":        {saved: "*mangle\n-A PREROUTING -p udp -j TPROXY --on-port 7 --on-ip 0.0.0.0 --tproxy-mark 0x0/0x0\n", want: Filter{Tproxy: []Tproxy{{"ip", UDP, 7, 0}}}},
		"marked before":  {saved: "*mangle\n-A PREROUTING -p udp -j MARK --set-xmark 0x3/0xff\n-A PREROUTING -p udp -j TPROXY --on-port 7\n", want: Filter{Tproxy: []Tproxy{{"ip", UDP, 7, 3}}}},
		"diverted alone": {saved: "*mangle\n-A PREROUTING -p tcp -m socket --transparent -j DIVERT\n-A DIVERT -j ACCEPT\n*raw\n-A DIVERT -j MARK --set-mark 1\n"},
		"UDP untracked":  {saved: "*raw\n-A PREROUTING -p udp -m udp --dport 7777 -j CT --notrack\n-A OUTPUT -p tcp -j NOTRACK\n", want: Filter{NoTrack: both}},
		"a zone":         {saved: "*raw\n-A PREROUTING -p udp -j CT --zone 1\n"},
		"by a state":     {saved: "*filter\n-A INPUT -m conntrack --ctstate ESTABLISHED -j ACCEPT\n", want: Filter{Tracked: true}},
		"for NAT":        {saved: "*nat\n-A POSTROUTING -o eth0 -j MASQUERADE\n", want: Filter{Tracked: true}},
	} {
		t.Run(name, func(t *testing.T) {
			var got Filter
			if got.readIptables([]byte(tc.saved), tc.v6); !reflect.DeepEqual(got, tc.want) {
				t.Errorf("read as %+v, want %+v", got, tc.want)
			}
		})
	}
}

// FuzzReadNft: what is read of any ruleset is something that can be redirected
// to, and the same every time.
func FuzzReadNft(f *testing.F) {
	f.Add([]byte(ruleset("", l4both+","+socket+","+mark1, daddr4+","+dportTCP+`, {"tproxy": {"port": 7}}, `+mark1)))
	f.Add([]byte(ruleset(`{"map": {"family": "inet", "name": "to", "table": "w", "elem": [[7, 77]]}},`, `{"tproxy": {"port": {"map": {"data": "@to"}}}}`)))
	f.Add([]byte(`{"nftables": [{"rule": {"expr": [{"tproxy": {"port": {"map": {"data": {"set": [[1], [1, 2, 3], 4]}}}}}, null, {"match": {"right": {"set": [{"set": [6]}]}}}]}}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var one, two Filter
		err := one.readNft(b)
		if again := two.readNft(b); (err == nil) != (again == nil) || !reflect.DeepEqual(one, two) {
			t.Errorf("read as %+v, %v and then as %+v, %v", one, err, two, again)
		}
		checkFilter(t, &one)
	})
}

// FuzzReadIptables is the same for iptables-save.
func FuzzReadIptables(f *testing.F) {
	f.Add([]byte("*mangle\n-A PREROUTING -p tcp -m socket --transparent -j DIVERT\n-A DIVERT -j MARK --set-xmark 0x1/0xff\n"), false)
	f.Add([]byte("*mangle\n-A P ! -p udp -m comment --comment \"a \\\" b\" -j TPROXY --on-port 7 --tproxy-mark 0x1/0x1\n*raw\n-A P -j CT --notrack"), true)
	f.Fuzz(func(t *testing.T, b []byte, v6 bool) {
		var s Filter
		s.readIptables(b, v6)
		checkFilter(t, &s)
	})
}

func checkFilter(t *testing.T, f *Filter) {
	for _, p := range f.Tproxy {
		if p.Protos > both || p.Family != "" && p.Family != "ip" && p.Family != "ip6" {
			t.Errorf("a rule that redirects %+v", p)
		}
	}
	if f.NoTrack|f.Marked[v4]|f.Marked[v6] > both {
		t.Errorf("%+v is of other protocols", f)
	}
}
