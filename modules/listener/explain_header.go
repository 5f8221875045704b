package listener

import (
	"bytes"
	"fmt"
	"net/netip"

	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
)

// header tells whose a flow is by its PROXY header, goes on with that, and
// reports whether there is anything to go on with.
func (t *trace) header() bool {
	a, peer := t.v.proxied, t.q.Client
	if !a.trusted.Contains(peer.Addr()) {
		rule := a.stranger()
		return t.headed(rule, fmt.Sprintf("%s is not in accept_proxy.from: a header of its own is payload", peer.Addr()))
	}
	if t.q.UDP {
		return t.datagramHeader(peer)
	}
	var seen []byte
	for i := 0; ; i++ {
		last := i == len(t.q.Pieces)
		if !last {
			seen = append(seen, t.q.Pieces[i]...)
		}
		f, more, rule := a.read(seen, last && t.q.Final, peer, t.q.Local)
		switch {
		case more && !last:
			continue
		case more:
			t.add(Step{Kind: "header", Verdict: "undecided", Reason: peer.Addr().String() + " is trusted"})
			t.end(Outcome{What: EndWaits, Reason: fmt.Sprintf("a PROXY header is waited for, up to %v after it arrived", a.timeout)})
			return false
		case rule != "":
			return t.headed(rule, peer.Addr().String()+" is trusted, and its header is missing or wrong")
		}
		t.q.Client, t.q.Local = f.client, f.local
		t.q.Pieces = append([][]byte{bytes.Clone(seen[f.n:])}, t.q.Pieces[min(i+1, len(t.q.Pieces)):]...)
		return t.headed("", f.said(peer.Addr()))
	}
}

// datagramHeader is header for what the UDP engine would read.
func (t *trace) datagramHeader(peer netip.AddrPort) bool {
	f := headed{client: peer, local: t.q.Local, told: toldOwn}
	pieces := make([][]byte, len(t.q.Pieces))
	for i, p := range t.q.Pieces {
		h, n, err := proxyproto.ReadDatagram(p)
		if pieces[i] = p[n:]; i > 0 {
			continue
		}
		if rule := t.v.proxied.judge(&f, h, err); rule != "" {
			return t.headed(rule, peer.Addr().String()+" is trusted, and its header is missing or wrong")
		}
	}
	t.q.Client, t.q.Local, t.q.Pieces = f.client, f.local, pieces
	return t.headed("", f.said(peer.Addr()))
}

// headed adds the step, and by a rule the end; it reports whether to go on.
func (t *trace) headed(rule, reason string) bool {
	s := Step{Kind: "header", Verdict: "passes", Reason: reason}
	if rule != "" {
		s.Verdict = "refused"
		t.end(Outcome{What: EndHeader, Reason: reason})
	}
	t.add(s)
	return rule == ""
}

// said is what a trusted peer has said of a flow, for people.
func (f *headed) said(peer netip.Addr) string {
	switch f.told {
	case toldClient:
		return fmt.Sprintf("%s is trusted: the client is %s and has hit %s", peer, f.client, f.local)
	case toldOwn:
		return fmt.Sprintf("%s is trusted, and says that the flow is its own", peer)
	}
	return fmt.Sprintf("%s is trusted and sends no header: the flow is its own", peer)
}
