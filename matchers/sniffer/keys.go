package sniffer

import (
	"fmt"
	"strings"

	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

// keys is what a hint must have beside its host: for each name one of the
// values, where the name of a whole key is empty.
type keys struct {
	names  []string
	values []map[string]struct{} // by the index of the name
}

func parseKeys(list []string) (*keys, error) {
	k := new(keys)
	for i, s := range list {
		name, value, part := strings.Cut(s, "=")
		if !part {
			name, value = "", s
		}
		if value == "" || part && name == "" {
			return nil, fmt.Errorf("key[%d]: %q is neither a key, such as quic, nor a part, such as state=login", i, s)
		}
		at := k.index(name)
		if at < 0 {
			at = len(k.names)
			k.names = append(k.names, name)
			k.values = append(k.values, make(map[string]struct{}))
		}
		k.values[at][value] = struct{}{}
	}
	return k, nil
}

func (k *keys) index(name string) int {
	for i, n := range k.names {
		if n == name {
			return i
		}
	}
	return -1
}

// match reports whether a hint has one of the values of each name.
func (k *keys) match(h *sniff.Hint) bool {
	for i, name := range k.names {
		if !k.has(h, name, k.values[i]) {
			return false
		}
	}
	return true
}

// has looks at the key as a whole, at the key as a part, which foreign
// sniffers may make it, and at the parts.
func (k *keys) has(h *sniff.Hint, name string, values map[string]struct{}) bool {
	if h.HasKey {
		if name == "" {
			_, ok := values[string(h.Key)]
			return ok
		}
		if n := len(name); len(h.Key) > n && h.Key[n] == '=' && string(h.Key[:n]) == name {
			if _, ok := values[string(h.Key[n+1:])]; ok {
				return true
			}
		}
	}
	for _, p := range h.Parts() {
		if p.Name == name {
			if _, ok := values[string(p.Value)]; ok {
				return true
			}
		}
	}
	return false
}
