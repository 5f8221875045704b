package intent

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"runtime/debug"
	"syscall"
	"time"

	"go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
)

// The file is a bbolt database with three buckets:
//
//	instance  format → "1", drained → By
//	backends  pool, 0, ip:port → Backend
//	hints     address, 4 or 16 bytes → savedHint
//
// All but the format are JSON behind its CRC-32: bbolt notices a damaged header,
// but not a damaged value.

// FileName is the name of the file in the directory.
const FileName = "intent.db"

const (
	format    = "1"
	dirMode   = 0o700
	fileMode  = 0o600
	lockLimit = 2 * time.Second // how long another process is waited for
)

var (
	bucketInstance = []byte("instance")
	bucketBackends = []byte("backends")
	bucketHints    = []byte("hints")
	keyFormat      = []byte("format")
	keyDrained     = []byte("drained")
)

// content is what a file says.
type content struct {
	overlays map[string]Overlay
	drained  *By
	hints    []savedHint
}

// empty reports whether there is nothing but hints, which end by themselves.
func (c *content) empty() bool { return len(c.overlays) == 0 && c.drained == nil }

// savedHint is a hint on disk.
type savedHint struct {
	client  netip.Addr
	Pool    string    `json:"pool"`
	Expires time.Time `json:"expires"` // wall clock
	By
}

// openFile opens the file in a directory, and makes both when they are not
// there. It returns what is in it.
func openFile(dir string) (_ *bbolt.DB, c *content, err error) {
	if err := os.MkdirAll(dir, dirMode); err != nil {
		return nil, nil, unwritable(dir, err)
	}
	path := filepath.Join(dir, FileName)
	_, statErr := os.Stat(path)
	isNew := errors.Is(statErr, fs.ErrNotExist)
	var held *os.File
	damaged := func(err error) error {
		return fmt.Errorf("%s is damaged: %w; it has what operators have changed: put back a copy, or move it away to start without", path, err)
	}
	// bbolt panics when a page is not what it should be, and reads a file that was
	// cut off beyond its end.
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	var db *bbolt.DB
	defer func() {
		r := recover()
		if r == nil && err == nil {
			return
		}
		if r != nil {
			err = damaged(fmt.Errorf("%v", r))
		}
		if held != nil {
			// db may be half open, and its mapping would keep the lock.
			syscall.Flock(int(held.Fd()), syscall.LOCK_UN)
			held.Close()
		}
		if isNew && errors.As(err, new(*fs.PathError)) {
			os.Remove(path) // it is half written, and would be damaged ever after
		}
	}()
	db, err = bbolt.Open(path, fileMode, &bbolt.Options{
		Timeout:      lockLimit,
		FreelistType: bbolt.FreelistMapType,
		NoStatistics: true,
		OpenFile: func(name string, flag int, mode os.FileMode) (f *os.File, err error) {
			held, err = os.OpenFile(name, flag, mode)
			return held, err
		},
	})
	switch {
	case errors.Is(err, berrors.ErrTimeout):
		return nil, nil, fmt.Errorf("%s is in use by another process; give each its own directory, or \"off\" to keep nothing", path)
	case err == nil:
		c, err = readFile(db)
	}
	switch {
	case errors.As(err, new(*fs.PathError)), err != nil && held == nil:
		return nil, nil, unwritable(path, err) // the system says no, as on a full disk
	case err != nil:
		return nil, nil, damaged(err)
	}
	if isNew { // its name has to be on disk too
		if err := errors.Join(syncDir(dir), syncDir(filepath.Dir(dir))); err != nil {
			return nil, nil, err
		}
	}
	return db, c, nil
}

