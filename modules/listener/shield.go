package listener

import (
	"net/netip"

	"github.com/wayhouse-proxy/wayhouse/modules/filter"
)

// Shield turns sources away before their packets reach a socket, and is told
// what becomes of those that do. The engines' workers call it, many at a time: it
// must not block or allocate.
type Shield interface {
	// Refused notes that a rule has kept out a flow of a source, which is in its
	// plain form.
	Refused(source netip.Addr, rule string)

	// Admitted notes that a UDP session begins.
	Admitted(client netip.AddrPort)
}

// SetShield sets what is told of new flows. It comes before Serve.
func (l *Listener) SetShield(s Shield) { l.view.shield = s }

// Shieldable reports whether who a packet comes from is whom the filters judge,
// and every new flow meets them.
func (l *Listener) Shieldable() bool {
	return l.filters.Len() > 0 && !l.Transparent && l.AcceptProxy == nil
}

// Filters are the listener's filters.
func (l *Listener) Filters() *filter.Chain { return l.filters }
