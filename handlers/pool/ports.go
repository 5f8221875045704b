package pool

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/portrange"
)

// TargetPort maps the port that a client has hit to the port of the backend. In
// JSON it is "same", "offset N", or a list of ports and ranges of ports.
type TargetPort struct {
	Offset int               // of the port that was hit; 0: the same port
	List   []portrange.Range // one port for each that the listener has, in their order; nil: Offset
}

// maxPorts bounds a list as a bind is bounded.
const maxPorts = 1 << 16

const targetPortForms = `"same", "offset N" or a list of ports`

// parseTargetPort reads the words of the Caddyfile, and of a string in JSON.
func parseTargetPort(words []string) (t TargetPort, err error) {
	switch {
	case len(words) == 0:
		return t, errors.New("a value is missing: same, offset N or ports")
	case words[0] == "same" && len(words) == 1:
		return t, nil
	case words[0] == "offset" && len(words) == 2:
		if t.Offset, err = strconv.Atoi(words[1]); err != nil {
			return t, fmt.Errorf("%q is not a whole number", words[1])
		}
		return t, nil
	}
	for _, w := range words {
		r, err := portrange.Parse(w)
		if err != nil {
			return t, fmt.Errorf("%w, and not same or offset N", err)
		}
		t.List = append(t.List, r)
	}
	return t, nil
}

// UnmarshalJSON reads a string or a list.
func (t *TargetPort) UnmarshalJSON(b []byte) error {
	if b = bytes.TrimSpace(b); len(b) > 0 && b[0] == '[' {
		*t = TargetPort{List: []portrange.Range{}}
		return json.Unmarshal(b, &t.List)
	}
	var s string
	if json.Unmarshal(b, &s) != nil || s == "" {
		return fmt.Errorf("is neither %s", targetPortForms)
	}
	read, err := parseTargetPort(strings.Fields(s))
	if err != nil || read.List != nil {
		return fmt.Errorf("%q is neither %s", s, targetPortForms)
	}
	*t = read
	return nil
}

// MarshalJSON writes what UnmarshalJSON reads.
func (t TargetPort) MarshalJSON() ([]byte, error) {
	switch {
	case t.List != nil:
		return json.Marshal(t.List)
	case t.Offset == 0:
		return json.Marshal("same")
	}
	return json.Marshal(fmt.Sprintf("offset %d", t.Offset))
}

// unmarshal reads a target_port option. Syntax:
//
//	target_port same
//	target_port offset <number>
//	target_port <ports...>
func (t *TargetPort) unmarshal(d *caddyfile.Dispenser) (err error) {
	if *t, err = parseTargetPort(d.RemainingArgs()); err != nil {
		return d.Errf("target_port: %v", err)
	}
	return nil
}

// portsOf checks the mapping against the ports of the listener it is used on,
// which are nil where that is not ours.
func (t *TargetPort) portsOf(hit []uint16) (*portMap, error) {
	if t.List == nil {
		m := &portMap{offset: t.Offset}
		if t.Offset < -65535 || t.Offset > 65535 {
			return nil, fmt.Errorf("offset %d is not between -65535 and 65535", t.Offset)
		}
		for _, p := range hit {
			if _, ok := m.of(p); !ok && p != 0 {
				return nil, fmt.Errorf("offset %d: port %d of the listener would be %d, which is not from 1 to 65535", t.Offset, p, int(p)+t.Offset)
			}
		}
		return m, nil
	}
	var to []uint16
	for _, r := range t.List {
		for p := int(r.First); p <= int(r.Last) && len(to) <= maxPorts; p++ {
			to = append(to, uint16(p))
		}
	}
	switch {
	case hit == nil:
		return nil, errors.New("a list is for the ports of a listener of the wayhouse app, which this is not: write same or offset N")
	case len(to) != len(hit):
		return nil, fmt.Errorf("%d ports for a listener that has %d: give one for each", len(to), len(hit))
	}
	m := &portMap{list: make(map[uint16]uint16, len(to))}
	for i, p := range hit {
		if p == 0 {
			return nil, errors.New("a list cannot be for port 0, which the kernel chooses: write same or offset N")
		}
		m.list[p] = to[i]
	}
	return m, nil
}

// portMap gives a port for a port: by an offset, or by a list of those that have
// one.
type portMap struct {
	offset int
	list   map[uint16]uint16 // nil: offset
}

func (m *portMap) of(port uint16) (to uint16, ok bool) {
	if m.list != nil {
		to, ok = m.list[port]
		return to, ok
	}
	p := int(port) + m.offset
	return uint16(p), p > 0 && p <= 65535
}

// target is where a backend is reached by a client that has hit local. A nil map
// leaves the backend's own port.
func (m *portMap) target(backend, local netip.AddrPort) (to netip.AddrPort, ok bool) {
	if m == nil {
		return backend, true
	}
	port, ok := m.of(local.Port())
	return netip.AddrPortFrom(backend.Addr(), port), ok
}
