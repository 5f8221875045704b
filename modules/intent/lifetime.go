package intent

import (
	"fmt"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.etcd.io/bbolt"
	"go.uber.org/zap"
)

// When which file is used:
//
//	start of the process   Acquire(dir): what is in the file holds
//	reload, same dir       Acquire(dir), Release(dir): nothing happens
//	reload, another dir    Acquire(b): all that holds is written to b
//	                       Release(a): a is emptied, for b has it now
//	  that fails           Release(b): it is written back to a, and b is emptied
//	end                    Release(dir): the file is closed
//
// Each running config has acquired one directory, or Off. A file that has
// something else to say than what holds is refused: one of the two would be lost.

// Off is the directory of a store that is in memory only.
const Off = "off"

// file is one in use.
type file struct {
	store *Store
	dir   string
	db    *bbolt.DB // nil: Off

	// What was found in the file holds since it was opened; before, nothing did.
	adopted *content

	stop chan struct{} // ends saveHints
	over chan struct{} // it has ended
}

// Acquire has the store be kept in a directory, for a config that starts. What
// is in the file there holds from then on, unless something does already.
// Release gives the directory back.
func (s *Store) Acquire(dir string, log *zap.Logger) error {
	_, _, err := s.open.LoadOrNew(dir, func() (caddy.Destructor, error) { return s.begin(dir, log) })
	return err
}

// Release gives back a directory that Acquire has taken.
func (s *Store) Release(dir string) error {
	_, err := s.open.Delete(dir)
	return err
}

func (s *Store) begin(dir string, log *zap.Logger) (*file, error) {
	f := &file{store: s, dir: dir, stop: make(chan struct{}), over: make(chan struct{})}
	found := new(content)
	if dir != Off {
		var err error
		if f.db, found, err = openFile(dir); err != nil {
			return nil, err
		}
	}
	pools, err := s.push(f, found)
	if err != nil {
		if f.db != nil {
			f.db.Close()
		}
		return nil, err
	}
	go f.saveHints(log)
	for _, p := range pools {
		s.tell(p)
	}
	return f, nil
}

// push makes f the file that is written to, and returns the pools for which
// something has changed.
func (s *Store) push(f *file, found *content) (pools []string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.contentLocked()
	adopts := now.empty() && !found.empty()
	if !adopts && !found.empty() && !found.says(now) {
		return nil, fmt.Errorf("%s has what operators have changed before, which is not what they have changed since this process runs; "+
			"drop the one (DELETE /overlay, POST /admin/undrain) or move the other (%s) away", f.dir, FileName)
	}
	if f.db != nil {
		kept := s.hints.keep(true)
		if err := s.fillLocked(f, found); err != nil {
			s.hints.keep(kept)
			return nil, err
		}
	}
	if adopts {
		s.overlays.Store(&found.overlays)
		s.drained.Store(found.drained)
		f.adopted = found
		for p := range found.overlays {
			pools = append(pools, p)
		}
	}
	s.hints.restore(found.hints)
	s.files = append(s.files, f)
	return pools, nil
}

// fillLocked has a file say what will hold. One that says so already is not
// written to: a process has to start while the disk is full.
func (s *Store) fillLocked(f *file, found *content) error {
	c := s.contentLocked()
	if c.empty() && len(c.hints) == 0 {
		return nil // what is found holds
	}
	if c.empty() {
		c.overlays, c.drained = found.overlays, found.drained
	}
	c.hints = append(slices.Clone(found.hints), c.hints...) // the last of a client counts
	return f.update(func(w *writer) error { return w.all(c) })
}

// contentLocked is all there is.
func (s *Store) contentLocked() *content {
	return &content{overlays: *s.overlays.Load(), drained: s.drained.Load(), hints: s.hints.saved()}
}

// says reports whether two contents want the same, hints apart.
func (c *content) says(d *content) bool {
	if (c.drained == nil) != (d.drained == nil) || count(c.overlays) != count(d.overlays) {
		return false
	}
	for p, o := range c.overlays {
		for addr, b := range o {
			if d.overlays[p][addr].plain() != b.plain() {
				return false
			}
		}
	}
	return true
}