func unwritable(path string, err error) error {
	return fmt.Errorf("%s: %w; name a directory that can be written to, or \"off\" to keep nothing", path, err)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// readFile reads everything, and makes the buckets of a new file.
func readFile(db *bbolt.DB) (*content, error) {
	c := &content{overlays: make(map[string]Overlay)}
	isNew := false
	err := db.View(func(tx *bbolt.Tx) error {
		instance := tx.Bucket(bucketInstance)
		if isNew = instance == nil; isNew {
			if k, _ := tx.Cursor().First(); k != nil {
				return errors.New("it is a database of something else")
			}
			return nil
		}
		switch v := string(instance.Get(keyFormat)); {
		case v == "":
			return errors.New("it does not say its format")
		case v != format:
			return fmt.Errorf("it has the format %.20q, of another version of this program, which knows %s", v, format)
		}
		if v := instance.Get(keyDrained); v != nil {
			c.drained = new(By)
			if err := decode(v, c.drained); err != nil {
				return fmt.Errorf("drained: %w", err)
			}
		}
		return errors.Join(readBackends(tx.Bucket(bucketBackends), c), readHints(tx.Bucket(bucketHints), c))
	})
	if err != nil || !isNew {
		return c, err
	}
	return c, db.Update(func(tx *bbolt.Tx) error {
		for _, name := range [][]byte{bucketBackends, bucketHints, bucketInstance} {
			if _, err := tx.CreateBucket(name); err != nil {
				return err
			}
		}
		return tx.Bucket(bucketInstance).Put(keyFormat, []byte(format))
	})
}

func readBackends(b *bbolt.Bucket, c *content) error {
	if b == nil {
		return errors.New("it has no backends")
	}
	n := 0
	return b.ForEach(func(k, v []byte) error {
		pool, addr, err := splitKey(k)
		if err != nil {
			return fmt.Errorf("backends: %w", err)
		}
		var be Backend
		if err := errors.Join(decode(v, &be), be.check()); err != nil {
			return fmt.Errorf("backends: %s of %.60q: %w", addr, pool, err)
		}
		if n++; n > MaxBackends {
			return fmt.Errorf("backends: more than %d", MaxBackends)
		}
		if c.overlays[pool] == nil {
			c.overlays[pool] = make(Overlay)
		}
		c.overlays[pool][addr] = be
		return nil
	})
}

func readHints(b *bbolt.Bucket, c *content) error {
	if b == nil {
		return errors.New("it has no hints")
	}
	return b.ForEach(func(k, v []byte) error {
		addr, ok := netip.AddrFromSlice(k)
		h := savedHint{client: addr}
		if err := decode(v, &h); err != nil || !ok {
			return fmt.Errorf("hints: % x: %w", k, err)
		}
		if len(c.hints) < MaxHints {
			c.hints = append(c.hints, h)
		}
		return nil
	})
}

var errCRC = errors.New("its checksum is wrong")

// encode is v as JSON behind its checksum.
func encode(v any) ([]byte, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	return append(binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(b)), crc32.ChecksumIEEE(b)), b...), nil
}

// decode reads what encode has written.
func decode(b []byte, v any) error {
	if len(b) < 4 || crc32.ChecksumIEEE(b[4:]) != binary.BigEndian.Uint32(b) {
		return errCRC
	}
	return json.Unmarshal(b[4:], v)
}

// writer changes a file, within one transaction.
type writer struct{ tx *bbolt.Tx }

// backend writes what is wanted of one, nothing for the zero value.
func (w *writer) backend(pool string, addr netip.AddrPort, b Backend) error {
	bucket, key := w.tx.Bucket(bucketBackends), joinKey(pool, addr)
	if b == (Backend{}) {
		return bucket.Delete(key)
	}
	return put(bucket, key, b)
}

func (w *writer) drained(by *By) error {
	if by == nil {
		return w.tx.Bucket(bucketInstance).Delete(keyDrained)
	}
	return put(w.tx.Bucket(bucketInstance), keyDrained, by)
}

// hint writes the hint of a client, or forgets it.
func (w *writer) hint(client netip.Addr, h *savedHint) error {
	bucket, key := w.tx.Bucket(bucketHints), client.AsSlice()
	if h == nil {
		return bucket.Delete(key)
	}
	return put(bucket, key, h)
}

func put(b *bbolt.Bucket, key []byte, v any) error {
	value, err := encode(v)
	if err != nil {
		return err
	}
	return b.Put(key, value)
}

// all has the file say c and nothing else.
func (w *writer) all(c *content) error {
	for _, name := range [][]byte{bucketBackends, bucketHints} {
		if err := w.tx.DeleteBucket(name); err != nil {
			return err
		}
		if _, err := w.tx.CreateBucket(name); err != nil {
			return err
		}
	}
	for pool, o := range c.overlays {
		for addr, b := range o {
			if err := w.backend(pool, addr, b); err != nil {
				return err
			}
		}
	}
	for i := range c.hints {
		if err := w.hint(c.hints[i].client, &c.hints[i]); err != nil {
			return err
		}
	}
	return w.drained(c.drained)
}
