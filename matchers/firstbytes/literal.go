package firstbytes

import (
	"bytes"
	"fmt"

	"github.com/wayhouse-proxy/wayhouse/internal/literal"
)

const (
	maxPrefix = 512
	maxOffset = 4096
)

func parsePrefix(s string) ([]byte, error) {
	b, err := literal.Parse(s)
	if len(b) > maxPrefix {
		return nil, fmt.Errorf("%d bytes are more than %d", len(b), maxPrefix)
	}
	return b, err
}

// answer is what can be said about the first bytes of a flow.
type answer uint8

const (
	no answer = iota
	yes
	more // what comes may make it a yes
)

// begins looks for prefix at offset in b, which is all there is when whole.
func begins(b, prefix []byte, offset int, whole bool) answer {
	b = b[min(offset, len(b)):]
	switch {
	case len(b) >= len(prefix) && bytes.Equal(b[:len(prefix)], prefix):
		return yes
	case len(b) >= len(prefix), whole, !bytes.Equal(b, prefix[:len(b)]):
		return no
	}
	return more
}

// within looks at the number of bytes. A datagram has one. A stream has more
// and more: that it has no more than max is known when no more are waited for.
func within(n, low int, high *int, datagram, final bool) answer {
	switch {
	case high != nil && n > *high:
		return no
	case n >= low && (high == nil || datagram || final):
		return yes
	case datagram:
		return no
	}
	return more
}