// Destruct implements caddy.Destructor: no config uses the file any more.
func (f *file) Destruct() error {
	close(f.stop)
	<-f.over
	pools, err := f.store.pop(f)
	for _, p := range pools {
		f.store.tell(p)
	}
	return err
}

// pop closes a file, and returns the pools for which something has changed.
func (s *Store) pop(f *file) (pools []string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	last := len(s.files) - 1
	top := s.files[last] == f
	for i, g := range s.files {
		if g == f {
			s.files = append(s.files[:i:i], s.files[i+1:]...)
			break
		}
	}
	if f.db != nil {
		defer func() {
			if cerr := f.db.Close(); err == nil {
				err = cerr
			}
		}()
	}
	switch {
	case last == 0 && f.db == nil:
		return nil, nil // what is in memory stays there
	case last == 0:
		if err := s.saveLocked(f); err != nil {
			return nil, err
		}
		// The next config may have another file.
		s.hints.keep(false)
		s.hints.clear()
		return s.forgetLocked(), nil
	}
	now := s.files[last-1]
	if now.db == nil {
		s.hints.keep(false)
	}
	if top && f.adopted != nil && s.overlays.Load() == &f.adopted.overlays && s.drained.Load() == f.adopted.drained {
		// The config that brought it has failed: it holds no more.
		return s.forgetLocked(), nil
	}
	if top {
		if err := now.update(func(w *writer) error { return w.all(s.contentLocked()) }); err != nil {
			return nil, err
		}
	}
	if f.db == nil {
		return nil, nil
	}
	return nil, f.update(func(w *writer) error { return w.all(new(content)) })
}

// forgetLocked forgets everything but the hints, in memory, and returns the
// pools it was about.
func (s *Store) forgetLocked() (pools []string) {
	for p := range *s.overlays.Load() {
		pools = append(pools, p)
	}
	s.overlays.Store(&map[string]Overlay{})
	s.drained.Store(nil)
	return pools
}

// update changes the file; what it has written is on disk when it returns nil.
func (f *file) update(change func(*writer) error) error {
	if f.db == nil {
		return nil
	}
	err := f.db.Update(func(tx *bbolt.Tx) error { return change(&writer{tx}) })
	if err != nil {
		return fmt.Errorf("%s: %w; nothing was changed", f.dir, err)
	}
	return nil
}

// Hints come at a high rate and end by themselves, so that nobody waits for them
// to be on disk: they are written together, hintBatch at a time, hintDelay after
// the first.
const (
	hintBatch = 5000
	hintDelay = 250 * time.Millisecond
	hintRetry = 10 * time.Second // after the disk has failed
)

// saveHints writes the hints that have changed until the file is closed.
func (f *file) saveHints(log *zap.Logger) {
	defer close(f.over)
	if f.db == nil {
		return
	}
	s := f.store
	for {
		select {
		case <-f.stop:
			return
		case <-s.hints.wake:
		}
		wait := time.NewTimer(hintDelay)
		for more := true; more; {
			select {
			case <-f.stop:
				wait.Stop()
				return
			case <-wait.C:
			}
			s.mu.Lock()
			n, err := s.saveBatchLocked(s.files[len(s.files)-1])
			s.mu.Unlock()
			switch {
			case err != nil:
				log.Error("keeping route hints failed", zap.Error(err), zap.Duration("retry_in", hintRetry))
				wait.Reset(hintRetry)
			case n == hintBatch:
				wait.Reset(0)
			default:
				more = false
			}
		}
	}
}

// saveLocked writes all hints that have changed.
func (s *Store) saveLocked(f *file) error {
	for {
		if n, err := s.saveBatchLocked(f); err != nil || n < hintBatch {
			return err
		}
	}
}

func (s *Store) saveBatchLocked(f *file) (n int, err error) {
	list := s.hints.changes(hintBatch)
	if len(list) == 0 || f.db == nil {
		return 0, nil
	}
	err = f.update(func(w *writer) error {
		for _, c := range list {
			if err := w.hint(c.client, c.hint); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		s.hints.unsaved(list)
	}
	return len(list), err
}
