package flow

import (
	"cmp"
	"slices"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// Totals are what a listener has now and has had since the process began.
type Totals struct {
	Conns, Sessions           int64  // live, TCP and UDP
	ConnsEnded, SessionsEnded uint64 // since the process began
	BytesC2S, BytesS2C        uint64
	PacketsC2S, PacketsS2C    uint64
	Dropped                   uint64 // datagrams that were not passed on, those that filters keep out included
}

// Totals adds up the counters of the listener. They are read one after the
// other and need not be of one moment.
func (l *Listener) Totals() Totals {
	t := Totals{Conns: l.Conns.Load(), Sessions: l.Sessions.Load()}
	for why := range l.closed[0] {
		t.ConnsEnded += l.closed[0][why].Load()
		t.SessionsEnded += l.closed[1][why].Load()
	}
	l.each(func(c *relay.Counters) {
		t.BytesC2S += c.BytesC2S.Load()
		t.BytesS2C += c.BytesS2C.Load()
		t.PacketsC2S += c.PacketsC2S.Load()
		t.PacketsS2C += c.PacketsS2C.Load()
		for i := range c.Dropped {
			t.Dropped += c.Dropped[i].Load()
		}
	})
	return t
}

// Listeners are those that the process has had so far, by name.
func Listeners() []*Listener {
	p := everyListener.Load()
	if p == nil {
		return nil
	}
	all := slices.Clone(*p)
	slices.SortFunc(all, func(a, b *Listener) int { return cmp.Compare(a.Name, b.Name) })
	return all
}
