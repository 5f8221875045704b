// Package ticket matches flows that begin with a ticket: bytes by which whoever
// has a key sends a client to a pool. The bytes are described in
// internal/ticket; the command that makes them is in command.go.
package ticket

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/mholt/caddy-l4/layer4"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/flowaddr"
	"github.com/wayhouse-proxy/wayhouse/internal/strictjson"
	"github.com/wayhouse-proxy/wayhouse/internal/ticket"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

func init() { caddy.RegisterModule(new(Matcher)) }

// Matcher matches flows whose first bytes, or first datagram, have a ticket
// for a pool that is good and has not expired. No one is asked about it.
type Matcher struct {
	// The shared keys that tickets may be made with, as hex:… or base64:…, of
	// 16 to 1024 bytes. Placeholders such as {env.TICKET_KEY} and
	// {file./etc/wayhouse/ticket.key} are replaced at load. Up to 8; a new key is
	// added before it is used and the old one taken away after the last ticket has
	// expired. At least one is needed.
	Keys []string `json:"keys,omitempty"`

	// The pool that the ticket has to name. It is a name between the config and
	// whoever makes tickets: the handlers of the route decide where flows go.
	Pool string `json:"pool,omitempty"`

	// Where the ticket begins, in bytes, from 0 to 4096. Default: 0.
	Offset int `json:"offset,omitempty"`

	// Take tickets for one client address only. A ticket that is for one address
	// is only good for it in any case. Default: false.
	BindIP bool `json:"bind_ip,omitempty"`

	checker *ticket.Checker
}

const (
	maxKeys   = 8
	maxOffset = 4096
)

// CaddyModule returns the Caddy module information.
func (*Matcher) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "layer4.matchers.ticket",
		New: func() caddy.Module { return new(Matcher) },
	}
}

// UnmarshalJSON decodes the matcher with errors that name the key.
func (m *Matcher) UnmarshalJSON(b []byte) error {
	type plain Matcher
	return strictjson.Unmarshal(b, (*plain)(m))
}

// Provision reads the keys.
func (m *Matcher) Provision(caddy.Context) error {
	switch {
	case len(m.Keys) == 0:
		return errors.New("keys: none; give at least one, as in {file./etc/wayhouse/ticket.key}")
	case len(m.Keys) > maxKeys:
		return fmt.Errorf("keys: %d are more than %d", len(m.Keys), maxKeys)
	case m.Pool == "":
		return errors.New("pool: missing; give the name that tickets have to be for")
	}
	repl := caddy.NewReplacer()
	keys := make([][]byte, len(m.Keys))
	for i, s := range m.Keys {
		s, err := repl.ReplaceOrErr(s, true, true)
		if err == nil {
			keys[i], err = ticket.ParseKey(s)
		}
		if err != nil {
			return fmt.Errorf("keys[%d]: %w", i, err)
		}
	}
	var err error
	if m.checker, err = ticket.NewChecker(keys, m.Pool, m.BindIP); err != nil {
		return fmt.Errorf("pool: %w", err)
	}
	return nil
}

// Validate checks what Provision has left.
func (m *Matcher) Validate() error {
	if m.Offset < 0 || m.Offset > maxOffset {
		return fmt.Errorf("offset: %d is not from 0 to %d", m.Offset, maxOffset)
	}
	return nil
}

// Match implements layer4.ConnMatcher.
func (m *Matcher) Match(cx *layer4.Connection) (bool, error) {
	return m.MatchFlow(sniff.Of(cx), flowaddr.Of(cx.RemoteAddr()), netip.AddrPort{})
}

// MatchFlow reports whether the flow has a good ticket. A datagram is whole; of
// a stream more is waited for while what there is may be the beginning of one.
func (m *Matcher) MatchFlow(f *sniff.Flow, client, _ netip.AddrPort) (bool, error) {
	in := f.Input()
	b := in.Bytes
	if len(b) < m.Offset+ticket.Len {
		if in.UDP() || !m.checker.MayBegin(b[min(m.Offset, len(b)):]) {
			return false, nil
		}
		return false, layer4.ErrConsumedAllPrefetchedBytes
	}
	return m.checker.Check(b[m.Offset:], client.Addr(), time.Now()) == nil, nil
}

// Recognises implements listener.Recogniser.
func (m *Matcher) Recognises(first []byte, client netip.Addr, _ bool) bool {
	return len(first) >= m.Offset+ticket.Len && m.checker.Check(first[m.Offset:], client, time.Now()) == nil
}

// UnmarshalCaddyfile sets up the matcher from Caddyfile tokens. Syntax:
//
//	ticket {
//		key     <keys...>
//		pool    <name>
//		offset  <bytes>
//		bind_ip
//	}
func (m *Matcher) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume matcher name
	return caddyopt.Block(d, caddyopt.Options{
		"key":     caddyopt.Strings(&m.Keys),
		"pool":    caddyopt.String(&m.Pool),
		"offset":  caddyopt.Int(&m.Offset),
		"bind_ip": caddyopt.Word(&m.BindIP),
	})
}

// Interface guards
var (
	_ caddy.Provisioner     = (*Matcher)(nil)
	_ caddy.Validator       = (*Matcher)(nil)
	_ caddyfile.Unmarshaler = (*Matcher)(nil)
	_ listener.FlowMatcher  = (*Matcher)(nil)
	_ listener.Recogniser   = (*Matcher)(nil)
)
