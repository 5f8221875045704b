package listener

import (
	"fmt"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/tcprelay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/udprelay"
)

// Engines are the two data-path engines of the process. Every started config
// holds a reference; with the last one gone they end and their flows with
// them.
type Engines struct {
	UDP *udprelay.Engine
	TCP *tcprelay.Engine
}

// processPool holds what must be single and survive a reload: the engines
// under enginesKey, the endpoints under their endpointKey.
var processPool = caddy.NewUsagePool()

type enginesKey struct{}

// AcquireEngines returns the engines of the process, started with that many
// workers if nobody holds them yet. Give them back with ReleaseEngines.
func AcquireEngines(workers int, logger *zap.Logger) (*Engines, error) {
	v, _, err := processPool.LoadOrNew(enginesKey{}, func() (caddy.Destructor, error) {
		udp, err := udprelay.New(udprelay.Options{Workers: workers, Logger: logger.Named("udp")})
		if err != nil {
			return nil, fmt.Errorf("starting the UDP engine: %w", err)
		}
		tcp, err := tcprelay.New(tcprelay.Options{Workers: workers, Logger: logger.Named("tcp")})
		if err != nil {
			udp.Close()
			return nil, fmt.Errorf("starting the TCP engine: %w", err)
		}
		e := &Engines{UDP: udp, TCP: tcp}
		current.Store(e)
		return e, nil
	})
	if err != nil {
		return nil, err
	}
	return v.(*Engines), nil
}

// ReleaseEngines gives a reference back.
func ReleaseEngines() error {
	_, err := processPool.Delete(enginesKey{})
	return err
}

// Destruct implements caddy.Destructor.
func (e *Engines) Destruct() error {
	current.CompareAndSwap(e, nil)
	draining.closeAll(relay.Drain)
	taken.closePaths(func(*relay.Path) bool { return true }, relay.Drain)
	e.UDP.Close()
	e.TCP.Close()
	return nil
}

// Flows calls yield for each live flow of both engines, of foreign handlers and
// of servers on our networks until it returns false.
func (e *Engines) Flows(yield func(*relay.Info) bool) {
	more := true
	each := func(i *relay.Info) bool {
		more = yield(i)
		return more
	}
	e.TCP.Flows(each)
	if more {
		taken.flows(each)
	}
	if more {
		e.Sessions(each)
	}
}

// Sessions is Flows without the connections.
func (e *Engines) Sessions(yield func(*relay.Info) bool) {
	more := true
	e.UDP.Flows(func(i *relay.Info) bool {
		more = yield(i)
		return more
	})
	if more {
		guestFlows(yield)
	}
}

// Flow is the live flow of that ID.
func (e *Engines) Flow(id relay.ID) (relay.Info, bool) {
	switch {
	case id.UDP() && id.Worker() == takenWorker:
		return guestFlow(id)
	case id.UDP():
		return e.UDP.Flow(id)
	case id.Worker() == takenWorker:
		return taken.flow(id)
	}
	return e.TCP.Flow(id)
}

// CloseFlow ends a flow.
func (e *Engines) CloseFlow(id relay.ID, why relay.Reason) bool {
	switch {
	case id.UDP() && id.Worker() == takenWorker:
		return endGuests(func(g *guest) bool { return g.id == id }, why) > 0
	case id.UDP():
		return e.UDP.CloseFlow(id, why)
	case id.Worker() == takenWorker:
		return taken.closeFlow(id, why)
	}
	return e.TCP.CloseFlow(id, why)
}

// ClosePaths ends the flows whose path match selects.
func (e *Engines) ClosePaths(match func(*relay.Path) bool, why relay.Reason) {
	e.TCP.ClosePaths(match, why)
	e.UDP.ClosePaths(match, why)
	taken.closePaths(match, why)
}

// Live counts the flows the engines and foreign handlers hold.
func (e *Engines) Live() int { return e.TCP.Conns() + e.UDP.Sessions() + taken.len() }
