package listener

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/mholt/caddy-l4/layer4"

	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

// A flow that nobody has sent, through the code that decides real ones:
//
//	Explain → limits → view.straight            by addresses, as a worker does
//	                 → walk over a describedSource  by bytes, as a goroutine does
//	                 → Explainer of the route's handlers, in place of running them
//
// Nothing is sent, counted or taken.

// Question is a flow that somebody asks about.
type Question struct {
	UDP    bool
	Client netip.AddrPort
	Local  netip.AddrPort // the address of ours it goes to; zero: the listener's only one

	// What the client sends: the pieces of a stream as they arrive, or datagrams.
	Pieces [][]byte

	// Final: it sends nothing more, so that the time for its bytes ends.
	Final bool
}

// Explainer is a handler that can tell what it would do with a flow. Explain is
// called from any goroutine; it must send, count and take nothing.
type Explainer interface {
	Explain(q *Question, listener string) Account
}

// Account is what a handler would do with a flow.
type Account struct {
	Pool    string `json:"pool,omitempty"`
	Backend string `json:"backend,omitempty"` // that the balancer would choose now
	Target  string `json:"target,omitempty"`  // where the flow reaches it, when its port is mapped
	Result  string `json:"result,omitempty"`  // of the choice: ok, no_backend, at_capacity

	Header string `json:"proxy_protocol,omitempty"` // that the backend would get

	Asks   string `json:"asks,omitempty"`   // the resolver that would be asked
	Server string `json:"server,omitempty"` // of this process that would get the flow
	Next   bool   `json:"next,omitempty"`   // the flow goes on to the next route

	Rejects bool `json:"rejects,omitempty"` // the flow is closed or dropped

	Reason   string    `json:"-"` // is the step's
	Backends []Backend `json:"backends,omitempty"`
}

// Backend is one of those that a handler chooses from.
type Backend struct {
	Addr      string `json:"addr"`
	Candidate bool   `json:"candidate"` // is chosen from
	Full      bool   `json:"full"`      // is at a limit
	Healthy   bool   `json:"healthy"`
	State     string `json:"state"`
	Weight    uint32 `json:"weight"`
	Active    int64  `json:"active"`
}

// Explanation is what would become of a flow, and why.
type Explanation struct {
	Listener string `json:"listener"`
	Network  string `json:"network"`
	Src      string `json:"src"`
	Dst      string `json:"dst"`

	Steps []Step  `json:"steps"`
	End   Outcome `json:"end"`
}

// Outcome is the end of an explanation. What is one of the Ends.
type Outcome struct {
	What    string `json:"what"`
	Route   *int   `json:"route,omitempty"`
	Pool    string `json:"pool,omitempty"`
	Backend string `json:"backend,omitempty"`
	Reason  string `json:"reason,omitempty"`
}

// The Ends.
const (
	EndPool     = "pool"     // it goes to a pool; without a backend it is refused there
	EndResolver = "resolver" // a resolver would be asked, and is not
	EndHandler  = "handler"  // handlers that cannot be followed get it
	EndNoRoute  = "no_route" // no route matches
	EndRejected = "rejected" // a sniffer or a route wants it dropped
	EndCutOff   = "cut_off"  // a route is undecided to the end
	EndWaits    = "waits"    // more bytes would be waited for
	EndLimit    = "limit"    // a limit is in its way
	EndFilter   = "filter"   // a filter refuses it
	EndHeader   = ruleHeader // its PROXY header is missing, wrong or of somebody who is not trusted
	EndRefused  = "refused"  // the process is stopping, and the client a stranger
	EndNetwork  = "network"  // a server on wayhouse/NAME gets it
	EndError    = "error"    // a matcher fails

	EndOutside = "outside_prefix" // the listener does not serve the address
)

// Step is one thing that was looked at. Which fields it has depends on Kind.
type Step struct {
	Kind    string `json:"step"` // header, filter, limit, bytes, sniffer, hint, route, handler
	Name    string `json:"name,omitempty"`
	Route   *int   `json:"route,omitempty"`
	Verdict string `json:"verdict,omitempty"`
	Reason  string `json:"reason,omitempty"`

	Bytes     int `json:"bytes,omitempty"` // seen so far
	Datagrams int `json:"datagrams,omitempty"`

	Matchers []MatcherStep `json:"matchers,omitempty"` // of a route

	Host   string            `json:"host,omitempty"` // of a sniffer
	Key    string            `json:"key,omitempty"`
	Parts  map[string]string `json:"parts,omitempty"`
	Reject bool              `json:"reject,omitempty"`

	*Account // of a handler or a hint
}

