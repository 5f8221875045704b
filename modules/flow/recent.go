package flow

import (
	"net/netip"
	"sync"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
)

// recent are the sources that had a flow a short while ago. They come back
// after a hiccup of their network, and are let in where strangers are not. Each
// end of a flow updates one entry.
var recent recents

type recents struct {
	parts [sourceParts]recentPart
}

// RecentWindow is how long a source is known after its last flow.
const RecentWindow = time.Minute

const (
	maxRecent     = 200_000
	recentPerPart = maxRecent / sourceParts

	// recentSweep is how often a part that is full is looked through.
	recentSweep = time.Second
)

type recentPart struct {
	mu    sync.Mutex
	ended map[cidr.Key]time.Duration // after started
	swept time.Duration
	_     [64]byte
}

var started = time.Now()

// sinceStart is the time as recents know it, which is monotonic.
func sinceStart() time.Duration { return time.Since(started) }

// note remembers a source whose flow has ended. A part that is full forgets
// those whose time is over, and failing that any one: there are as many that
// came later.
func (r *recents) note(source netip.Addr, now time.Duration) {
	ip, net := cidr.Keys(source)
	p := &r.parts[partOf(net)]
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended == nil {
		p.ended = make(map[cidr.Key]time.Duration)
	}
	if _, known := p.ended[ip]; !known && len(p.ended) >= recentPerPart {
		p.makeRoom(now)
	}
	p.ended[ip] = now
}

func (p *recentPart) makeRoom(now time.Duration) {
	if now-p.swept >= recentSweep {
		p.swept = now
		for k, ended := range p.ended {
			if now-ended > RecentWindow {
				delete(p.ended, k)
			}
		}
	}
	for k := range p.ended {
		if len(p.ended) < recentPerPart {
			return
		}
		delete(p.ended, k)
	}
}

func (r *recents) has(source netip.Addr, now time.Duration) bool {
	ip, net := cidr.Keys(source)
	p := &r.parts[partOf(net)]
	p.mu.Lock()
	defer p.mu.Unlock()
	ended, ok := p.ended[ip]
	return ok && now-ended <= RecentWindow
}
