package pool

import (
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/hostport"
)

// followSource begins to follow the source, and waits for its first answer, but
// not when it has been asked for another pool or by the config before.
func (p *Pool) followSource() {
	if p.feed == nil {
		return
	}
	p.feed.Start(p.name, p.log)
	timeout := time.NewTimer(firstAnswer)
	defer timeout.Stop()
	for {
		if _, asked := p.feed.Known(); asked {
			return
		}
		select {
		case <-p.feed.Changed():
		case <-timeout.C:
			return
		}
	}
}

// sourced are the backends that the source has named. A weight of the
// balancer's config wins.
func (p *Pool) sourced() []member {
	found, _ := p.feed.Known()
	list := make([]member, len(found))
	for i, e := range found {
		list[i] = member{addr: e.Addr, weight: e.Weight, priority: e.Priority, capacity: e.MaxSessions, origin: FromSource}
		if n, ok := p.weights[hostport.Target{Addr: e.Addr, Port: e.Addr.Port()}]; ok {
			list[i].weight = n
		}
	}
	return list
}
