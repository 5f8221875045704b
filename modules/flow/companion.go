package flow

import (
	"hash/maphash"
	"net/netip"
	"sync"
	"time"
)

// companions remember which backend a source's TCP connections on a listener
// go to, so that its UDP sessions can go where they do. The table is kept only
// while a handler follows the listener, and it is bounded: a source that finds
// its part full is not remembered.
type companions struct {
	parts [companionParts]companionPart
}

const (
	companionParts   = 32
	companionPerPart = 200_000 / companionParts
)

type companionPart struct {
	mu      sync.Mutex
	sources map[netip.Addr]companion
}

// companion is the last backend of a source and how many connections it has
// there now, and the backend before that.
type companion struct {
	backend netip.AddrPort
	flows   int
	ended   time.Time // when flows became 0

	before netip.AddrPort
	others int // connections there
}

var companionSeed = maphash.MakeSeed()

func (c *companions) part(source netip.Addr) *companionPart {
	return &c.parts[maphash.Comparable(companionSeed, source)%companionParts]
}

// Track begins to remember; every Track is undone by Untrack.
func (l *Listener) Track() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.followers++; l.followers == 1 {
		l.companions.Store(new(companions))
	}
}

// Untrack undoes Track. With the last one what is known is forgotten.
func (l *Listener) Untrack() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.followers--; l.followers == 0 {
		l.companions.Store(nil)
	}
}

// Tracked reports whether anybody follows the listener.
func (l *Listener) Tracked() bool { return l.companions.Load() != nil }

// Reached notes that a connection of a source has reached a backend. Left is
// called at its end.
func (l *Listener) Reached(source netip.Addr, backend netip.AddrPort) {
	c := l.companions.Load()
	if c == nil {
		return
	}
	p := c.part(source)
	p.mu.Lock()
	defer p.mu.Unlock()
	was, known := p.sources[source]
	if !known && len(p.sources) >= companionPerPart && !p.makeRoom() {
		return
	}
	if p.sources == nil {
		p.sources = make(map[netip.Addr]companion)
	}
	p.sources[source] = was.reached(backend)
}

func (c companion) reached(backend netip.AddrPort) companion {
	switch {
	case c.backend == backend:
		c.flows++
		return c
	case c.before == backend:
		return companion{backend: backend, flows: c.others + 1, before: c.backend, others: c.flows}
	case c.flows == 0:
		return companion{backend: backend, flows: 1, before: c.before, others: c.others}
	}
	return companion{backend: backend, flows: 1, before: c.backend, others: c.flows}
}

// Left notes the end of a connection that Reached has noted.
func (l *Listener) Left(source netip.Addr, backend netip.AddrPort) {
	c := l.companions.Load()
	if c == nil {
		return
	}
	p := c.part(source)
	p.mu.Lock()
	defer p.mu.Unlock()
	was := p.sources[source]
	switch {
	case was.backend == backend && was.flows > 0:
		if was.flows--; was.flows == 0 {
			was.ended = time.Now()
		}
	case was.before == backend && was.others > 0:
		was.others--
	default:
		return // it has moved on, or came before anybody followed
	}
	p.sources[source] = was
}

// Companion is the backend that a source's connections go to, or went to until
// at most window ago. The last one counts, and when that is over the one before.
func (l *Listener) Companion(source netip.Addr, window time.Duration) (backend netip.AddrPort, ok bool) {
	c := l.companions.Load()
	if c == nil {
		return backend, false
	}
	p := c.part(source)
	p.mu.Lock()
	defer p.mu.Unlock()
	s, ok := p.sources[source]
	switch {
	case !ok:
		return backend, false
	case s.flows > 0 || time.Since(s.ended) <= window:
		return s.backend, true
	}
	return s.before, s.others > 0
}

// MaxWindow is the longest window: sources that have been gone for longer are
// forgotten when there is no room.
const MaxWindow = time.Hour

// makeRoom forgets the sources nobody can follow any more, and failing that
// one without connections.
func (p *companionPart) makeRoom() bool {
	var any netip.Addr
	for source, s := range p.sources {
		if s.flows > 0 || s.others > 0 {
			continue
		}
		any = source
		if time.Since(s.ended) > MaxWindow {
			delete(p.sources, source)
		}
	}
	delete(p.sources, any)
	return len(p.sources) < companionPerPart
}
