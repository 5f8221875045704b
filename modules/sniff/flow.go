package sniff

import (
	"slices"

	"github.com/mholt/caddy-l4/layer4"

	"github.com/wayhouse-proxy/wayhouse/internal/clienthello"
	"github.com/wayhouse-proxy/wayhouse/internal/quicinitial"
)

// A Plan is the sniffers of a listener in the order of their first appearance
// in its routes.
type Plan []*Named

// Add adds the sniffers that a matcher asks, if it asks any, itself or inside
// caddy-l4's matcher not.
func (p *Plan) Add(m layer4.ConnMatcher) {
	switch m := m.(type) {
	case User:
		for _, n := range m.Sniffers() {
			if p.index(n) < 0 {
				*p = append(*p, n)
			}
		}
	case *layer4.MatchNot:
		for _, set := range m.MatcherSets {
			for _, in := range set {
				p.Add(in)
			}
		}
	}
}

// MayReject reports whether one of them may want a flow dropped, which is to be
// known before anything else is done with it.
func (p Plan) MayReject() bool {
	return slices.ContainsFunc(p, func(n *Named) bool { return n.mayReject })
}

// Prompt reports whether all of them answer at once, so that an engine's worker
// may ask them.
func (p Plan) Prompt() bool {
	return !slices.ContainsFunc(p, func(n *Named) bool { return !n.prompt })
}

func (p Plan) index(n *Named) int {
	for i := range p {
		if p[i] == n {
			return i
		}
	}
	return -1
}

// Flow is the first bytes of a flow and what the sniffers of its listener say
// about them: they are asked in order until one does not say no, when somebody
// wants to know, and again when there is more to see. The first that
// recognises the bytes is the flow's only one. A Flow belongs to the goroutine
// of its flow.
type Flow struct {
	in    Input
	shown []byte // the bytes that matchers see of the connection

	// Trace, when it is set, hears every answer of a sniffer, and the calls are
	// not counted: the flow is one that somebody asks about. h is only valid
	// during the call.
	Trace func(n *Named, v Verdict, h *Hint)

	plan    Plan
	at      int  // the sniffers before this one have said no
	unsure  int  // the first of them, and one, that would say it again; 0: none
	fresh   bool // there is something to see that plan[at] has not seen
	verdict Verdict
	hint    Hint

	name      []byte // of ServerName
	nameKnown Verdict
	nameFresh bool // there is something to see that ServerName has not seen
	nameBuf   [64]byte
}

// NewFlow is a flow of which nothing has been seen.
func NewFlow(p Plan) *Flow {
	f := new(Flow)
	f.Reset(p)
	return f
}

// Reset makes it a flow of which nothing has been seen, and keeps its buffers.
func (f *Flow) Reset(p Plan) {
	hint, name := f.hint, f.name
	hint.Reset()
	*f = Flow{plan: p, hint: hint, name: name[:0]}
	if name == nil {
		f.name = f.nameBuf[:0] // enough for most
	}
}

// flowVar is the variable of a connection in which matchers find its flow.
const flowVar = "wayhouse.sniff"

// Show tells what there is to see now, and lets the matchers of cx find it, if
// there is a cx yet. shown is what cx has for them; datagrams are whole and nil
// on TCP. All must stay as they are until the next call.
func (f *Flow) Show(cx *layer4.Connection, shown []byte, datagrams [][]byte) {
	f.shown = shown
	f.in.Bytes, f.in.Datagrams = shown, datagrams
	if len(datagrams) > 0 {
		f.in.Bytes = datagrams[0]
	}
	f.fresh, f.nameFresh = true, true
	if f.unsure > 0 && f.verdict != Recognised {
		f.at, f.unsure = f.unsure-1, 0
	}
	if cx != nil {
		f.Attach(cx)
	}
}

// Attach lets the matchers of cx find the flow.
func (f *Flow) Attach(cx *layer4.Connection) { cx.SetVar(flowVar, f) }

// End tells that nothing more will come.
func (f *Flow) End() {
	if !f.in.Final {
		f.in.Final, f.fresh = true, true
	}
}

// Input is what there is to see.
func (f *Flow) Input() *Input { return &f.in }

// Empty reports whether nothing has come. An empty datagram is something.
func (f *Flow) Empty() bool { return len(f.in.Bytes) == 0 && len(f.in.Datagrams) == 0 }

