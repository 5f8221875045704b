// Package firstbytes matches flows by what a client sends first: literal bytes
// at an offset, a length. How that is decided is in literal.go.
package firstbytes

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/mholt/caddy-l4/layer4"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/strictjson"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

func init() { caddy.RegisterModule(new(Matcher)) }

// Matcher matches flows by their first bytes: of a TCP connection those of the
// stream, of a UDP session those of the first datagram.
type Matcher struct {
	// The bytes, as hex:ffffffff or ascii:HELLO, up to 512.
	Prefix string `json:"prefix,omitempty"`

	// Where they stand, from 0 to 4096. Default: 0.
	Offset int `json:"offset,omitempty"`

	// How many bytes there are. Prefix, length or both are needed.
	Length *Length `json:"length,omitempty"`

	prefix []byte
}

// Length is a range of lengths.
type Length struct {
	// The least number of bytes. Default: 0.
	Min int `json:"min,omitempty"`

	// The greatest number of bytes. Of a TCP connection that is known when the
	// time for first bytes is over: every flow waits for it. Default: no limit.
	Max *int `json:"max,omitempty"`
}

// CaddyModule returns the Caddy module information.
func (*Matcher) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "layer4.matchers.first_bytes",
		New: func() caddy.Module { return new(Matcher) },
	}
}

// UnmarshalJSON decodes the matcher with errors that name the key.
func (m *Matcher) UnmarshalJSON(b []byte) error {
	type plain Matcher
	return strictjson.Unmarshal(b, (*plain)(m))
}

// Provision reads the prefix.
func (m *Matcher) Provision(caddy.Context) (err error) {
	if m.Prefix == "" {
		return nil
	}
	if m.prefix, err = parsePrefix(m.Prefix); err != nil {
		return fmt.Errorf("prefix: %w", err)
	}
	return nil
}

// Validate checks what Provision has left.
func (m *Matcher) Validate() error {
	switch l := m.Length; {
	case m.Prefix == "" && l == nil:
		return errors.New("neither prefix nor length is given: every flow would match")
	case m.Offset < 0 || m.Offset > maxOffset:
		return fmt.Errorf("offset: %d is not from 0 to %d", m.Offset, maxOffset)
	case m.Offset > 0 && m.Prefix == "":
		return errors.New("offset: there is no prefix to look for at it")
	case l != nil && l.Min < 0:
		return fmt.Errorf("length.min: %d is negative", l.Min)
	case l != nil && l.Max != nil && *l.Max < l.Min:
		return fmt.Errorf("length.max: %d is less than length.min, %d", *l.Max, l.Min)
	case l != nil && l.Max == nil && l.Min == 0 && m.Prefix == "":
		return errors.New("length: neither min nor max is given: every flow would match")
	}
	return nil
}

// Match implements layer4.ConnMatcher.
func (m *Matcher) Match(cx *layer4.Connection) (bool, error) {
	return m.MatchFlow(sniff.Of(cx), netip.AddrPort{}, netip.AddrPort{})
}

// MatchFlow implements listener.FlowMatcher.
func (m *Matcher) MatchFlow(f *sniff.Flow, _, _ netip.AddrPort) (bool, error) {
	if f.Empty() {
		return false, layer4.ErrConsumedAllPrefetchedBytes
	}
	switch m.look(f.Input()) {
	case yes:
		return true, nil
	case more:
		return false, layer4.ErrConsumedAllPrefetchedBytes
	}
	return false, nil
}

// Recognises implements listener.Recogniser.
func (m *Matcher) Recognises(first []byte, _ netip.Addr, more bool) bool {
	in := sniff.Input{Bytes: first}
	if !more {
		in.Datagrams, in.Final = whole, true
	}
	return m.look(&in) == yes
}

// whole says that the bytes of an input are all there is.
var whole = [][]byte{}

// look asks for the prefix first, which may decide sooner.
func (m *Matcher) look(in *sniff.Input) answer {
	a := yes
	if m.prefix != nil {
		if a = begins(in.Bytes, m.prefix, m.Offset, in.UDP()); a == no {
			return no
		}
	}
	if m.Length != nil {
		if l := within(len(in.Bytes), m.Length.Min, m.Length.Max, in.UDP(), in.Final); l != yes {
			return l
		}
	}
	return a
}

// UnmarshalCaddyfile sets up the matcher from Caddyfile tokens. Syntax:
//
//	first_bytes [<prefix>] {
//		prefix <prefix>
//		offset <bytes>
//		length <min> [<max>]
//	}
func (m *Matcher) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume matcher name
	prefix := caddyopt.String(&m.Prefix)
	if d.NextArg() {
		m.Prefix = d.Val()
		prefix = caddyopt.Func(func(d *caddyfile.Dispenser) error {
			return d.Errf("prefix: given twice, first on the line of first_bytes")
		})
	}
	return caddyopt.BlockOf(d, "first_bytes", caddyopt.Options{
		"prefix": prefix,
		"offset": caddyopt.Int(&m.Offset),
		"length": caddyopt.Func(m.unmarshalLength),
	})
}

func (m *Matcher) unmarshalLength(d *caddyfile.Dispenser) error {
	args := d.RemainingArgs()
	if len(args) < 1 || len(args) > 2 {
		return d.Errf("length: one or two numbers are wanted, as in length 20 1200")
	}
	var n [2]int
	for i, a := range args {
		v, err := strconv.Atoi(a)
		if err != nil {
			return d.Errf("length: %q is not a whole number", a)
		}
		n[i] = v
	}
	m.Length = &Length{Min: n[0]}
	if len(args) == 2 {
		m.Length.Max = &n[1]
	}
	return nil
}

// Interface guards
var (
	_ caddy.Provisioner     = (*Matcher)(nil)
	_ caddy.Validator       = (*Matcher)(nil)
	_ caddyfile.Unmarshaler = (*Matcher)(nil)
	_ listener.FlowMatcher  = (*Matcher)(nil)
	_ listener.Recogniser   = (*Matcher)(nil)
)
