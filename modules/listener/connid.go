package listener

import (
	"encoding/binary"
	"sync"
)

// A QUIC client whose address changes, as behind a NAT that has forgotten it, goes
// on with short headers that no route knows. The server has told it in clear which
// connection ID to put there; a guest is found by that. An ID that the server has
// sent encrypted, for a client that moves on purpose, is not known.

// connIDs are those of the guests of a listener. quic-go's are of four bytes, and
// longer ones are told apart by their first eight.
type connIDs struct {
	mu   sync.RWMutex
	byID map[uint64]*guest
	size int // bytes of an ID, of whoever has come last
}

const (
	longHeader  = 0x80
	fixedBit    = 0x40
	maxConnID   = 20
	knownConnID = 8 // bytes of an ID that are looked at
)

// learn takes note of the connection ID in what a server sends to a guest, once.
func (g *guest) learn(p []byte) {
	if len(p) < 7 || p[0]&longHeader == 0 || g.cid.Load() != 0 {
		return
	}
	at := 6 + int(p[5]) // behind the client's
	if p[5] > maxConnID || len(p) <= at {
		return
	}
	n := int(p[at])
	if n == 0 || n > maxConnID || len(p) < at+1+n {
		return
	}
	g.of.ids.put(connID(p[at+1:at+1+n]), n, g)
}

// connID is never 0.
func connID(id []byte) uint64 {
	var b [8]byte
	copy(b[:], id)
	if v := binary.BigEndian.Uint64(b[:]); v != 0 {
		return v
	}
	return 1
}

func (c *connIDs) put(id uint64, size int, g *guest) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.byID == nil {
		c.byID = make(map[uint64]*guest)
	}
	if c.byID[id] == nil && g.cid.CompareAndSwap(0, id) {
		c.byID[id], c.size = g, size
	}
}

func (c *connIDs) forget(g *guest) {
	id := g.cid.Swap(1)
	if id <= 1 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.byID[id] == g {
		delete(c.byID, id)
	}
}

// moved is the guest that a datagram of an unknown address may be of, nil if none
// is.
func (t *guests) moved(p []byte) *guest {
	if len(p) < 1 || p[0]&(longHeader|fixedBit) != fixedBit {
		return nil
	}
	c := &t.ids
	c.mu.RLock()
	defer c.mu.RUnlock()
	if len(c.byID) == 0 || len(p) < 1+c.size {
		return nil
	}
	return c.byID[connID(p[1:1+c.size])]
}
