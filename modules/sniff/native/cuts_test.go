package native

import (
	"bytes"
	"net"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/mholt/caddy-l4/layer4"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/firstpackets"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

// outcome is what all routes of a listener can learn of a flow.
type outcome struct {
	winner, host, name string
	verdict, named     sniff.Verdict
}

func of(f *sniff.Flow) (o outcome) {
	winner, v, h := f.Decide()
	if o.verdict = v; winner != nil {
		o.winner, o.host = winner.Name, string(h.Host)
	}
	name, v := f.ServerName()
	o.name, o.named = string(name), v
	return o
}

// FuzzCuts shows a flow the same stream at once and in pieces: in the end it is
// the same to every route. openvpn is left out: it takes nothing that follows
// its packet, and at a cut behind the packet nothing has.
func FuzzCuts(f *testing.F) {
	ctx, cancel := caddy.NewContext(caddy.Context{Context: f.Context()})
	f.Cleanup(cancel)
	set, err := sniff.NewSet(ctx, nil)
	if err != nil {
		f.Fatal(err)
	}
	var plan sniff.Plan
	for _, name := range []string{"minecraft", "stun", "quic"} {
		n, err := set.Get(name)
		if err != nil {
			f.Fatal(err)
		}
		plan = append(plan, n)
	}
	near, far := net.Pipe()
	f.Cleanup(func() { near.Close(); far.Close() })
	for _, c := range firstpackets.All(f) {
		if !c.UDP() {
			f.Add(bytes.Join(c.Data(f), nil), uint16(1), uint16(30))
		}
	}
	f.Fuzz(func(t *testing.T, stream []byte, a, b uint16) {
		cx := layer4.WrapConnection(near, nil, zap.NewNop())
		whole, pieces := sniff.NewFlow(plan), sniff.NewFlow(plan)
		whole.Show(cx, stream, nil)
		want := of(whole)
		for _, n := range []int{min(int(a), int(b)), max(int(a), int(b)), len(stream)} {
			n = min(n, len(stream))
			pieces.Show(cx, stream[:n], nil)
			if now := of(pieces); now.verdict == sniff.Recognised && (now.winner != want.winner || now.host != want.host) || now.named == sniff.Recognised && now.name != want.name {
				t.Fatalf("%d bytes of %d: %+v, all: %+v", n, len(stream), now, want)
			}
		}
		if got := of(pieces); got != want {
			t.Errorf("in pieces %+v, at once %+v", got, want)
		}
		pieces.End()
		whole.End()
		if got, want := of(pieces), of(whole); got != want {
			t.Errorf("at the end, in pieces %+v, at once %+v", got, want)
		}
	})
}
