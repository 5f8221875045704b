package health

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/literal"
)

func init() { caddy.RegisterModule(new(UDPProbe)) }

// UDPProbe finds a backend healthy that answers a datagram.
type UDPProbe struct {
	Settings

	// The datagram to send, as hex:… or ascii:…, of 1 to 65507 bytes. Required.
	Send string `json:"send,omitempty"`

	// What the answer has to begin with, as hex:… or ascii:…. Datagrams that
	// begin otherwise are passed over. Default: any answer will do.
	Expect string `json:"expect,omitempty"`

	send, expect []byte
}

// CaddyModule returns the Caddy module information.
func (*UDPProbe) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse.health_checks.udp_probe",
		New: func() caddy.Module { return new(UDPProbe) },
	}
}

// Provision sets the defaults and reads the bytes.
func (c *UDPProbe) Provision(ctx caddy.Context) error {
	if c.Send == "" {
		return errors.New("send: missing; give the datagram to send, hex:… or ascii:…")
	}
	var err error
	if c.send, err = literal.Parse(c.Send); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	if c.Expect != "" {
		if c.expect, err = literal.Parse(c.Expect); err != nil {
			return fmt.Errorf("expect: %w", err)
		}
	}
	return c.Settings.Provision(ctx)
}

// maxDatagram is the largest payload of a UDP datagram.
const maxDatagram = 65507

// Validate checks what Provision has left.
func (c *UDPProbe) Validate() error {
	if len(c.send) > maxDatagram {
		return fmt.Errorf("send: %d bytes do not fit a datagram, which holds %d", len(c.send), maxDatagram)
	}
	if len(c.expect) > maxDatagram {
		return fmt.Errorf("expect: %d bytes do not fit a datagram, which holds %d", len(c.expect), maxDatagram)
	}
	return c.Settings.Validate()
}

// Check sends the datagram from a socket of its own and waits for an answer.
// The backend's port being closed ends it early.
func (c *UDPProbe) Check(ctx context.Context, to netip.AddrPort) error {
	conn, err := c.dial(ctx, "udp", to)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if _, err := conn.Write(c.send); err != nil {
		return err
	}
	b := make([]byte, max(len(c.expect), 1)) // the rest of an answer is cut off
	other := false
	for {
		n, err := conn.Read(b)
		switch {
		case err == nil && bytes.HasPrefix(b[:n], c.expect):
			return nil
		case err == nil:
			other = true
		case ctx.Err() == nil:
			return err
		case other:
			return errUnexpected
		default:
			return ctx.Err()
		}
	}
}

var errUnexpected = errors.New("no answer begins with what is expected")

// UnmarshalCaddyfile sets up the check from Caddyfile tokens. Syntax, beside
// the options of tcp_connect:
//
//	udp_probe {
//		send   <bytes>
//		expect <bytes>
//	}
func (c *UDPProbe) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return block(d, &c.Settings, caddyopt.Options{"send": caddyopt.String(&c.Send), "expect": caddyopt.String(&c.Expect)})
}

// Interface guards
var (
	_ Check                 = (*UDPProbe)(nil)
	_ caddy.Provisioner     = (*UDPProbe)(nil)
	_ caddy.Validator       = (*UDPProbe)(nil)
	_ caddyfile.Unmarshaler = (*UDPProbe)(nil)
)
