package pool

import (
	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
)

var headersSent = metrics.Counter("proxy_protocol_headers_total", "Connections and UDP sessions whose client a backend was told by a PROXY header.", "pool", "version")

// CountHeader counts a connection or session of a pool that has a PROXY header.
func CountHeader(pool string, v proxyproto.Version) {
	headersSent.WithLabelValues(pool, v.String()).Inc()
}
