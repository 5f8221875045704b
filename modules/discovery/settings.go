package discovery

import (
	"fmt"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
)

// Settings are the options of every kind of source. A kind embeds them.
type Settings struct {
	// How often the source is asked, when it tells of no change and its answer
	// does not say how long it holds. From 1s. Default: 10s.
	RefreshInterval *caddy.Duration `json:"refresh_interval,omitempty"`
}

// The bounds of refresh_interval.
const (
	DefaultRefreshInterval = 10 * time.Second
	minRefreshInterval     = time.Second
)

// Common returns the settings.
func (s *Settings) Common() *Settings { return s }

// Provision sets the defaults. A kind with a Provision of its own calls it.
func (s *Settings) Provision(caddy.Context) error {
	if s.RefreshInterval == nil {
		d := caddy.Duration(DefaultRefreshInterval)
		s.RefreshInterval = &d
	}
	return nil
}

// Validate checks what Provision has left. A kind with a Validate of its own
// calls it.
func (s *Settings) Validate() error {
	if s.RefreshInterval == nil { // a kind's own Provision has not come to it; Load will
		return nil
	}
	if d := time.Duration(*s.RefreshInterval); d < minRefreshInterval {
		return fmt.Errorf("refresh_interval: %v is less than %v", d, minRefreshInterval)
	}
	return nil
}

// CaddyfileOptions are the options of every kind. Syntax:
//
//	refresh_interval <duration>
func (s *Settings) CaddyfileOptions() caddyopt.Options {
	return caddyopt.Options{"refresh_interval": caddyopt.Ptr(&s.RefreshInterval, caddyopt.Duration)}
}
