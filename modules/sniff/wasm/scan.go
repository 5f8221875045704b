package wasm

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

const ext = ".wasm"

// loaded is a module of a directory that a config uses.
type loaded struct {
	*sniffer
	path     string
	hash     [sha256.Size]byte
	fallback bool // path is the kept version
}

func (h *Host) file(name string) string { return filepath.Join(h.Dir, name+ext) }

// kept is where the version that NAME.wasm has replaced is.
func (h *Host) kept(name string) string { return filepath.Join(h.Dir, "."+name+ext+".prev") }

// readModule reads a file of at most MaxSize bytes, once, so that what is
// checked is what runs. A symbolic link may lead to it, as where volumes are
// swapped by one; whatever it leads to has to be a regular file, and is not
// waited for.
func readModule(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	b, err := io.ReadAll(io.LimitReader(f, MaxSize+1))
	if err != nil {
		return nil, err
	}
	if len(b) > MaxSize {
		return nil, refuse(TooLarge, "%s has more than %d bytes", path, MaxSize)
	}
	return b, nil
}

// names lists the modules of the directory, those with names that no module
// may have included. A directory that does not exist has none.
func (h *Host) names() ([]string, error) {
	entries, err := os.ReadDir(h.Dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var list []string
	for _, e := range entries { // sorted
		name, ok := strings.CutSuffix(e.Name(), ext)
		if ok && !strings.HasPrefix(e.Name(), ".") {
			list = append(list, name)
		}
	}
	return list, err
}

// scan loads the modules of the directory. With pins a file that may not be
// used fails it, without it is logged and skipped. What a failed scan has
// loaded is in h.loaded as well, for Cleanup.
func (h *Host) scan() error {
	h.engine.files.Lock()
	defer h.engine.files.Unlock()
	names, err := h.names()
	if errors.Is(err, fs.ErrNotExist) {
		h.logger.Warn("directory of sniffers does not exist", zap.String("dir", h.Dir))
	} else if err != nil {
		return fmt.Errorf("dir: %w", err)
	}
	for _, name := range names {
		l, err := h.loadName(name)
		switch {
		case err == nil:
			h.loaded[name] = l
		case len(h.Modules) > 0:
			return fmt.Errorf("module %s: %w", name, err)
		default:
			h.refused[name] = err
			h.logger.Error("sniffer skipped", zap.String("sniffer", name), zap.Error(err))
		}
	}
	return nil
}

// Refused says why the scan has skipped a module that a route asks.
func (h *Host) Refused(name string) error {
	err := h.refused[name]
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s cannot be used: %w", h.file(name), err)
}

// loadName loads NAME.wasm, or else the version kept beside it.
func (h *Host) loadName(name string) (*loaded, error) {
	if err := sniff.CheckName(name); err != nil {
		return nil, err
	}
	if len(h.Modules) > 0 && h.Modules[name] == nil {
		return nil, errPinned(fmt.Errorf("%s is not among the modules of the config", h.file(name)))
	}
	l, err := h.loadFile(name, h.file(name))
	if err == nil {
		return l, nil
	}
	l, errKept := h.loadFile(name, h.kept(name))
	if errKept != nil {
		return nil, err
	}
	l.fallback = true
	h.logger.Warn("sniffer does not load, using the version before it", zap.String("sniffer", name), zap.Error(err))
	return l, nil
}

func (h *Host) loadFile(name, path string) (*loaded, error) {
	b, err := readModule(path)
	if err != nil {
		return nil, err
	}
	hash := sha256.Sum256(b)
	if err := h.pinned(name, hash); err != nil {
		return nil, err
	}
	m, err := h.engine.load(b, h.limits)
	if err != nil {
		return nil, err
	}
	var config string
	if pin := h.Modules[name]; pin != nil && pin.Config != nil {
		config = *pin.Config
	}
	return &loaded{sniffer: h.engine.newSniffer(name, config, m, h.limits, h.logger), path: path, hash: hash}, nil
}

// pinned checks a file against the pins, when there are any.
func (h *Host) pinned(name string, hash [sha256.Size]byte) error {
	if len(h.Modules) == 0 {
		return nil
	}
	pin := h.Modules[name]
	if pin == nil {
		return errPinned(fmt.Errorf("%s is not among the modules of the config", name))
	}
	if got := hex.EncodeToString(hash[:]); !strings.EqualFold(pin.SHA256, got) {
		return errPinned(fmt.Errorf("sha256 of %s is %s, the config has %s", name, got, pin.SHA256))
	}
	return nil
}
