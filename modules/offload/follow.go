package offload

import (
	"net/netip"
	"slices"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
)

// What run does when a config or a list has changed: the table follows.

// follow makes the table what the last of uses wants.
func (k *Kernel) follow() {
	var want []*Scope
	if n := len(k.uses); n > 0 {
		k.set.Store(&k.uses[n-1].set)
		want = k.uses[n-1].scopes
	}
	if k.t != nil {
		k.count() // of listeners that are about to go
	}
	scopes := make(map[int]*scope)
	for _, w := range want {
		if !w.Guard {
			continue
		}
		id := k.id(w.Listener)
		s := k.scopes[id]
		if s == nil {
			s = &scope{id: id, blocked: make(map[source]time.Time), kept: make(map[netip.AddrPort]struct{})}
		}
		s.Scope, s.before, s.wanted = w, nil, nil
		scopes[id] = s
	}
	k.scopes = scopes
	if k.t == nil {
		return
	}
	if err := k.point(); err != nil {
		k.lost(err)
		return
	}
	for _, s := range scopes {
		k.updateDenied(s, false)
	}
	go k.call(func() { // behind whoever waits for this
		for _, s := range k.scopes {
			k.updateDenied(s, true)
		}
	})
}

// point tells the table who is guarded where.
func (k *Kernel) point() error {
	want := make(map[int]guardSpec)
	for id, s := range k.scopes {
		want[id] = guardSpec{s.Listener, [kinds]Rate{anIP: s.PerIP, aNet: s.PerNet}, k.set.Load().maxBlocked}
	}
	var scopes []*Scope
	if n := len(k.uses); n > 0 {
		scopes = k.uses[n-1].scopes
	}
	return k.t.point(targets(scopes, k.id), want)
}

// updateDenied asks the lists of a listener, and takes from the table who is on
// them no longer; with add it adds who is on them now.
func (k *Kernel) updateDenied(s *scope, add bool) {
	if k.t == nil {
		return
	}
	if s.Denied == nil {
		s.wanted = nil
	} else if rs, now := s.Denied(s.before); s.before == nil || now != s.before {
		s.before, s.wanted = now, rs.Without(notPlain)
	}
	if slices.Equal(s.wanted, s.denied) {
		return
	}
	if gone := rest(s.denied, s.wanted); len(gone) > 0 {
		if err := k.t.deny(s.id, gone, true); err != nil {
			k.lost(err)
			return
		}
		s.denied = rest(s.denied, gone)
	}
	more := rest(s.wanted, s.denied)
	if !add || len(more) == 0 {
		return
	}
	keep, fits := k.look(s, func(a netip.Addr) bool { return s.wanted.Contains(a) })
	if !fits {
		missed.WithLabelValues("kept").Inc()
		return // the next second tries again
	}
	if err := k.keep(s, keep); err == nil {
		if err := k.t.deny(s.id, more, false); err != nil {
			k.lost(err)
			return
		}
		s.denied = s.wanted
	}
}

// rest is what is in a and, just so, not in b. Both are sorted.
func rest(a, b cidr.Ranges) cidr.Ranges {
	var out cidr.Ranges
	for _, r := range a {
		for len(b) > 0 && b[0].First.Compare(r.First) < 0 {
			b = b[1:]
		}
		if len(b) == 0 || b[0] != r {
			out = append(out, r)
		}
	}
	return out
}

// look finds the clients with sessions whose source is to be turned away, and
// reports whether the table can keep them all.
func (k *Kernel) look(s *scope, away func(plain netip.Addr) bool) (keep []netip.AddrPort, fits bool) {
	fits = true
	k.Flows(func(c netip.AddrPort) bool {
		a := cidr.Plain(c.Addr())
		c = netip.AddrPortFrom(a, c.Port())
		if _, known := s.kept[c]; known || !away(a) {
			return true
		}
		keep = append(keep, c)
		fits = len(s.kept)+len(keep) <= maxKept
		return fits
	})
	return keep, fits
}

// keep has the table keep clients of a listener.
func (k *Kernel) keep(s *scope, clients []netip.AddrPort) error {
	clients = slices.DeleteFunc(clients, func(c netip.AddrPort) bool { // one client may have several sessions
		_, known := s.kept[c]
		s.kept[c] = struct{}{}
		return known
	})
	if len(clients) == 0 {
		return nil
	}
	err := k.t.keep(s.id, clients, false)
	if err != nil {
		k.lost(err)
	}
	return err
}
