package health

import (
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
)

// ParseBytes reads bytes from a config: hex:0aff or ascii:text. ascii takes
// the text as it stands and refuses what is not ASCII. There is at least one byte.
func ParseBytes(s string) ([]byte, error) {
	if h, ok := strings.CutPrefix(s, "hex:"); ok {
		b, err := hex.DecodeString(h)
		if err != nil || len(b) == 0 {
			return nil, fmt.Errorf("%q is not hex: and pairs of hexadecimal digits", s)
		}
		return b, nil
	}
	if a, ok := strings.CutPrefix(s, "ascii:"); ok {
		for i := range len(a) {
			if a[i] > 0x7f {
				return nil, fmt.Errorf("%q is not all ASCII; write it in hex: digits", s)
			}
		}
		if a == "" {
			return nil, errors.New("ascii: without text")
		}
		return []byte(a), nil
	}
	return nil, fmt.Errorf("%q begins with neither hex: nor ascii: as it must", s)
}
