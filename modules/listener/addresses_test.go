package listener

import (
	"net/netip"
	"strings"
	"testing"
)

func TestAddressOptions(t *testing.T) {
	for name, tc := range map[string]struct {
		l    *Listener
		bind []string
		err  string
	}{
		"none":                         {bind: []string{"udp/10.0.0.1:7777"}},
		"prefix":                       {l: &Listener{Prefix: "2001:db8::/64"}, bind: []string{"udp/[::]:7777", "tcp/:7777"}},
		"prefix of IPv4":               {l: &Listener{Prefix: "198.51.100.0/24"}, bind: []string{"udp/0.0.0.0:7777"}},
		"prefix beside an address":     {l: &Listener{Prefix: "198.51.100.0/24"}, bind: []string{"udp/198.51.100.1:7777"}, err: "write udp/0.0.0.0:7777"},
		"prefix of the other family":   {l: &Listener{Prefix: "198.51.100.0/24"}, bind: []string{"udp/[::]:7777"}, err: "prefix: udp/[::]:7777 is not the wildcard address of IPv4"},
		"prefix of IPv6 on IPv4":       {l: &Listener{Prefix: "2001:db8::/64"}, bind: []string{"tcp/0.0.0.0:7777"}, err: "write tcp/[::]:7777"},
		"prefix with a range":          {l: &Listener{Prefix: "198.51.100.0/24"}, bind: []string{"udp/0.0.0.0:7777-7778"}, err: "a prefix takes one"},
		"prefix and transparent":       {l: &Listener{Prefix: "198.51.100.0/24", Transparent: true}, bind: []string{"udp/0.0.0.0:7777"}, err: "transparent: the listener has a prefix"},
		"prefix and freebind":          {l: &Listener{Prefix: "198.51.100.0/24", FreeBind: true}, bind: []string{"udp/0.0.0.0:7777"}, err: "freebind: the listener has a prefix"},
		"freebind and transparent":     {l: &Listener{FreeBind: true, Transparent: true}, bind: []string{"udp/198.51.100.1:7777"}},
		"transparent on every address": {l: &Listener{Transparent: true}, bind: []string{"tcp/:7777", "udp/:30000-30099"}},
	} {
		t.Run(name, func(t *testing.T) {
			l := tc.l
			if l == nil {
				l = new(Listener)
			}
			for _, s := range tc.bind {
				b, err := ParseBind(s)
				if err != nil {
					t.Fatal(err)
				}
				l.binds = append(l.binds, b...)
			}
			if l.Prefix != "" {
				l.prefix = netip.MustParsePrefix(l.Prefix)
			}
			err := l.checkAddresses()
			if (err != nil) != (tc.err != "") || err != nil && !strings.Contains(err.Error(), tc.err) {
				t.Errorf("checkAddresses: %v, want %q", err, tc.err)
			}
		})
	}
}

func TestPrefixesOfOthers(t *testing.T) {
	prefix := func(p string, bind string) *Listener {
		l := &Listener{path: "listeners.wide", prefix: netip.MustParsePrefix(p)}
		l.binds, _ = ParseBind(bind)
		return l
	}
	for name, tc := range map[string]struct{ bind, err string }{
		"inside, same port":         {"udp/198.51.100.7:7777", "listeners.wide.prefix: 198.51.100.0/24 covers udp/198.51.100.7:7777, which the listener narrow binds"},
		"inside, a port of several": {"udp/198.51.100.7:7770-7779", "covers udp/198.51.100.7:7777"},
		"inside, another port":      {"udp/198.51.100.7:7778", ""},
		"inside, TCP":               {"tcp/198.51.100.7:7777", ""},
		"outside":                   {"udp/203.0.113.7:7777", ""},
	} {
		t.Run(name, func(t *testing.T) {
			narrow := new(Listener)
			narrow.binds, _ = ParseBind(tc.bind)
			err := CheckPrefixes(map[string]*Listener{"wide": prefix("198.51.100.0/24", "udp/0.0.0.0:7777"), "narrow": narrow})
			if (err != nil) != (tc.err != "") || err != nil && !strings.Contains(err.Error(), tc.err) {
				t.Errorf("CheckPrefixes: %v, want %q", err, tc.err)
			}
		})
	}
}
