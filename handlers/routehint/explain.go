package routehint

import (
	"fmt"

	"github.com/wayhouse-proxy/wayhouse/modules/intent"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
)

// Explain implements listener.Explainer.
func (h *Handler) Explain(q *listener.Question, name string) listener.Account {
	pool, ok := intent.RouteHints.Get(q.Client.Addr())
	f := h.pools[pool]
	switch {
	case !ok:
		return listener.Account{Next: true, Reason: fmt.Sprintf("there is no hint for %s", q.Client.Addr())}
	case f == nil:
		return listener.Account{Next: true, Reason: fmt.Sprintf("the hint for %s names the pool %s, which there is not", q.Client.Addr(), pool)}
	}
	return f.Explain(q, name)
}

// Interface guard
var _ listener.Explainer = (*Handler)(nil)
