package sniff

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
)

// Hosts are patterns of host names: an exact name, *.suffix for the names below
// a suffix at any depth, or .suffix for these and the suffix itself. How many
// there are makes no difference to the cost of a look-up.
type Hosts struct {
	exact map[string]struct{}
	below map[string]struct{} // by suffix
}

// maxHost is the longest name there is.
const maxHost = 253

// ParseHosts reads patterns.
func ParseHosts(patterns []string) (*Hosts, error) {
	h := &Hosts{exact: make(map[string]struct{}), below: make(map[string]struct{})}
	for i, p := range patterns {
		suffix, below := strings.CutPrefix(p, "*.")
		apex := false
		if !below {
			suffix, below = strings.CutPrefix(p, ".")
			apex = below
		}
		name := string(AppendHost(nil, []byte(suffix)))
		if err := checkHost(name); err != nil {
			return nil, fmt.Errorf("host[%d]: %q: %w", i, p, err)
		}
		if below {
			h.below[name] = struct{}{}
		}
		if !below || apex {
			h.exact[name] = struct{}{}
		}
	}
	return h, nil
}

func checkHost(name string) error {
	if name == "" || len(name) > maxHost {
		return fmt.Errorf("%d characters: a name has from 1 to %d", len(name), maxHost)
	}
	for label := range strings.SplitSeq(name, ".") {
		if label == "" {
			return errors.New("a label is empty")
		}
		for _, c := range label {
			switch {
			case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '-', c == '_', c == ':': // IPv6 too
			case c == '*':
				return errors.New("a star is for all labels before a suffix, as in *.example.com")
			case c >= 0x80:
				return errors.New("write the name as DNS has it, with xn--")
			default:
				return fmt.Errorf("%q does not belong in a name", c)
			}
		}
	}
	return nil
}

// Match reports whether a pattern matches a host, which is as hints have it.
func (h *Hosts) Match(host []byte) bool {
	if _, ok := h.exact[string(host)]; ok {
		return true
	}
	if len(h.below) == 0 || len(host) > maxHost {
		return false
	}
	for i := bytes.IndexByte(host, '.'); i >= 0; {
		host = host[i+1:]
		if _, ok := h.below[string(host)]; ok {
			return i > 0 // something stands before the suffix
		}
		i = bytes.IndexByte(host, '.')
	}
	return false
}

// Empty reports whether there is no pattern.
func (h *Hosts) Empty() bool { return len(h.exact)+len(h.below) == 0 }
