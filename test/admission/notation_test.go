package admission

import (
	"encoding/hex"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/internal/ticket"
)

// notations are the forms in which a config or an operator may write an IPv4
// address.
func notations(a string) []string {
	b := netip.MustParseAddr(a).As4()
	return []string{a, "::ffff:" + a, fmt.Sprintf("::ffff:%x:%x", uint16(b[0])<<8|uint16(b[1]), uint16(b[2])<<8|uint16(b[3])), "::" + a}
}

// TestNotations is D27: a rule in whatever form, and a client that arrives at a
// socket of its family or at one of both, where the kernel shows it mapped: the
// verdict is the same.
func TestNotations(t *testing.T) {
	const known, other = "127.0.0.2", "127.0.0.3"
	key := []byte("0123456789abcdef0123456789abcdef")
	type check struct {
		name, network, addr, rule string
		in, out                   string // who is let in, and who is not
		first                     []byte
	}
	var checks []check
	listeners, pools := kit.M{}, game(t)
	add := func(kind, rule, in, out string, l func(toPool kit.M) kit.M, first []byte) {
		for _, network := range networks {
			for at, bind := range map[string]string{"both families": "%s/:%d", "one family": "%s/0.0.0.0:%d"} {
				port := kit.Port(t)
				name := fmt.Sprintf("l%d", len(checks))
				listeners[name] = kit.With(l(kit.M{"handler": "pool", "pool": network}), kit.M{"bind": kit.A{fmt.Sprintf(bind, network, port)}})
				checks = append(checks, check{fmt.Sprint(kind, " ", network, " ", at), network, kit.Local(port), rule, in, out, first})
			}
		}
	}
	filtered := func(f kit.M) func(kit.M) kit.M {
		return func(toPool kit.M) kit.M {
			return kit.With(kit.Listener(nil, kit.Route(toPool)), kit.M{"filters": kit.A{f}})
		}
	}
	for _, form := range notations(known) {
		add("acl deny "+form, "acl", other, known, filtered(kit.M{"filter": "acl", "deny": kit.A{form}}), nil)
		add("acl allow "+form, "acl", known, other, filtered(kit.M{"filter": "acl", "allow": kit.A{form}}), nil)
		add("client_cidr "+form, "no_route", known, other, func(toPool kit.M) kit.M {
			return kit.Listener(nil, kit.Match(kit.M{"client_cidr": kit.M{"cidrs": kit.A{form}}}, toPool))
		}, nil)
		bound, err := ticket.Mint(key, "p", time.Now().Add(time.Hour), netip.MustParseAddr(form))
		if err != nil {
			t.Fatal(err)
		}
		shown := func(toPool kit.M) kit.M {
			return kit.Listener(nil, kit.Match(kit.M{"ticket": kit.M{"keys": kit.A{"hex:" + hex.EncodeToString(key)}, "pool": "p", "bind_ip": true, "offset": ticketAt}}, toPool))
		}
		if !strings.HasPrefix(form, "::127") { // which no client is, and a ticket is for a client
			add("ticket "+form, "no_route", known, other, shown, bound)
		}
	}
	add("geo", "geo", other, known, filtered(kit.M{"filter": "geo", "deny": kit.A{"DE"}}), nil)
	hinted := func(kit.M) kit.M {
		return kit.With(kit.Listener(nil, kit.Match(kit.M{"client_cidr": kit.M{"cidrs": kit.A{"192.0.2.1"}}}, kit.M{"handler": "pool", "pool": "tcp"})), kit.M{"route_hint": true})
	}
	beforeHints := len(checks)
	add("hint", "no_route", known, other, hinted, nil)

	p := kit.Start(t, kit.App(listeners, pools, kit.M{"geo_db": countries(t, known+"/32", "DE")}), kit.Options{})
	run := func(c check, name string) {
		t.Run(c.name, func(t *testing.T) {
			in := dial(t, c.network, c.in, c.addr)
			in.ticket = c.first
			in.served()
			before := refusals(p, name, c.rule)
			out := dial(t, c.network, c.out, c.addr)
			out.ticket = c.first
			out.ask()
			kit.Settles(t, "the count of "+c.rule, before+1, func() float64 { return refusals(p, name, c.rule) })
			out.silence()
		})
	}
	for i, c := range checks[:beforeHints] {
		run(c, fmt.Sprintf("l%d", i))
	}
	for _, form := range notations(known) {
		for i, c := range checks[beforeHints:] {
			if status, body := p.Do(http.MethodPost, "/route-hint", fmt.Appendf(nil, `{"src_ip": %q, "pool": %q}`, form, c.network)); status != http.StatusNoContent {
				t.Fatalf("hint for %s: %d %s", form, status, body)
			}
			c.name += " " + form
			run(c, fmt.Sprintf("l%d", beforeHints+i))
			if status, body := p.Do(http.MethodDelete, "/route-hints/"+form, nil); status != http.StatusNoContent {
				t.Fatalf("no hint for %s: %d %s", form, status, body)
			}
		}
	}
}

// TestOneBucket: a client has one bucket and one count on a listener, whichever
// socket it arrives at.
func TestOneBucket(t *testing.T) {
	for rule, f := range map[string]kit.M{
		"rate_ip":      {"filter": "rate_limit", "per_ip": kit.M{"rate": 1, "burst": 4}},
		"rate_net":     {"filter": "rate_limit", "per_net": kit.M{"rate": 1, "burst": 4}},
		"src_conn_ip":  {"filter": "source_limit", "max_per_ip": 4},
		"src_conn_net": {"filter": "source_limit", "max_per_net": 4},
	} {
		t.Run(rule, func(t *testing.T) {
			dual, single := kit.Port(t), kit.Port(t)
			p := kit.Start(t, kit.App(kit.M{"l": kit.With(
				kit.ToPool("udp", fmt.Sprintf("udp/:%d", dual), fmt.Sprintf("udp/0.0.0.0:%d", single)),
				kit.M{"filters": kit.A{f}})}, game(t)), kit.Options{})
			for range 2 {
				for _, port := range []int{dual, single} {
					dial(t, "udp", "127.0.0.1", kit.Local(port)).served()
				}
			}
			for i, port := range []int{dual, single} {
				c := dial(t, "udp", "127.0.0.1", kit.Local(port))
				c.ask()
				kit.Settles(t, "the count of "+rule, float64(i+1), func() float64 { return refusals(p, "l", rule) })
				c.silence()
			}
		})
	}
}
