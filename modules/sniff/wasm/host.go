// Package wasm runs sniffers that are WebAssembly modules from a directory:
// code of people who are not trusted, one fresh and bounded instance a call.
// What such a module looks like is in docs/sniffer-hosts/wasm.md.
package wasm

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
	"github.com/wayhouse-proxy/wayhouse/internal/strictjson"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

func init() { caddy.RegisterModule(new(Host)) }

// Host runs the WebAssembly sniffers of a directory.
type Host struct {
	// The directory. Every NAME.wasm in it is the sniffer NAME; files whose names
	// start with a dot are skipped. It is read whenever a config is loaded.
	Dir string `json:"dir,omitempty"`

	// How long a call may take, with making its instance. A call waits as long
	// again, at most, for others to end. At least 1ms. Default: 20ms.
	CallTimeout *caddy.Duration `json:"call_timeout,omitempty"`

	// How much memory an instance may have, in bytes or as a string such as
	// 16MiB, at most 4GiB. It is rounded down to pages of 64 KiB; zero is
	// refused. Default: 16MiB.
	MaxMemory *Size `json:"max_memory,omitempty"`

	// The modules that may be in the directory, by name. If there are any, a file
	// that is not listed, has another hash or does not load fails the whole
	// config; otherwise such a file is logged and skipped.
	Modules map[string]*Pin `json:"modules,omitempty"`

	limits  limits
	engine  *engine
	loaded  map[string]*loaded
	refused map[string]error // those that are skipped
	logger  *zap.Logger
}

// Pin says which module a name stands for.
type Pin struct {
	// The SHA-256 of the file: 64 hexadecimal digits.
	SHA256 string `json:"sha256,omitempty"`

	// A string handed to the module on every call. Only the module knows what it
	// means. Default: none
	Config *string `json:"config,omitempty"`
}

// Size is a number of bytes; in JSON a number, or a string with a unit.
type Size int64

// UnmarshalJSON reads a number of bytes with or without a unit.
func (s *Size) UnmarshalJSON(b []byte) error {
	text := string(b)
	if len(b) > 0 && b[0] == '"' {
		if err := json.Unmarshal(b, &text); err != nil {
			return err
		}
	}
	n, err := caddyopt.ParseSize(text)
	*s = Size(n)
	return err
}

const (
	defaultTimeout = 20 * time.Millisecond
	defaultMemory  = 16 << 20
	mostMemory     = 4 << 30
)

// CaddyModule returns the Caddy module information.
func (*Host) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "wayhouse.sniffer_hosts.wasm", New: func() caddy.Module { return new(Host) }}
}

// UnmarshalJSON decodes the host with errors that name the key.
func (h *Host) UnmarshalJSON(b []byte) error {
	type plain Host
	return strictjson.Unmarshal(b, (*plain)(h))
}

// Provision reads the directory and compiles what is in it.
func (h *Host) Provision(ctx caddy.Context) error {
	h.logger = ctx.Logger()
	timeout, memory := defaultTimeout, Size(defaultMemory)
	if h.CallTimeout != nil {
		timeout = time.Duration(*h.CallTimeout)
	}
	if h.MaxMemory != nil {
		memory = *h.MaxMemory
	}
	if err := h.check(timeout, memory); err != nil {
		return err
	}
	h.limits = limits{timeout: timeout, memory: int(memory) / pageSize * pageSize}
	h.loaded, h.refused = make(map[string]*loaded), make(map[string]error)
	if err := metrics.Register(ctx.GetMetricsRegistry()); err != nil {
		return err
	}
	e, err := takeEngine()
	if err != nil {
		return err
	}
	h.engine = e
	return h.scan()
}

// check looks at the config before anything is done with it, which is earlier
// than Validate would.
func (h *Host) check(timeout time.Duration, memory Size) error {
	switch {
	case h.Dir == "":
		return errors.New("dir: the directory of the modules is missing")
	case timeout < time.Millisecond:
		return fmt.Errorf("call_timeout: %v is less than 1ms; leave it out for %v", timeout, defaultTimeout)
	case memory < 1 || memory > mostMemory:
		return fmt.Errorf("max_memory: %d is not between 1 byte and 4GiB; leave it out for 16MiB", memory)
	}
	for _, name := range slices.Sorted(maps.Keys(h.Modules)) {
		pin := h.Modules[name]
		if err := sniff.CheckName(name); err != nil {
			return fmt.Errorf("modules: %w", err)
		}
		if pin == nil {
			return fmt.Errorf("modules.%s: sha256 is missing", name)
		}
		if b, err := hex.DecodeString(pin.SHA256); err != nil || len(b) != 32 {
			return fmt.Errorf("modules.%s.sha256: %q is not 64 hexadecimal digits", name, pin.SHA256)
		}
		if pin.Config != nil && *pin.Config == "" {
			return fmt.Errorf("modules.%s.config: is empty; leave it out instead", name)
		}
	}
	return nil
}

// Sniffers implements sniff.Host.
func (h *Host) Sniffers(add func(name, place string, s sniff.Sniffer) error) error {
	for _, name := range slices.Sorted(maps.Keys(h.loaded)) {
		l := h.loaded[name]
		if err := add(name, l.path, l.sniffer); err != nil {
			return err
		}
	}
	return nil
}

// Cleanup gives back what Provision took. Running calls end before it does.
func (h *Host) Cleanup() error {
	if h.engine == nil {
		return nil
	}
	for _, l := range h.loaded {
		l.close()
	}
	return h.engine.give()
}

// UnmarshalCaddyfile sets up the host from Caddyfile tokens. Syntax:
//
//	wasm {
//		dir <path>
//		call_timeout <duration>
//		max_memory <size>
//		module <name> {
//			sha256 <hash>
//			config <string>
//		}
//	}
func (h *Host) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume host name
	return caddyopt.Block(d, caddyopt.Options{
		"dir":          caddyopt.String(&h.Dir),
		"call_timeout": caddyopt.Ptr(&h.CallTimeout, caddyopt.Duration),
		"max_memory":   caddyopt.Ptr(&h.MaxMemory, func(s *Size) caddyopt.Option { return caddyopt.Size((*int64)(s)) }),
		"module":       caddyopt.Many(caddyopt.Func(h.unmarshalModule)),
	})
}

func (h *Host) unmarshalModule(d *caddyfile.Dispenser) error {
	if !d.NextArg() {
		return d.Errf("module: a name is missing")
	}
	name := d.Val()
	if h.Modules[name] != nil {
		return d.Errf("module %s: given twice", name)
	}
	pin := new(Pin)
	if h.Modules == nil {
		h.Modules = make(map[string]*Pin)
	}
	h.Modules[name] = pin
	return caddyopt.BlockOf(d, "module "+name, caddyopt.Options{
		"sha256": caddyopt.String(&pin.SHA256),
		"config": caddyopt.Ptr(&pin.Config, caddyopt.String),
	})
}

// Interface guards
var (
	_ caddy.Provisioner     = (*Host)(nil)
	_ caddy.CleanerUpper    = (*Host)(nil)
	_ caddyfile.Unmarshaler = (*Host)(nil)
	_ sniff.Host            = (*Host)(nil)
	_ json.Unmarshaler      = (*Size)(nil)
)