// Decide asks the sniffers of the plan. winner is nil unless one has
// recognised the flow, for good or, with Partial, but for the host. Undecided
// is the verdict as long as a sniffer is, and while nothing has come.
func (f *Flow) Decide() (winner *Named, v Verdict, h *Hint) {
	for f.at < len(f.plan) {
		if f.Empty() {
			return nil, Undecided, nil
		}
		if f.fresh && f.verdict != Recognised {
			f.verdict = f.sniff(f.plan[f.at], &f.hint)
		}
		switch f.verdict {
		case Unrecognised:
			if f.plan[f.at].oneLook && f.unsure == 0 && !f.in.UDP() && !f.in.Final {
				f.unsure = f.at + 1
			}
			f.at++
			f.fresh = true
			continue
		case Undecided:
			f.fresh = false
			return nil, Undecided, nil
		}
		f.fresh = false
		return f.plan[f.at], f.verdict, &f.hint
	}
	return nil, Unrecognised, nil
}

func (f *Flow) sniff(n *Named, h *Hint) Verdict {
	if f.Trace == nil {
		return n.Sniff(&f.in, h)
	}
	h.Reset()
	v := n.s.Sniff(&f.in, h)
	f.Trace(n, v, h)
	return v
}

// Rejected reports whether a sniffer of the plan wants the flow dropped, and
// whether that is known by now.
func (f *Flow) Rejected() (rejected, known bool) {
	winner, v, h := f.Decide()
	return winner != nil && h.Reject, v != Undecided
}

// Recognised reports whether a sniffer of the plan has recognised the flow
// without rejecting it, which opens the first-packet gate.
func (f *Flow) Recognised() bool {
	winner, _, h := f.Decide()
	return winner != nil && !h.Reject
}

// Ask is what n has to say, given the sniffers before it in the plan: no, when
// one of those has recognised the flow, and undecided, while one may. A sniffer
// that is not in the plan is asked at once.
func (f *Flow) Ask(n *Named) (Verdict, *Hint) {
	i := f.plan.index(n)
	if i < 0 {
		if f.Empty() {
			return Undecided, nil
		}
		h := new(Hint)
		return f.sniff(n, h), h
	}
	winner, v, h := f.Decide()
	switch {
	case winner == n:
		return v, h
	case v == Undecided && i >= f.at:
		return Undecided, nil
	}
	return Unrecognised, nil
}

// ServerName is the name in the ClientHello of TLS or, over UDP, of QUIC, as
// hints have hosts, and empty when it has none. The verdict is Undecided until all
// of the hello is there. The name belongs to the flow.
func (f *Flow) ServerName() (name []byte, v Verdict) {
	if f.Empty() {
		return nil, Undecided
	}
	if !f.nameFresh || f.nameKnown == Recognised {
		return f.name, f.nameKnown
	}
	f.nameFresh = false
	if f.in.UDP() {
		var state quicinitial.State
		f.name, state = quicinitial.AppendName(f.name[:0], f.in.Datagrams)
		f.nameKnown = [...]Verdict{quicinitial.NotQUIC: Unrecognised, quicinitial.Partial: Undecided, quicinitial.Done: Recognised}[state]
	} else {
		var state clienthello.State
		f.name, state = clienthello.AppendName(f.name[:0], f.in.Bytes)
		f.nameKnown = [...]Verdict{clienthello.NotTLS: Unrecognised, clienthello.More: Undecided, clienthello.Done: Recognised}[state]
	}
	return f.name, f.nameKnown
}

// Of is the flow of a connection. Outside a listener, and behind a handler that
// has changed the bytes, it is made of what the connection holds, without a
// plan.
func Of(cx *layer4.Connection) *Flow {
	b := cx.MatchingBytes()
	f, ok := cx.GetVar(flowVar).(*Flow)
	if ok && len(f.shown) == len(b) && (len(b) == 0 || &f.shown[0] == &b[0]) {
		return f
	}
	f = new(Flow)
	f.shown, f.in.Bytes, f.fresh, f.nameFresh = b, b, true, true
	if len(b) > 0 && cx.LocalAddr().Network() == "udp" {
		f.in.Datagrams = [][]byte{b}
	}
	return f
}