// MatcherStep is a matcher that was asked.
type MatcherStep struct {
	Set     int    `json:"set"`
	Name    string `json:"name"`
	Verdict string `json:"verdict"` // yes, no, undecided, error
	Reason  string `json:"reason,omitempty"`
}

// ErrQuestion is a question that cannot be put to a listener.
type ErrQuestion struct{ text string }

func (e *ErrQuestion) Error() string { return e.text }

// Explain tells what would become of a flow under the running config.
func (l *Listener) Explain(q Question) (*Explanation, error) {
	if err := l.fill(&q); err != nil {
		return nil, err
	}
	q.Client = netip.AddrPortFrom(q.Client.Addr().Unmap(), q.Client.Port())
	q.Local = netip.AddrPortFrom(q.Local.Addr().Unmap(), q.Local.Port())
	e := &Explanation{Listener: l.name, Network: network(q.UDP), Src: q.Client.String(), Dst: q.Local.String()}
	t := &trace{v: l.view, q: &q, e: e, dry: -1}
	t.run()
	if t.dry >= 0 && !q.Final {
		e.Steps = e.Steps[:t.dry]
		e.End = Outcome{What: EndWaits, Route: t.waiting, Reason: fmt.Sprintf("more bytes are waited for, up to %v after it arrived", l.view.peek.Timeout)}
	}
	return e, nil
}

func network(udp bool) string {
	if udp {
		return "udp"
	}
	return "tcp"
}

// fill checks where a flow goes to, or finds it.
func (l *Listener) fill(q *Question) error {
	if q.UDP && len(q.Pieces) == 0 {
		return &ErrQuestion{"bytes: a UDP session begins with a datagram, which may be empty"}
	}
	var of []netip.AddrPort
	for _, b := range l.Bound() {
		if b.Network == network(q.UDP) {
			of = append(of, b.Addr)
		}
	}
	if len(of) == 0 {
		return &ErrQuestion{fmt.Sprintf("the listener %s does not listen for %s", l.name, network(q.UDP))}
	}
	if !q.Local.IsValid() {
		if len(of) > 1 || of[0].Addr().IsUnspecified() {
			return &ErrQuestion{fmt.Sprintf("dst: the listener %s has several addresses: which one does the flow go to?", l.name)}
		}
		q.Local = of[0]
		return nil
	}
	if !l.Transparent && !slices.ContainsFunc(of, func(a netip.AddrPort) bool {
		return a.Port() == q.Local.Port() && (a.Addr() == q.Local.Addr().Unmap() || a.Addr().IsUnspecified())
	}) {
		return &ErrQuestion{fmt.Sprintf("dst: the listener %s does not listen on %s/%s", l.name, network(q.UDP), q.Local)}
	}
	return nil
}

// trace follows one described flow.
type trace struct {
	v *view
	q *Question
	e *Explanation
	w *walk

	matchers []MatcherStep // asked since the last route
	dry      int           // how many steps there were when no more bytes came; -1: they still do
	waiting  *int          // the route that wanted them
}

func (t *trace) add(s Step)    { t.e.Steps = append(t.e.Steps, s) }
func (t *trace) end(o Outcome) { t.e.End = o }

func (t *trace) run() {
	defer func() {
		if p := recover(); p != nil {
			t.end(Outcome{What: EndError, Reason: fmt.Sprintf("a matcher or handler panicked: %v", p)})
		}
	}()
	if t.v.outside(t.q.Local) {
		t.end(Outcome{What: EndOutside, Reason: fmt.Sprintf("%s is not in the prefix %s", t.q.Local.Addr(), t.v.prefix)})
		return
	}
	if t.v.proxied != nil && !t.header() {
		return
	}
	if !t.admission() || !t.limits() {
		return
	}
	if len(t.v.routes) == 0 {
		t.end(Outcome{What: EndNetwork, Reason: "the listener has no routes: servers on wayhouse/" + t.v.name + " get its flows"})
		return
	}
	if i, known := t.v.straight(t.q.Client, t.q.Local); known {
		t.byAddr(i)
		return
	}
	t.walk()
}

