package listener

import (
	"bytes"
	"sync"
	"syscall"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/tcprelay"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
	"github.com/wayhouse-proxy/wayhouse/modules/tracing"
)

// A look is the walk of a connection whose route is decided on the worker that
// has accepted it: the engine has the socket and shows what is in it.
//
//	Accept → begin → [Look …] → the engine forwards or closes it
//	                          → Taken → serveTCP, where the walk goes on
//
// It goes on in a goroutine where the route is for a foreign handler, and where
// a matcher, a sniffer or a decider comes next that may block.
type look struct {
	walk  walk
	flow  sniff.Flow
	conn  addrConn
	phase phase
	gate  string // the rule of the gate that is to be asked in a goroutine; "": none
}

// phase is how far a look has come.
type phase uint8

const (
	walking phase = iota // among the routes
	heading              // before it is admitted; see proxied.go
	entered              // since it is: nothing has been decided yet
)

// looks are those that are not in use. What one has grown is small: no more
// than names and keys.
var looks = sync.Pool{New: func() any { return new(look) }}

// look decides about a new connection whose route is not known by its addresses
// alone.
func (v *view) look(o *tcprelay.Opening) tcprelay.Decision {
	if len(v.routes) == 0 {
		go v.serveTCP(o.FD, o.Client, o.Local, nil, 0)
		return tcprelay.Take
	}
	l := looks.Get().(*look)
	d := l.begin(v, o, nil, false)
	if d == tcprelay.Take {
		l.Taken(o)
	}
	return d
}

// begin starts the walk of a connection of which seen is all that has come.
func (l *look) begin(v *view, o *tcprelay.Opening, seen []byte, final bool) tcprelay.Decision {
	l.phase, l.gate = walking, ""
	l.flow.Reset(v.plan)
	l.conn = addrConn{client: o.Client, local: o.Local}
	l.walk = walk{v: v, conn: &l.conn, src: shownSource{}, client: o.Client, local: o.Local, first: &l.flow, begun: o.Age}
	o.Looker, o.Path, o.Limit, o.Wait = l, v.looking, v.peek.MaxBytes, o.Age+v.peek.Timeout
	return l.goOn(o, seen, final)
}

// goOn takes the walk on with what has come.
func (l *look) goOn(o *tcprelay.Opening, seen []byte, final bool) tcprelay.Decision {
	l.walk.show(seen) // the engine's buffer: what it had is not there any more
	if final {
		l.walk.end()
	}
	return l.decide(o)
}

// Look implements tcprelay.Looker.
func (l *look) Look(o *tcprelay.Opening, seen []byte, final bool) tcprelay.Decision {
	if l.phase == heading {
		return l.header(o, seen, final)
	}
	v := l.walk.v
	d, done := tcprelay.Refuse, false
	defer func() { // after a panic of a matcher the engine tells the owner of the path
		if done && d == tcprelay.Refuse {
			v.stats.Abandoned(false, o.Client.Addr())
		}
	}()
	if l.phase == entered {
		d = l.enter(v, o, seen, final)
	} else {
		d = l.goOn(o, seen, final)
	}
	done = true
	return d
}

// enter decides about a connection that has been admitted, as Accept does.
func (l *look) enter(v *view, o *tcprelay.Opening, seen []byte, final bool) tcprelay.Decision {
	if l.gate != "" || len(v.routes) == 0 {
		return tcprelay.Take
	}
	d, known := v.direct(o)
	if !known {
		return l.begin(v, o, seen, final)
	}
	l.free()
	return d
}

// decide takes the walk on and says what is to be done about the connection.
// After an answer other than Peek and Take the look is not used any more.
func (l *look) decide(o *tcprelay.Opening) tcprelay.Decision {
	w := &l.walk
	v := w.v
	began := now(tracing.On())
	s, err := w.next()
	switch {
	case s == atBytes:
		return tcprelay.Peek
	case s == atRoute && v.routes[w.at].rejects:
		v.stats.Turned.Inc()
		v.tell(relay.Reject.String(), w.client, w.local, false)
	case s == atWait, s == atRoute && v.dialers[w.at] == nil:
		w.show(bytes.Clone(w.buf))
		return tcprelay.Take
	case s == atForwarder:
		o.Dialer = Hosted(w.to.TCPDialer(w.place), w.first.Known())
	case s == atRoute:
		o.Dialer = Hosted(v.dialers[w.at], w.first.Known())
	case s == atReject:
		v.stats.Rejected.Inc()
		v.tell(relay.SnifferReject.String(), w.client, w.local, false)
	default:
		v.unmatched(w.client, err)
		v.stats.NoRoute.Inc()
		v.tell(relay.NoRoute.String(), w.client, w.local, false)
	}
	l.free()
	if o.Dialer == nil {
		return tcprelay.Refuse
	}
	v.stats.Accepted.Inc()
	v.traceLooked(o, began)
	return tcprelay.Forward
}

// free gives the look back.
func (l *look) free() {
	l.walk = walk{}
	l.flow.Reset(nil)
	looks.Put(l)
}

// Taken implements tcprelay.Looker.
func (l *look) Taken(o *tcprelay.Opening) {
	if v := l.walk.v; l.gate != "" {
		go v.gateTCP(o.FD, o.Client, o.Local)
	} else {
		go v.serveTCP(o.FD, o.Client, o.Local, &l.walk, o.Age)
	}
}

// lookOwner counts out the connections that end while they are looked at, other
// than by what the looking has come to.
type lookOwner struct{ stats *flow.Listener }

func (lookOwner) ConnectFailed(*relay.Path, relay.Failure, syscall.Errno) {}
func (lookOwner) Answered(*relay.Path)                                    {}
func (lookOwner) Failed(*relay.Path, relay.Failure, syscall.Errno)        {}

func (o lookOwner) Closed(_ *relay.Path, s *relay.Info, why relay.Reason) {
	s.Phase = relay.Peek
	o.stats.Closed(s, why)
}

// Interface guards
var (
	_ tcprelay.Looker = (*look)(nil)
	_ relay.Owner     = lookOwner{}
)
