// Package literal reads bytes as configs, flags and requests write them:
// hex:DIGITS or ascii:TEXT.
package literal

import (
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
)

// Parse reads at least one byte.
func Parse(s string) ([]byte, error) {
	b, err := ParseAny(s)
	if err == nil && len(b) == 0 {
		return nil, errors.New("nothing stands behind the colon")
	}
	return b, err
}

// ParseAny is Parse, and takes nothing behind the colon for no byte.
func ParseAny(s string) ([]byte, error) {
	switch kind, text, _ := strings.Cut(s, ":"); kind {
	case "hex":
		b, err := hex.DecodeString(text)
		if err != nil {
			return nil, fmt.Errorf("%.60q is not made of pairs of hexadecimal digits", text)
		}
		return b, nil
	case "ascii":
		for _, c := range []byte(text) {
			if c >= 0x80 {
				return nil, fmt.Errorf("%.60q is not ASCII: write it as hex:DIGITS", text)
			}
		}
		return []byte(text), nil
	}
	return nil, fmt.Errorf("%.60q is neither hex:DIGITS nor ascii:TEXT", s)
}
