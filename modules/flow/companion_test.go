package flow

import (
	"net/netip"
	"testing"
	"testing/synctest"
	"time"
)

// TestCompanion has two players behind one address, each at a backend.
func TestCompanion(t *testing.T) {
	a, b := netip.MustParseAddrPort("10.0.0.1:1"), netip.MustParseAddrPort("10.0.0.2:1")
	home := netip.MustParseAddr("203.0.113.7")
	const window = 30 * time.Second
	for name, tc := range map[string]struct {
		do          func(*Listener)
		want, later netip.AddrPort // the zero value: none
	}{
		"one":                     {func(l *Listener) { l.Reached(home, a) }, a, a},
		"has left":                {func(l *Listener) { l.Reached(home, a); l.Left(home, a) }, a, netip.AddrPort{}},
		"moves":                   {func(l *Listener) { l.Reached(home, a); l.Reached(home, b); l.Left(home, a) }, b, b},
		"has moved and left":      {func(l *Listener) { l.Reached(home, a); l.Reached(home, b); l.Left(home, a); l.Left(home, b) }, b, netip.AddrPort{}},
		"the second has left":     {func(l *Listener) { l.Reached(home, a); l.Reached(home, b); l.Left(home, b) }, b, a},
		"the first has joined":    {func(l *Listener) { l.Reached(home, a); l.Reached(home, b); l.Reached(home, a); l.Left(home, a) }, a, a},
		"back after a while":      {func(l *Listener) { l.Reached(home, a); l.Reached(home, b); l.Left(home, b); l.Reached(home, b) }, b, b},
		"before anybody followed": {func(l *Listener) { l.Left(home, a); l.Reached(home, b) }, b, b},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := new(Listener)
				l.Track()
				defer l.Untrack()
				tc.do(l)
				if got, ok := l.Companion(home, window); got != tc.want || ok != tc.want.IsValid() {
					t.Errorf("at once: %v, %v, want %v", got, ok, tc.want)
				}
				time.Sleep(window + 1)
				got, ok := l.Companion(home, window)
				if ok != tc.later.IsValid() || ok && got != tc.later {
					t.Errorf("after the window: %v, %v, want %v", got, ok, tc.later)
				}
			})
		})
	}
}

// TestCompanionsAreBounded fills a part with sources that are there: no other
// one is remembered, and one that has gone makes room.
func TestCompanionsAreBounded(t *testing.T) {
	l := new(Listener)
	l.Track()
	defer l.Untrack()
	a, b := netip.MustParseAddrPort("10.0.0.1:1"), netip.MustParseAddrPort("10.0.0.2:1")
	p := l.companions.Load().part(netip.MustParseAddr("10.0.0.0"))
	var in []netip.Addr
	for s := netip.MustParseAddr("10.0.0.0"); len(in) < companionPerPart+1; s = s.Next() {
		if l.companions.Load().part(s) == p {
			in = append(in, s)
		}
	}
	last := in[companionPerPart]
	for _, s := range in[:companionPerPart] {
		l.Reached(s, a)
		l.Reached(s, b)
		l.Left(s, b)
	}
	l.Reached(last, a)
	if _, ok := l.Companion(last, time.Hour); ok || len(p.sources) != companionPerPart {
		t.Errorf("%d sources, the one too many is remembered: %v", len(p.sources), ok)
	}
	l.Left(in[0], a)
	l.Reached(last, a)
	if _, ok := l.Companion(last, time.Hour); !ok || len(p.sources) != companionPerPart {
		t.Errorf("%d sources, the one that there was room for is remembered: %v", len(p.sources), ok)
	}
}
