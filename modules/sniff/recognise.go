package sniff

import "sync"

// look is what asking sniffers about bytes on their own needs. It is kept, for a
// flood of datagrams is asked about on the engines' workers.
type look struct {
	in   Input
	one  [1][]byte
	hint Hint
}

var looks = sync.Pool{New: func() any { return new(look) }}

// Recognises reports whether a sniffer of the plan recognises the first bytes of
// a flow without rejecting it, as Flow.Recognised does. Without foreign those that
// may run code of others are left out; known is false when it is theirs to say.
func (p Plan) Recognises(b []byte, udp, final, foreign bool) (recognised, known bool) {
	if len(p) == 0 {
		return false, true
	}
	l := looks.Get().(*look)
	defer looks.Put(l)
	l.in = Input{Bytes: b, Final: final}
	if udp {
		l.one[0] = b
		l.in.Datagrams = l.one[:]
	}
	known = true
	for _, n := range p {
		if n.mayReject && !foreign {
			known = false
			continue
		}
		if v := n.Sniff(&l.in, &l.hint); v == Recognised || v == Partial {
			recognised, known = !l.hint.Reject, true
			break
		}
	}
	l.in, l.one[0] = Input{}, nil
	return recognised, known
}
