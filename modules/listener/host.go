package listener

import "github.com/wayhouse-proxy/wayhouse/internal/relay/tcprelay"

// HostDialer is a dialer that wants to know which host the client has named,
// where that is known.
type HostDialer interface {
	tcprelay.Dialer

	// WithHost is the dialer for one connection whose client has. It must not keep
	// the bytes.
	WithHost(host []byte) tcprelay.Dialer
}

// Hosted is the dialer for a connection whose client has named a host, or none.
func Hosted(d tcprelay.Dialer, host []byte) tcprelay.Dialer {
	if h, ok := d.(HostDialer); ok && len(host) > 0 {
		return h.WithHost(host)
	}
	return d
}
