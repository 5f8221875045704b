package filter

import (
	"context"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"
)

// What lists and databases have in common: a worker that runs while any filter
// of a running config follows, and files that change.

// following counts followers. The first begins the worker, the last ends it, so
// that a reload, where the new config starts before the old one stops, changes
// nothing.
type following struct {
	mu     sync.Mutex
	n      int
	cancel context.CancelFunc
	done   chan struct{}
}

func (f *following) enter(run func(context.Context)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.n++; f.n > 1 {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	f.cancel, f.done = cancel, done
	go func() {
		defer close(done)
		run(ctx)
	}()
}

// leave undoes enter.
func (f *following) leave() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.n--; f.n == 0 {
		f.cancel()
		<-f.done
	}
}

const (
	filePoll = time.Second
	// fileSettles is how long a file may change again without another time
	// of change, at most.
	fileSettles = 2 * time.Second
)

// every calls f until ctx ends.
func every(ctx context.Context, d time.Duration, f func()) {
	tick := time.NewTicker(d)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			f()
		}
	}
}

// file is a file that is read again when it is another one.
type file struct {
	path string
	seen fileState // of the content that was taken
}

// fileState is what tells one version of a file from the next.
type fileState struct {
	inode    uint64
	size     int64
	modified time.Time
	settled  bool // it was old enough when it was read not to have changed since without a trace
}

// read returns what is in the file, unless it is what was taken last. Whoever
// takes it sets seen.
func (f *file) read(max int64) (content []byte, now fileState, changed bool, err error) {
	h, err := os.OpenFile(f.path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, now, false, err
	}
	defer h.Close()
	info, err := h.Stat()
	if err != nil {
		return nil, now, false, err
	}
	if !info.Mode().IsRegular() {
		return nil, now, false, fmt.Errorf("%s is not a regular file", f.path)
	}
	now = fileState{size: info.Size(), modified: info.ModTime()}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		now.inode = st.Ino
	}
	if f.seen.settled && f.seen.inode == now.inode && f.seen.size == now.size && f.seen.modified.Equal(now.modified) {
		return nil, now, false, nil
	}
	now.settled = time.Since(now.modified) > fileSettles
	content, err = io.ReadAll(io.LimitReader(h, max+1))
	if err != nil {
		return nil, now, false, err
	}
	if int64(len(content)) > max {
		return nil, now, false, fmt.Errorf("%s has more than %d bytes", f.path, max)
	}
	return content, now, true, nil
}
