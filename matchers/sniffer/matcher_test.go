package sniffer

import (
	"errors"
	"net"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/mholt/caddy-l4/layer4"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/firstpackets"
	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
	_ "github.com/wayhouse-proxy/wayhouse/modules/sniff/native"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// While the protocol is certain and the host is not, a route that wants a host
// waits, one that does not matches, and what no host can change is no.
func TestPartial(t *testing.T) {
	ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
	defer cancel()
	c := firstpackets.One(t, "quic-pq-2-v1")
	both := c.Data(t)
	for name, tc := range map[string]struct {
		m         Matcher
		one, then string
	}{
		"the host":          {Matcher{Host: []string{"pq-quic.example.com"}}, "undecided", "yes"},
		"another":           {Matcher{Host: []string{"other.example"}}, "undecided", "no"},
		"any":               {Matcher{}, "yes", "yes"},
		"the key":           {Matcher{Key: []string{"quic"}}, "yes", "yes"},
		"the host, the key": {Matcher{Host: []string{"*.example.com"}, Key: []string{"quic"}}, "undecided", "yes"},
		"another key":       {Matcher{Key: []string{"tls"}}, "undecided", "no"},
	} {
		t.Run(name, func(t *testing.T) {
			m := tc.m
			m.Name = "quic"
			if err := m.Provision(ctx); err != nil {
				t.Fatal(err)
			}
			var plan sniff.Plan
			plan.Add(&m)
			f := sniff.NewFlow(plan)
			near, far := net.Pipe()
			defer near.Close()
			defer far.Close()
			for n, want := range []string{tc.one, tc.then} {
				shown := make([]byte, 0, 1<<14)
				for _, d := range both[:n+1] {
					shown = append(shown, d...)
				}
				cx := layer4.WrapConnection(near, shown, zap.NewNop())
				f.Show(cx, shown, both[:n+1])
				ok, err := m.Match(cx)
				got := map[bool]string{true: "yes", false: "no"}[ok]
				if errors.Is(err, layer4.ErrConsumedAllPrefetchedBytes) {
					got = "undecided"
				} else if err != nil {
					t.Fatal(err)
				}
				if got != want {
					t.Errorf("after %d datagrams: %s, want %s", n+1, got, want)
				}
			}
		})
	}
}
