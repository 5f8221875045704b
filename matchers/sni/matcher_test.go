package sni

import (
	"bytes"
	"fmt"
	"net"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/mholt/caddy-l4/layer4"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/firstpackets"
	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// asked is a connection on which a client has sent a first packet, and what a
// listener shows of it.
func asked(t testing.TB, id string) (cx *layer4.Connection, f *sniff.Flow, b []byte, datagrams [][]byte) {
	t.Helper()
	c := firstpackets.One(t, id)
	b = bytes.Join(c.Data(t), nil)
	if c.UDP() {
		datagrams = c.Data(t)
	}
	near, far := net.Pipe()
	t.Cleanup(func() { near.Close(); far.Close() })
	return layer4.WrapConnection(near, b, zap.NewNop()), sniff.NewFlow(nil), b, datagrams
}

func matcher(t testing.TB, hosts ...string) *Matcher {
	m := &Matcher{Host: hosts}
	if err := m.Provision(caddy.Context{}); err != nil {
		t.Fatal(err)
	}
	return m
}

// The name is read once for all routes of a flow.
func TestNoAllocations(t *testing.T) {
	cx, f, b, _ := asked(t, "tls-chrome133")
	other, this := matcher(t, "other.example"), matcher(t, "*.example.com")
	f.Show(cx, b, nil)
	if ok, err := this.Match(cx); !ok || err != nil {
		t.Fatalf("%v, %v", ok, err)
	}
	if n := testing.AllocsPerRun(100, func() {
		f.Show(cx, b, nil)
		other.Match(cx)
		this.Match(cx)
	}); n > 0 && !testkit.Race {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkMatch(b *testing.B) {
	for _, id := range []string{"tls-chrome133", "quic-v1-quicgo"} {
		for _, routes := range []int{1, 20} {
			b.Run(fmt.Sprintf("%s/%d routes", id, routes), func(b *testing.B) {
				cx, _, bytes, datagrams := asked(b, id)
				var list []*Matcher
				for i := range routes {
					list = append(list, matcher(b, fmt.Sprintf("h%d.other.example", i)))
				}
				b.ReportAllocs()
				for b.Loop() {
					f := sniff.NewFlow(nil)
					f.Show(cx, bytes, datagrams)
					for _, m := range list {
						m.Match(cx)
					}
				}
			})
		}
	}
}