// limits looks whether the limits of the process would let a flow in.
func (t *trace) limits() bool {
	conns, sessions := flow.Live()
	name, now := "max_connections", conns
	if t.q.UDP {
		name, now = "max_udp_sessions", sessions
	}
	pass := true
	if most := t.v.limits.max(t.q.UDP); most > 0 {
		pass = t.limit(name, now < most, fmt.Sprintf("%d of %d", now, most))
	}
	if most := t.v.limits.MaxNewSessionsPerSec; pass && most != nil {
		pass = t.limit("max_new_sessions_per_sec", newSessions.Has(*most, *most), fmt.Sprintf("%d a second", *most))
	}
	return pass
}

func (t *trace) limit(name string, pass bool, reason string) bool {
	s := Step{Kind: "limit", Name: name, Verdict: "passes", Reason: reason}
	if !pass {
		s.Verdict = "refused"
		t.end(Outcome{What: EndLimit, Reason: name + ": " + reason})
	}
	t.add(s)
	return pass
}

// byAddr tells of a flow that a worker decides by its addresses.
func (t *trace) byAddr(to int) {
	for i, r := range t.v.routes {
	sets:
		for k, set := range r.addrSets {
			for _, m := range set {
				ok := m.MatchAddr(t.q.Client, t.q.Local)
				t.matcher(k, m, ok, nil)
				if !ok {
					continue sets
				}
			}
			break
		}
		if i == to {
			t.route(i, matched, nil)
			t.handle(i)
			return
		}
		t.route(i, unmatched, nil)
	}
	t.end(noRouteEnd())
}

func rejectedEnd() Outcome {
	return Outcome{What: EndRejected, Reason: "a sniffer wants it dropped"}
}

func noRouteEnd() Outcome {
	return Outcome{What: EndNoRoute, Reason: "no route matches: it is closed or dropped"}
}

// walk tells of a flow whose bytes are looked at.
func (t *trace) walk() {
	conn := &addrConn{t.q.UDP, t.q.Client, t.q.Local}
	src := &describedSource{t: t}
	t.w = newWalk(t.v, conn, src, t.q.Client, t.q.Local, time.Time{})
	t.w.trace, t.w.first.Trace = t, t.sniffer
	var first []byte
	if t.q.UDP {
		first, _ = src.more(time.Time{}, t.v.peek.MaxBytes)
	}
	t.w.show(first)
	if t.w.mayBeRejected() == yes {
		t.end(rejectedEnd())
		return
	}
	if t.v.hint != nil && t.hint() {
		return
	}
	for i := 0; ; i++ {
		var got verdict
		var err error
		if i, got, err = t.w.find(i); got != yes {
			switch {
			case err != nil:
				t.end(Outcome{What: EndError, Route: &i, Reason: err.Error()})
			case t.w.rejected:
				t.end(rejectedEnd())
			case got == undecided:
				t.end(Outcome{What: EndCutOff, Route: &i, Reason: t.spentReason() + " and the bytes still fit: on_undecided is refuse"})
			default:
				t.end(noRouteEnd())
			}
			return
		}
		if t.handle(i) {
			return
		}
	}
}

// hint asks what the route hint says, and reports whether it settles the flow.
func (t *trace) hint() bool {
	ex, ok := t.v.hint.(Explainer)
	if !ok {
		return false
	}
	a := ex.Explain(t.q, t.v.name)
	s := Step{Kind: "hint", Verdict: "none", Reason: a.Reason, Account: &a}
	if !a.Next {
		s.Verdict = "applies"
		t.end(Outcome{What: EndPool, Pool: a.Pool, Backend: a.Backend, Reason: "a route hint for the client"})
	}
	t.add(s)
	return !a.Next
}

