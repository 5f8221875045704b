package firstbytes

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
)

const (
	maxPrefix = 512
	maxOffset = 4096
)

// parsePrefix reads hex:DIGITS or ascii:TEXT.
func parsePrefix(s string) (b []byte, err error) {
	switch kind, text, _ := strings.Cut(s, ":"); kind {
	case "hex":
		if b, err = hex.DecodeString(text); err != nil {
			return nil, fmt.Errorf("%q is not made of pairs of hexadecimal digits", text)
		}
	case "ascii":
		b = []byte(text)
		for _, c := range b {
			if c >= 0x80 {
				return nil, fmt.Errorf("%q is not ASCII: write it in hex", text)
			}
		}
	default:
		return nil, fmt.Errorf("%q is neither hex:DIGITS nor ascii:TEXT", s)
	}
	switch {
	case len(b) == 0:
		return nil, errors.New("nothing stands behind the colon")
	case len(b) > maxPrefix:
		return nil, fmt.Errorf("%d bytes are more than %d", len(b), maxPrefix)
	}
	return b, nil
}

// answer is what can be said about the first bytes of a flow.
type answer uint8

const (
	no answer = iota
	yes
	more // what comes may make it a yes
)

// literal looks for prefix at offset in b, which is all there is when whole.
func literal(b, prefix []byte, offset int, whole bool) answer {
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
