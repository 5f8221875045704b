package resolve

import "github.com/wayhouse-proxy/wayhouse/modules/listener"

// Explain implements listener.Explainer. Nobody is asked: an answer costs the
// resolver, and may be another one next time.
func (h *Handler) Explain(*listener.Question, string) listener.Account {
	return listener.Account{Asks: h.Resolver, Reason: "the resolver is not asked here; without an answer: " + h.host.Settings().OnError}
}

// Interface guard
var _ listener.Explainer = (*Handler)(nil)
