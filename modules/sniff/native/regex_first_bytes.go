package native

import (
	"fmt"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

func init() { caddy.RegisterModule(new(RegexFirstBytes)) }

// RegexFirstBytes recognises literal patterns at fixed offsets. In spite of its
// name it knows no regular expressions.
type RegexFirstBytes struct {
	// What to look for, as [key:NAME|] PATTERN {|PATTERN} with up to 32 patterns,
	// each [@OFFSET ](hex:DIGITS|ascii:TEXT). Blanks around the parts between the
	// bars are dropped. One pattern at its offset, 0 to 512, is enough. The key
	// of the hint is NAME, or firstbytes. Required.
	Pattern string `json:"pattern,omitempty"`

	patterns patterns
}

// CaddyModule returns the Caddy module information.
func (*RegexFirstBytes) CaddyModule() caddy.ModuleInfo {
	return info("regex_first_bytes", func() caddy.Module { return new(RegexFirstBytes) })
}

// Provision reads the patterns.
func (r *RegexFirstBytes) Provision(caddy.Context) (err error) {
	if r.patterns, err = parsePatterns(r.Pattern); err != nil {
		return fmt.Errorf("pattern: %w", err)
	}
	return nil
}

// Sniff implements sniff.Sniffer.
func (r *RegexFirstBytes) Sniff(in *sniff.Input, h *sniff.Hint) sniff.Verdict {
	return verdict(r.patterns.match(in.Bytes, in.UDP()), r.patterns.key, h)
}

// NeverRejects implements sniff.NeverRejects.
func (*RegexFirstBytes) NeverRejects() {}

// UnmarshalCaddyfile sets up the sniffer from Caddyfile tokens. Syntax:
//
//	regex_first_bytes <pattern>
func (r *RegexFirstBytes) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume sniffer name
	if err := caddyopt.String(&r.Pattern).Read(d); err != nil {
		return err
	}
	return caddyopt.None(d)
}

// Interface guards
var (
	_ sniff.Native          = (*RegexFirstBytes)(nil)
	_ caddy.Provisioner     = (*RegexFirstBytes)(nil)
	_ caddyfile.Unmarshaler = (*RegexFirstBytes)(nil)
)
