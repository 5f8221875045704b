package resolve

import (
	"github.com/wayhouse-proxy/wayhouse/internal/clienthello"
	"github.com/wayhouse-proxy/wayhouse/internal/quicinitial"
)

// serverName is the TLS server name in a flow's first bytes, "" when there is
// none. partial says that more bytes may show one.
func serverName(udp bool, stream []byte, datagrams [][]byte) (name string, partial bool) {
	if udp {
		b, s := quicinitial.AppendName(nil, datagrams)
		return string(b), s == quicinitial.Partial
	}
	b, s := clienthello.AppendName(nil, stream)
	return string(b), s == clienthello.More
}
