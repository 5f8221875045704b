// Package ticket makes and checks tickets: a few bytes in front of what a
// client sends first, by which whoever has a key says that the client may go to
// a pool until a time. The layout is for anybody to write; docs/matchers/ticket.md
// describes it with a test vector.
//
//	offset  bytes
//	0       1      version: 1
//	1       1      flags: bit 0, the ticket is for one client address
//	2       8      expiry: seconds since 1970, big endian
//	10      16     the first half of an HMAC-SHA-256
//
// The HMAC's key is the shared key. Its message is the text wayhouse-ticket, a
// zero byte, the ticket's first 10 bytes, one byte with the length of the pool's
// name, the name, and, for a ticket for one address, the 16 bytes of the address,
// with IPv4 as IPv4-mapped IPv6.
package ticket

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"net/netip"
	"strings"
	"sync"
	"time"
)

// Len is how long a ticket is.
const Len = headLen + macLen

const (
	version  = 1
	flagAddr = 1
	headLen  = 10
	macLen   = 16
	domain   = "wayhouse-ticket\x00"
)

// The lengths of keys and of the names of pools.
const (
	MinKey  = 16
	MaxKey  = 1024
	MaxPool = 255
)

// The reasons for which a ticket is refused.
var (
	ErrShort   = errors.New("shorter than a ticket")
	ErrVersion = errors.New("not a version that is known")
	ErrFlags   = errors.New("flags that are not known")
	ErrUnbound = errors.New("not for one client address")
	ErrMAC     = errors.New("made with another key, or for another pool or client")
	ErrExpired = errors.New("expired")
)

// Mint makes a ticket. client is the zero value for one that anybody may use.
func Mint(key []byte, pool string, expiry time.Time, client netip.Addr) ([]byte, error) {
	switch {
	case len(key) < MinKey || len(key) > MaxKey:
		return nil, fmt.Errorf("the key has %d bytes, not %d to %d", len(key), MinKey, MaxKey)
	case pool == "" || len(pool) > MaxPool:
		return nil, fmt.Errorf("the name of the pool has %d bytes, not 1 to %d", len(pool), MaxPool)
	case expiry.Unix() < 0:
		return nil, fmt.Errorf("the expiry %v is before 1970", expiry)
	}
	b := make([]byte, headLen, Len)
	b[0] = version
	if client.IsValid() {
		b[1] = flagAddr
	}
	binary.BigEndian.PutUint64(b[2:], uint64(expiry.Unix()))
	w := newWork(key)
	return append(b, w.sign(b, pool, client)...), nil
}

// work is what one computation of a MAC needs.
type work struct {
	mac     hash.Hash
	message []byte
	sum     []byte
}

func newWork(key []byte) *work {
	return &work{
		mac:     hmac.New(sha256.New, key),
		message: make([]byte, 0, len(domain)+headLen+1+MaxPool+16),
		sum:     make([]byte, 0, sha256.Size),
	}
}

// sign is the MAC of a ticket. It belongs to w.
func (w *work) sign(head []byte, pool string, client netip.Addr) []byte {
	m := append(w.message[:0], domain...)
	m = append(m, head...)
	m = append(m, byte(len(pool)))
	m = append(m, pool...)
	if head[1]&flagAddr != 0 {
		a := client.As16()
		m = append(m, a[:]...)
	}
	w.mac.Reset()
	w.mac.Write(m)
	return w.mac.Sum(w.sum)[:macLen]
}

// Checker checks tickets for one pool with any of several keys. It is safe for
// use by many goroutines.
type Checker struct {
	pool    string
	bound   bool
	scratch []sync.Pool // of *work, by key
}

// NewChecker makes a checker. With bound it takes tickets for one address only.
func NewChecker(keys [][]byte, pool string, bound bool) (*Checker, error) {
	c := &Checker{pool: pool, bound: bound, scratch: make([]sync.Pool, len(keys))}
	if pool == "" || len(pool) > MaxPool {
		return nil, fmt.Errorf("the name of the pool has %d bytes, not 1 to %d", len(pool), MaxPool)
	}
	for i, key := range keys {
		if len(key) < MinKey || len(key) > MaxKey {
			return nil, fmt.Errorf("key %d has %d bytes, not %d to %d", i+1, len(key), MinKey, MaxKey)
		}
		key = bytes.Clone(key)
		c.scratch[i].New = func() any { return newWork(key) }
	}
	return c, nil
}

// Check checks the ticket that b begins with, of a client, at a time. The MAC
// is compared in constant time, and before anything that it vouches for.
func (c *Checker) Check(b []byte, client netip.Addr, now time.Time) error {
	switch {
	case len(b) < Len:
		return ErrShort
	case b[0] != version:
		return ErrVersion
	case b[1]&^flagAddr != 0:
		return ErrFlags
	case c.bound && b[1]&flagAddr == 0:
		return ErrUnbound
	case b[1]&flagAddr != 0 && !client.IsValid():
		return ErrMAC
	}
	head, mac := b[:headLen], b[headLen:Len]
	good := false
	for i := range c.scratch {
		w := c.scratch[i].Get().(*work)
		if hmac.Equal(w.sign(head, c.pool, client), mac) {
			good = true // the other keys are tried all the same
		}
		c.scratch[i].Put(w)
	}
	if !good {
		return ErrMAC
	}
	if expiry := binary.BigEndian.Uint64(head[2:]); uint64(max(now.Unix(), 0)) >= expiry {
		return ErrExpired
	}
	return nil
}

// MayBegin reports whether b, shorter than a ticket, may be the beginning of
// one.
func (c *Checker) MayBegin(b []byte) bool {
	return (len(b) < 1 || b[0] == version) && (len(b) < 2 || b[1]&^flagAddr == 0 && (!c.bound || b[1]&flagAddr != 0))
}

// ParseKey reads a key as files and configs have it: hex:… or base64:…, with or
// without white space around.
func ParseKey(s string) ([]byte, error) {
	s = strings.TrimSpace(s)
	kind, digits, _ := strings.Cut(s, ":")
	var key []byte
	var err error
	switch kind {
	case "hex":
		key, err = hex.DecodeString(digits)
	case "base64":
		key, err = base64.StdEncoding.DecodeString(digits)
	default:
		return nil, errors.New("a key is hex: or base64: and its bytes in that form")
	}
	if err != nil {
		return nil, fmt.Errorf("the key is not %s", kind) // without the key
	}
	if len(key) < MinKey || len(key) > MaxKey {
		return nil, fmt.Errorf("the key has %d bytes, not %d to %d", len(key), MinKey, MaxKey)
	}
	return key, nil
}
