package pool

import (
	"fmt"

	"github.com/wayhouse-proxy/wayhouse/internal/proxyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
	"github.com/wayhouse-proxy/wayhouse/modules/balancer"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/pool"
)

// Explain implements listener.Explainer. The backend is the one that the
// balancer would choose now, which another flow may get first.
func (h *Handler) Explain(q *listener.Question, _ string) listener.Account {
	a := listener.Account{Pool: h.pool.Name(), Header: h.header.explain(q)}
	if proxyopt.Fits(h.header.form, q.UDP) != nil {
		a.Reason = "refused: the header that its backends expect is not for flows of this kind"
		return a
	}
	followed := h.followed(q)
	for _, b := range h.pool.Backends() {
		candidate, room := h.pool.Takes(b)
		a.Backends = append(a.Backends, listener.Backend{
			Addr: b.Addr().String(), Candidate: candidate, Full: !room, Healthy: b.Healthy(), State: b.State().String(),
			Weight: b.Weight(), Active: b.Active(),
		})
		if b == followed && candidate && room {
			a.Backend, a.Target, a.Result = b.Addr().String(), h.mapped(b, q), pool.OK.String()
			a.Reason = fmt.Sprintf("follows the client's connection on the listener %s", h.Follow.Listener)
		}
	}
	if a.Backend != "" {
		return a
	}
	b, result, known := h.pool.Peek(balancer.Flow{Client: q.Client, Local: q.Local})
	a.Result = result.String()
	switch {
	case !known:
		a.Reason = fmt.Sprintf("the balancer %s does not tell what it would choose", h.pool.Policy())
	case b == nil:
		a.Reason = fmt.Sprintf("no backend for it: %s", result)
	default:
		a.Backend, a.Target, a.Reason = b.Addr().String(), h.mapped(b, q), fmt.Sprintf("by the balancer %s", h.pool.Policy())
	}
	if a.Backend != "" && h.ports != nil && a.Target == "" {
		a.Reason = fmt.Sprintf("refused: %v", errPort)
	}
	return a
}

// explain is the header that a backend would get of a flow.
func (h *header) explain(q *listener.Question) string {
	if h.form.Version == proxyproto.None {
		return ""
	}
	s := fmt.Sprintf("%s of %s to %s", h.form.Version, q.Client, q.Local)
	if h.form.Version == proxyproto.V2UDP {
		s += ", " + h.form.Mode.String()
	}
	return s
}

// mapped is where a flow reaches a backend whose port is mapped, "" for others
// and where it cannot.
func (h *Handler) mapped(b *pool.Backend, q *listener.Question) string {
	if h.ports == nil {
		return ""
	}
	if to, ok := h.ports.target(b.Addr(), q.Local); ok {
		return to.String()
	}
	return ""
}

// followed is the backend that the session of a client that has a connection
// elsewhere would go to, nil without one.
func (h *Handler) followed(q *listener.Question) *pool.Backend {
	if h.Follow == nil || !q.UDP {
		return nil
	}
	to, ok := h.Follow.target(q.Client.Addr())
	if !ok {
		return nil
	}
	for _, b := range h.pool.Backends() {
		if b.Addr() == to {
			return b
		}
	}
	return nil
}

// Interface guard
var _ listener.Explainer = (*Handler)(nil)
