package filter

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/oschwald/maxminddb-golang/v2"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
)

// Databases that place addresses. They belong to the process and are read as a
// whole: what is on disk may be written over at any time.

var (
	geoRefresh = metrics.Counter("geo_db_refresh_total", "Times that a changed geo database was read, by kind, country or asn, and result: ok or error.", "kind", "result")
	geoBuilt   = metrics.Gauge("geo_db_built", "Unix time at which the geo database in use was built, by kind: country or asn.", "kind")
)

// GeoKind is what a database says of addresses.
type GeoKind string

// The kinds.
const (
	Countries GeoKind = "country"
	Systems   GeoKind = "asn"
)

// GeoDB is a database whose content may change.
type GeoDB struct {
	kind GeoKind
	path string

	content atomic.Pointer[geoContent]
	logger  atomic.Pointer[zap.Logger]

	following

	readMu sync.Mutex // guards file
	file   file
}

// geoContent is a database with what its records say, by their offset: asking
// decodes nothing and allocates nothing.
type geoContent struct {
	reader *maxminddb.Reader
	says   map[uintptr]uint32
}

type geoKey struct {
	kind GeoKind
	path string
}

var geoDBs = caddy.NewUsagePool()

// OpenGeoDB returns a database; give it back with Close.
func OpenGeoDB(kind GeoKind, path string) (*GeoDB, error) {
	v, loaded, err := geoDBs.LoadOrNew(geoKey{kind, path}, func() (caddy.Destructor, error) {
		db := &GeoDB{kind: kind, path: path, file: file{path: path}}
		return db, db.read()
	})
	if err != nil {
		return nil, err
	}
	db := v.(*GeoDB)
	if loaded {
		if err := db.read(); err != nil {
			return nil, errors.Join(err, db.Close())
		}
	}
	return db, nil
}

// Close gives a reference back.
func (db *GeoDB) Close() error {
	_, err := geoDBs.Delete(geoKey{db.kind, db.path})
	return err
}

// Destruct implements caddy.Destructor.
func (db *GeoDB) Destruct() error { return nil }

const (
	maxGeoFile     = 1 << 30
	maxGeoNetworks = 50_000_000
)

// read reads the file, if it is not the one that was read before.
func (db *GeoDB) read() error {
	db.readMu.Lock()
	defer db.readMu.Unlock()
	b, now, changed, err := db.file.read(maxGeoFile)
	if err != nil || !changed {
		return err
	}
	c, err := newGeoContent(db.kind, b)
	if err != nil {
		return fmt.Errorf("%s: %w", db.path, err)
	}
	db.file.seen = now
	db.content.Store(c)
	geoBuilt.WithLabelValues(string(db.kind)).Set(float64(c.reader.Metadata.BuildEpoch))
	return nil
}

// newGeoContent goes through all networks once, which also finds out whether the
// database is whole.
func newGeoContent(kind GeoKind, b []byte) (*geoContent, error) {
	r, err := maxminddb.OpenBytes(b)
	if err != nil {
		return nil, err
	}
	c := &geoContent{reader: r, says: make(map[uintptr]uint32)}
	n, some := 0, false
	for result := range r.Networks() {
		if err := result.Err(); err != nil {
			return nil, err
		}
		if n++; n > maxGeoNetworks {
			return nil, fmt.Errorf("more than %d networks", maxGeoNetworks)
		}
		if _, known := c.says[result.Offset()]; known {
			continue
		}
		v, err := decode(kind, result)
		if err != nil {
			return nil, err
		}
		c.says[result.Offset()] = v
		some = some || v != 0
	}
	if !some {
		return nil, fmt.Errorf("there is no %s in this database of the type %q", kind, r.Metadata.DatabaseType)
	}
	return c, nil
}

// decode reads what a record says; 0 is nothing.
func decode(kind GeoKind, r maxminddb.Result) (uint32, error) {
	if kind == Systems {
		var n uint32
		err := r.DecodePath(&n, "autonomous_system_number")
		return n, err
	}
	var code string
	if err := r.DecodePath(&code, "country", "iso_code"); err != nil || code == "" {
		return 0, err
	}
	n, ok := country(code)
	if !ok {
		return 0, fmt.Errorf("%.10q is no country", code)
	}
	return n, nil
}

// country is the number of a country's two letters.
func country(code string) (uint32, bool) {
	if len(code) != 2 {
		return 0, false
	}
	code = strings.ToUpper(code)
	for i := range code {
		if code[i] < 'A' || code[i] > 'Z' {
			return 0, false
		}
	}
	return uint32(code[0])<<8 | uint32(code[1]), true
}

// say is how people know a value: a country's letters, or a number.
func (k GeoKind) say(v uint32) string {
	if k == Systems {
		return fmt.Sprintf("AS%d", v)
	}
	return string([]byte{byte(v >> 8), byte(v)})
}

// find is what the database says of an address: 0 when it does not know it. ok is
// false without a database.
func (db *GeoDB) find(a netip.Addr) (v uint32, ok bool) {
	if db == nil {
		return 0, false
	}
	c := db.content.Load()
	if c == nil {
		return 0, false
	}
	if a.Is6() && c.reader.Metadata.IPVersion == 4 {
		return 0, true
	}
	r := c.reader.Lookup(a)
	if r.Err() != nil {
		return 0, false
	}
	if !r.Found() {
		return 0, true
	}
	return c.says[r.Offset()], true
}

// follow counts a follower in; the logger is that of whoever came last.
func (db *GeoDB) follow(logger *zap.Logger) {
	db.logger.Store(logger.With(zap.String("source", db.path)))
	db.enter(db.watch)
}

// watch looks at the file again and again. A failure is told when it is a new
// one.
func (db *GeoDB) watch(ctx context.Context) {
	told := ""
	every(ctx, filePoll, func() {
		before := db.content.Load()
		err := db.read()
		switch {
		case err != nil && err.Error() != told:
			told = err.Error()
			geoRefresh.WithLabelValues(string(db.kind), "error").Inc()
			db.logger.Load().Error("geo database cannot be read; the one before stays", zap.Error(err))
		case err == nil:
			told = ""
			if now := db.content.Load(); now != before {
				geoRefresh.WithLabelValues(string(db.kind), "ok").Inc()
				db.logger.Load().Info("geo database has changed", zap.Time("built", time.Unix(int64(now.reader.Metadata.BuildEpoch), 0).UTC()))
			}
		}
	})
}

// GeoDBs are the databases of a config; nil where it names none.
type GeoDBs struct{ Country, ASN *GeoDB }

// geoDBsKey finds the databases in the context of the filters of a config.
const geoDBsKey caddy.CtxKey = "wayhouse_geo_dbs"

// In is ctx with the databases in it, for the filters that ctx loads.
func (g GeoDBs) In(ctx caddy.Context) caddy.Context { return ctx.WithValue(geoDBsKey, g) }

// Close gives the databases back.
func (g GeoDBs) Close() error {
	var errs []error
	for _, db := range []*GeoDB{g.Country, g.ASN} {
		if db != nil {
			errs = append(errs, db.Close())
		}
	}
	return errors.Join(errs...)
}
