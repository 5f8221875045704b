package adminapi

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"sync"

	"github.com/wayhouse-proxy/wayhouse/modules/sniff/wasm"
)

// maxUploads is how many modules are read at a time.
const maxUploads = 2

// room is what a module is read into. It has place for the largest, so that
// nothing grows and leaves several times as much behind.
type room [wasm.MaxSize + 1]byte

// uploads bounds the modules that are in memory at once.
var uploads = uploading{turn: make(chan struct{}, maxUploads)}

type uploading struct {
	turn chan struct{}

	mu    sync.Mutex // guards what is below
	users int        // that read or wait for their turn
	free  []*room    // kept while there are users
}

// read reads a module when it is its turn.
func (u *uploading) read(ctx context.Context, r io.Reader) ([]byte, error) {
	u.mu.Lock()
	u.users++
	u.mu.Unlock()
	defer func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		if u.users--; u.users == 0 {
			u.free = nil
		}
	}()
	select {
	case u.turn <- struct{}{}:
		defer func() { <-u.turn }()
	case <-ctx.Done():
		return nil, &problem{http.StatusServiceUnavailable, "other modules are being uploaded"}
	}
	b := u.take()
	defer u.give(b)
	for n := 0; ; {
		m, err := r.Read(b[n:])
		n += m
		switch {
		case err == io.EOF:
			return bytes.Clone(b[:n]), nil
		case err != nil:
			return nil, err
		}
	}
}

func (u *uploading) take() *room {
	u.mu.Lock()
	defer u.mu.Unlock()
	n := len(u.free)
	if n == 0 {
		return new(room)
	}
	b := u.free[n-1]
	u.free = u.free[:n-1]
	return b
}

func (u *uploading) give(b *room) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.free = append(u.free, b)
}