// handle tells what the handlers of a route do, and reports whether that is the
// end of the flow.
func (t *trace) handle(i int) bool {
	r := t.v.routes[i]
	unknown := "" // the handler that cannot be followed
	for _, h := range r.handlers {
		name := moduleName(h)
		ex, ok := h.(Explainer)
		if !ok {
			unknown = name
			t.add(Step{Kind: "handler", Route: &i, Name: name, Reason: "is not run here: it may change the bytes, answer itself or pass the flow on"})
			continue
		}
		a := ex.Explain(t.q, t.v.name)
		t.add(Step{Kind: "handler", Route: &i, Name: name, Reason: a.Reason, Account: &a})
		reason := a.Reason
		if unknown != "" {
			reason = "unless " + unknown + " ends it"
		}
		switch {
		case a.Asks != "":
			t.end(Outcome{What: EndResolver, Route: &i, Reason: "would ask " + a.Asks})
			return true
		case a.Server != "":
			t.end(Outcome{What: EndNetwork, Route: &i, Reason: "the server that listens on " + a.Server})
			return true
		case a.Rejects:
			if reason == "" {
				reason = "the route turns it away"
			}
			t.end(Outcome{What: EndRejected, Route: &i, Reason: reason})
			return true
		case !a.Next:
			t.end(Outcome{What: EndPool, Route: &i, Pool: a.Pool, Backend: a.Backend, Reason: reason})
			return true
		}
	}
	if unknown == "" && len(r.handlers) == 1 { // a Decider that lets it go on as it is
		return false
	}
	t.end(Outcome{What: EndHandler, Route: &i, Reason: "its handlers get it; what they leave for later routes cannot be told"})
	return true
}

// route hears what becomes of the flow at a route.
func (t *trace) route(i int, o outcome, err error) {
	s := Step{Kind: "route", Route: &i, Matchers: t.matchers}
	t.matchers = nil
	switch o {
	case matched:
		s.Verdict = "matches"
	case unmatched:
		s.Verdict = "does not match"
	case failed:
		s.Verdict, s.Reason = "fails", err.Error()
	case heldBack:
		s.Verdict, s.Reason = "undecided", "more bytes could decide it: later routes are held back"
		t.waiting = &i
	case passedSilent:
		s.Verdict, s.Reason = "passed over", "it needs bytes and the client has sent none"
	case passedNext:
		s.Verdict, s.Reason = "passed over", t.spentReason()+" and on_undecided is next"
	case cutOff:
		s.Verdict, s.Reason = "cut off", t.spentReason()+" and on_undecided is refuse"
	}
	t.add(s)
}

func (t *trace) spentReason() string {
	if len(t.w.buf) >= t.v.peek.MaxBytes {
		return fmt.Sprintf("peek.max_bytes (%d) are seen", t.v.peek.MaxBytes)
	}
	return fmt.Sprintf("nothing more comes within peek.timeout (%v)", t.v.peek.Timeout)
}

// matcher hears the answer of a matcher of the route that is being asked.
func (t *trace) matcher(set int, m layer4.ConnMatcher, ok bool, err error) {
	s := MatcherStep{Set: set, Name: moduleName(m), Verdict: "no"}
	switch {
	case wantsMore(err):
		s.Verdict = "undecided"
	case err != nil:
		s.Verdict, s.Reason = "error", err.Error()
	case ok:
		s.Verdict = "yes"
	}
	t.matchers = append(t.matchers, s)
}

// sniffer hears the answer of a sniffer.
func (t *trace) sniffer(n *sniff.Named, v sniff.Verdict, h *sniff.Hint) {
	s := Step{Kind: "sniffer", Name: n.Name, Verdict: v.String()}
	switch {
	case v == sniff.Undecided && h.Fault != sniff.NoFault:
		s.Reason = "it has failed"
	case v == sniff.Recognised || v == sniff.Partial:
		s.Reject = h.Reject
		s.Host, s.Key = string(h.Host), string(h.Key)
		for _, p := range h.Parts() {
			if s.Parts == nil {
				s.Parts = make(map[string]string)
			}
			s.Parts[p.Name] = string(p.Value)
		}
	}
	t.add(s)
}

func moduleName(v any) string {
	if m, ok := v.(caddy.Module); ok {
		return m.CaddyModule().ID.Name()
	}
	return fmt.Sprintf("%T", v)
}
