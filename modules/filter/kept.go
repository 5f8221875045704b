package filter

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/caddyserver/caddy/v2"
)

// What a URL has last answered is kept in a file, for a process that starts while
// nobody answers. The file is named by a hash of the URL, which may have a key in
// it.

func (l *list) kept() string {
	sum := sha256.Sum256([]byte(l.where))
	return filepath.Join(caddy.AppDataDir(), "wayhouse", "lists", hex.EncodeToString(sum[:])+".txt")
}

// keep writes the content to be found by restore.
func (l *list) keep(content []byte) error {
	path := l.kept()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), "new-*") // 0600
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // nothing, once it has its name
	_, err = f.Write(content)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// touch notes that what is kept is still as it should be.
func (l *list) touch() error {
	now := time.Now()
	return os.Chtimes(l.kept(), now, now)
}

// restore puts what was kept in place and returns since when it is known.
func (l *list) restore() (time.Time, error) {
	f := file{path: l.kept()}
	content, now, _, err := f.read(maxList)
	if err != nil {
		return time.Time{}, err
	}
	set, err := parseList(content)
	if err != nil {
		return time.Time{}, fmt.Errorf("%s:%w", f.path, err)
	}
	if set.Len() == 0 {
		return time.Time{}, fmt.Errorf("%s: %w", f.path, errNoNetworks)
	}
	l.set.Store(set)
	listNetworks.WithLabelValues(l.name).Set(float64(set.Len()))
	listLastOK.WithLabelValues(l.name).Set(float64(now.modified.Unix()))
	return now.modified, nil
}
