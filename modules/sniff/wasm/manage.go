package wasm

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

// Changing the directory from the admin API. Each function leaves files whole
// at every moment: what is written is complete and on the disk before it gets
// its name. A config sees the change when it is loaded next; the caller does
// that. The host may be that of a config which is being replaced, so each holds
// the engine for itself.

// Error is an error with the HTTP status that tells it best.
type Error struct {
	Status int
	err    error
}

func (e *Error) Error() string { return e.err.Error() }
func (e *Error) Unwrap() error { return e.err }

func status(code int, err error) error { return &Error{code, err} }

// errPinned marks what the pins of the config do not allow.
func errPinned(err error) error { return status(http.StatusConflict, fmt.Errorf("pinned: %w", err)) }

func errNotFound(format string, args ...any) error {
	return status(http.StatusNotFound, fmt.Errorf(format, args...))
}

func checkName(name string) error {
	if err := sniff.CheckName(name); err != nil {
		return status(http.StatusBadRequest, err)
	}
	return nil
}

// Info is a module of the directory as an operator sees it.
type Info struct {
	Name        string `json:"name"`
	SHA256      string `json:"sha256"` // of the file; empty when it cannot be read
	SizeBytes   int64  `json:"size_bytes"`
	Loaded      bool   `json:"loaded"` // the config runs this file, or the one kept beside it
	HasPrevious bool   `json:"has_previous"`
	Fallback    bool   `json:"fallback"` // the config runs the kept version
}

// List tells what is in the directory now.
func (h *Host) List() ([]Info, error) {
	e, err := takeEngine()
	if err != nil {
		return nil, err
	}
	defer e.give()
	e.files.Lock()
	defer e.files.Unlock()
	names, err := h.names()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	list := make([]Info, 0, len(names))
	for _, name := range names {
		if sniff.CheckName(name) != nil {
			continue
		}
		info := Info{Name: name}
		l := h.loaded[name]
		if b, err := readModule(h.file(name)); err == nil {
			hash := sha256.Sum256(b)
			info.SHA256, info.SizeBytes = hex.EncodeToString(hash[:]), int64(len(b))
			info.Loaded = l != nil && l.hash == hash
		}
		if l != nil && l.fallback {
			info.Loaded, info.Fallback = true, true
		}
		_, err := os.Lstat(h.kept(name))
		info.HasPrevious = err == nil
		list = append(list, info)
	}
	return list, nil
}

// Change makes a change with do and has the config loaded anew with load. When
// one of them fails, the files of the module are put back as they were. The
// caller sees to it that there is one change at a time.
func (h *Host) Change(name string, do, load func() error) error {
	if err := checkName(name); err != nil {
		return err
	}
	e, err := takeEngine() // the load may be the end of this host
	if err != nil {
		return err
	}
	defer e.give()
	before := [...]saved{h.save(h.file(name)), h.save(h.kept(name))}
	if err = do(); err == nil {
		err = load()
	}
	if err == nil {
		return nil
	}
	e.files.Lock()
	defer e.files.Unlock()
	for _, s := range before {
		if errBack := h.restore(s); errBack != nil {
			err = errors.Join(err, fmt.Errorf("putting %s back: %w", s.path, errBack))
		}
	}
	return err
}

// saved is a file as it was.
type saved struct {
	path string
	b    []byte
	err  error // why it could not be read: most often it is not there
}

func (h *Host) save(path string) saved {
	b, err := readModule(path)
	return saved{path, b, err}
}

func (h *Host) restore(s saved) error {
	now, err := readModule(s.path)
	switch {
	case err == nil && s.err == nil && bytes.Equal(now, s.b), err != nil && s.err != nil:
		return nil
	case s.err == nil:
		return h.write(s.path, s.b)
	}
	if err := os.Remove(s.path); err != nil {
		return err
	}
	return h.syncDir()
}

// Put checks a module and writes it to the directory. The version that it
// replaces is kept, unless that does not load.
func (h *Host) Put(name string, b []byte) error {
	if err := checkName(name); err != nil {
		return err
	}
	if len(b) > MaxSize {
		return status(http.StatusRequestEntityTooLarge, fmt.Errorf("%d bytes are more than %d", len(b), MaxSize))
	}
	if err := h.pinned(name, sha256.Sum256(b)); err != nil {
		return err
	}
	e, err := takeEngine()
	if err != nil {
		return err
	}
	defer e.give()
	if err := h.loads(e, b); err != nil {
		return status(http.StatusBadRequest, err)
	}
	e.files.Lock()
	defer e.files.Unlock()
	if err := os.MkdirAll(h.Dir, 0o755); err != nil {
		return err
	}
	old, err := readModule(h.file(name))
	if err == nil && bytes.Equal(old, b) {
		return nil
	}
	if err == nil && h.loads(e, old) == nil {
		if err := h.write(h.kept(name), old); err != nil {
			return err
		}
	}
	return h.write(h.file(name), b)
}

// loads reports why a module cannot be loaded.
func (h *Host) loads(e *engine, b []byte) error {
	m, err := e.load(b, h.limits)
	if err == nil {
		e.unload(m)
	}
	return err
}

// write puts a file in the place of another one, if there is one.
func (h *Host) write(path string, b []byte) error {
	// One name, so that a crash leaves one file at most behind. It starts with a
	// dot, which scans skip.
	tmp := filepath.Join(h.Dir, ".wayhouse.tmp")
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	if errClose := f.Close(); err == nil {
		err = errClose
	}
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		_ = os.Remove(tmp)
		return err
	}
	return h.syncDir()
}

func (h *Host) syncDir() error {
	d, err := os.Open(h.Dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// Delete removes a module and the version kept of it.
func (h *Host) Delete(name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	e, err := takeEngine()
	if err != nil {
		return err
	}
	defer e.give()
	e.files.Lock()
	defer e.files.Unlock()
	if err := os.Remove(h.file(name)); errors.Is(err, fs.ErrNotExist) {
		return errNotFound("there is no module %s", name)
	} else if err != nil {
		return err
	}
	if err := os.Remove(h.kept(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return h.syncDir()
}

// Rollback swaps a module with the version kept of it, if that can be loaded.
func (h *Host) Rollback(name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	e, err := takeEngine()
	if err != nil {
		return err
	}
	defer e.give()
	e.files.Lock()
	defer e.files.Unlock()
	b, err := readModule(h.kept(name))
	if errors.Is(err, fs.ErrNotExist) {
		return errNotFound("no version of %s is kept", name)
	} else if err != nil {
		return err
	}
	if err := h.pinned(name, sha256.Sum256(b)); err != nil {
		return err
	}
	if err := h.loads(e, b); err != nil {
		return status(http.StatusBadRequest, fmt.Errorf("the version kept of %s: %w", name, err))
	}
	if err := h.swap(name); err != nil {
		return err
	}
	return h.syncDir()
}

func (h *Host) swap(name string) error {
	err := unix.Renameat2(unix.AT_FDCWD, h.file(name), unix.AT_FDCWD, h.kept(name), unix.RENAME_EXCHANGE)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOENT): // NAME.wasm has been removed by hand
		return os.Rename(h.kept(name), h.file(name))
	case !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOSYS):
		return err
	}
	// A file system that cannot exchange: NAME.wasm is whole all the time, and a
	// crash between the steps leaves one version twice.
	now, err := readModule(h.file(name))
	if err != nil {
		return err
	}
	kept, err := readModule(h.kept(name))
	if err != nil {
		return err
	}
	if err := h.write(h.file(name), kept); err != nil {
		return err
	}
	return h.write(h.kept(name), now)
}
