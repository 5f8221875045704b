package listener

import (
	"net/netip"

	"github.com/wayhouse-proxy/wayhouse/internal/relay/tcprelay"
)

// AcceptorAt decides about connections to a bound address; nil: nobody does.
func AcceptorAt(at netip.AddrPort) tcprelay.Acceptor {
	bound.mu.Lock()
	defer bound.mu.Unlock()
	for k, eps := range bound.byPort {
		for _, ep := range eps {
			if k.network == "tcp" && ep.addr().Addr == at {
				return ep
			}
		}
	}
	return nil
}
