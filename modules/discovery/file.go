package discovery

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/placeholder"
)

func init() { caddy.RegisterModule(new(File)) }

// File has the backends that a file lists, in JSON or YAML. The file is read
// again when it changes, also when another one takes its place. One that is
// missing or has a mistake leaves the backends that are known.
type File struct {
	Settings

	// The file, of 4 MiB at the most: a list whose entries are "ip:port" or objects
	// with addr, weight, priority and max_sessions. It is JSON when its name ends
	// in .json, YAML when that is .yaml or .yml, and else whatever it can be read
	// as. Placeholders are replaced at load. Needed.
	Path string `json:"path,omitempty"`

	read atomic.Pointer[fileState] // of what was read last
}

// CaddyModule returns the Caddy module information.
func (*File) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse.sources.file",
		New: func() caddy.Module { return new(File) },
	}
}

// Provision finds out the path. Whether the file is there is seen later: what
// writes it may start after this process.
func (f *File) Provision(ctx caddy.Context) error {
	if f.Path == "" {
		return errors.New("path: missing, as in /run/game/backends.json")
	}
	if err := placeholder.Replace(placeholder.Option{Name: "path", Value: &f.Path}); err != nil {
		return err
	}
	return f.Settings.Provision(ctx)
}

const (
	maxFile  = 4 << 20
	filePoll = time.Second
)

// fileState is what tells one version of a file from the next. One that is the
// same in all of it is found when the source is asked anyway.
type fileState struct {
	inode    uint64
	size     int64
	modified time.Time
}

func stateOf(info os.FileInfo) fileState {
	s := fileState{size: info.Size(), modified: info.ModTime()}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		s.inode = st.Ino
	}
	return s
}

// List implements Source.
func (f *File) List(context.Context) (Set, error) {
	h, err := os.OpenFile(f.Path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return Set{}, err
	}
	defer h.Close()
	info, err := h.Stat()
	if err != nil {
		return Set{}, err
	}
	if !info.Mode().IsRegular() {
		return Set{}, fmt.Errorf("%s is not a regular file", f.Path)
	}
	state := stateOf(info)
	f.read.Store(&state)
	content, err := io.ReadAll(io.LimitReader(h, maxFile+1))
	if err != nil {
		return Set{}, err
	}
	if len(content) > maxFile {
		return Set{}, fmt.Errorf("%s has more than 4 MiB", f.Path)
	}
	list, err := parseFile(f.Path, content)
	if err != nil {
		return Set{}, err
	}
	if len(list) > maxEndpoints {
		return Set{}, fmt.Errorf("%s has %d entries; %d are the most", f.Path, len(list), maxEndpoints)
	}
	return Set{Endpoints: list, Ordered: true}, nil
}

// Watch looks every second whether the file is still the one that was read.
func (f *File) Watch(ctx context.Context, changed func()) error {
	tick := time.NewTicker(filePoll)
	defer tick.Stop()
	var told fileState
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		info, err := os.Stat(f.Path)
		if err != nil {
			continue // List says so
		}
		now, read := stateOf(info), f.read.Load()
		if now != told && (read == nil || now != *read) {
			told = now
			changed()
		}
	}
}

// UnmarshalCaddyfile sets up the source from Caddyfile tokens. Syntax:
//
//	file [<path>] {
//		path             <path>
//		refresh_interval <duration>
//	}
func (f *File) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume the name of the kind
	options := f.CaddyfileOptions()
	options["path"] = caddyopt.String(&f.Path)
	if d.NextArg() {
		f.Path = d.Val()
		delete(options, "path")
	}
	return caddyopt.BlockOf(d, "the source file", options)
}

// Interface guards
var (
	_ Source                = (*File)(nil)
	_ caddy.Provisioner     = (*File)(nil)
	_ caddy.Validator       = (*File)(nil)
	_ caddyfile.Unmarshaler = (*File)(nil)
)
