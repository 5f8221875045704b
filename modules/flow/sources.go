package flow

import (
	"hash/maphash"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
)

// sources count the live flows of a listener by the client's address and by its
// network. They are always kept, so that a cap that a reload brings, changes or
// takes away finds true counts. An entry lives as long as the flows it stands
// for, which bounds the table by the flows there are.
type sources struct {
	parts [sourceParts]sourcePart
}

const sourceParts = 64

// sourcePart has all of a network, so that one lock covers both counts.
type sourcePart struct {
	mu        sync.Mutex
	ips, nets map[cidr.Key]int64
	_         [64]byte // keep two parts off one cache line
}

var sourceSeed = maphash.MakeSeed()

func partOf(net cidr.Key) uint64 { return maphash.Comparable(sourceSeed, net) % sourceParts }

// Bounds are the most flows there may be. Zero is no bound.
type Bounds struct {
	Process int64 // of the kind, in the whole process
	PerIP   int64 // of one client address, on the listener
	PerNet  int64 // of one /24 or /64, on the listener

	// The process has counted the flow by Hold. Where there is no room for it that
	// is given back.
	Held bool
}

// Full says which of the bounds a flow would break.
type Full uint8

// What may be full.
const (
	Room Full = iota
	FullProcess
	FullIP
	FullNet
)

// open counts a flow of a source, or says which bound is in its way.
func (s *sources) open(source netip.Addr, b Bounds) Full {
	ip, net := cidr.Keys(source)
	p := &s.parts[partOf(net)]
	p.mu.Lock()
	defer p.mu.Unlock()
	ofIP, ofNet := p.ips[ip], p.nets[net]
	switch {
	case b.PerIP > 0 && ofIP >= b.PerIP:
		return FullIP
	case b.PerNet > 0 && ofNet >= b.PerNet:
		return FullNet
	}
	if p.ips == nil {
		p.ips, p.nets = make(map[cidr.Key]int64), make(map[cidr.Key]int64)
	}
	p.ips[ip], p.nets[net] = ofIP+1, ofNet+1
	return Room
}

func (s *sources) closed(source netip.Addr) {
	ip, net := cidr.Keys(source)
	p := &s.parts[partOf(net)]
	p.mu.Lock()
	defer p.mu.Unlock()
	less(p.ips, ip)
	less(p.nets, net)
}

func less(counts map[cidr.Key]int64, k cidr.Key) {
	switch n := counts[k]; n {
	case 0: // its beginning was not counted
	case 1:
		delete(counts, k)
	default:
		counts[k] = n - 1
	}
}

// live are the flows that a source and its network have.
func (s *sources) live(source netip.Addr) (ofIP, ofNet int64) {
	ip, net := cidr.Keys(source)
	p := &s.parts[partOf(net)]
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ips[ip], p.nets[net]
}

// Live are the flows of a source, and of its network, on the listener now.
func (l *Listener) Live(source netip.Addr) (ofIP, ofNet int64) {
	return l.sources.live(cidr.Plain(source))
}

// everyListener are the listeners so far, for reading without a lock.
var everyListener atomic.Pointer[[]*Listener]

// Returning reports whether a source has a live flow on any listener, or had one
// in the last minute.
func Returning(source netip.Addr) bool {
	source = cidr.Plain(source)
	if recent.has(source, sinceStart()) {
		return true
	}
	if all := everyListener.Load(); all != nil {
		for _, l := range *all {
			if n, _ := l.sources.live(source); n > 0 {
				return true
			}
		}
	}
	return false
}
