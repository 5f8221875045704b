package udprelay

import (
	"hash/maphash"
	"net/netip"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// key is what makes two datagrams of one session. IPv4 addresses are mapped.
type key struct {
	client, local [16]byte
	ep            uint32 // index of the endpoint
	scope         uint32 // interface of a link-local client, or viaBit and a via, else 0
	port          uint16 // of the client, in network order
	at            uint16 // of ours, in network order, on a transparent endpoint or with a via; else 0
	// no padding, so that the key can be hashed as bytes
}

func (k *key) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(k)), unsafe.Sizeof(*k)) }

// session is one client's traffic through one endpoint. It holds no pointer,
// so that the collector has nothing to do with the table, and its worker alone
// touches it. Once established it is all there is to know of the flow: what a
// second implementation of forwarding, in the kernel, would be given.
type session struct {
	key

	flags uint16
	gso   uint16 // datagrams to the client of this size or more cannot be segmented by the kernel; 0: not known

	fd   int32  // connected to the backend; -1 while the session is held
	path uint32 // index into worker.paths
	gen  uint32 // 24 bits; one more with each session in the slot

	created, last uint32 // ticks
	failed        uint32 // tick of the last failure reported
	due           uint32 // tick of the timer bucket

	setup uint32 // microseconds until it was connected

	hashNext             uint32 // next in the table's chain, or in the list of free slots
	timerNext, timerPrev uint32

	bytesC2S, bytesS2C, packetsC2S, packetsS2C uint64
}

// The flags of a session.
const (
	live     = 1 << iota // the slot is in use
	held                 // worker.conns has its Conn
	armed                // it is in the wheel
	answered             // the backend has sent something
	queued               // it is in worker.again
	rehome               // the backend is gone: ask the acceptor with the next datagram
	claimed              // worker.claims has it
	heading              // a header goes in front of the next datagram to the backend; see header.go
	noted                // worker.notes has something about it
	looked               // of a peer whose datagrams are looked at for headers, and its own client; see headin.go
)

const (
	slabBits  = 8
	slabChunk = 1 << slabBits
	genMask   = 1<<24 - 1
)

// slab is the sessions of a worker by slot. Growth adds a chunk and moves
// nothing. Slot 0 means none.
type slab struct {
	chunks []*[slabChunk]session
	free   uint32 // head of the free slots
	next   uint32 // the slots from here on have never been used
}

func (b *slab) at(slot uint32) *session { return &b.chunks[slot>>slabBits][slot&(slabChunk-1)] }

// get is the session in the slot, or nil when that generation is over.
func (b *slab) get(slot, gen uint32) *session {
	if slot == 0 || slot >= b.next {
		return nil
	}
	if s := b.at(slot); s.flags&live != 0 && s.gen == gen {
		return s
	}
	return nil
}

func (b *slab) take() uint32 {
	if slot := b.free; slot != 0 {
		b.free = b.at(slot).hashNext
		return slot
	}
	b.next = max(b.next, 1)
	slot := b.next
	if int(slot>>slabBits) == len(b.chunks) {
		b.chunks = append(b.chunks, new([slabChunk]session))
	}
	b.next++
	return slot
}

// put clears the slot, all but its generation, which moves on.
func (b *slab) put(slot uint32) {
	s := b.at(slot)
	*s = session{gen: (s.gen + 1) & genMask, hashNext: b.free}
	b.free = slot
}

// table finds sessions by their key. The seed keeps clients from choosing
// addresses that collide.
type table struct {
	seed    maphash.Seed
	buckets []uint32 // heads of chains of slots
	n       int
}

func newTable() table { return table{seed: maphash.MakeSeed(), buckets: make([]uint32, 64)} }

func (t *table) hash(k *key) uint64 { return maphash.Bytes(t.seed, k.bytes()) }

func (t *table) find(b *slab, k *key, hash uint64) uint32 {
	slot := t.buckets[hash&uint64(len(t.buckets)-1)]
	for slot != 0 {
		s := b.at(slot)
		if s.key == *k {
			return slot
		}
		slot = s.hashNext
	}
	return 0
}

func (t *table) insert(b *slab, slot uint32, hash uint64) {
	if t.n >= len(t.buckets) {
		t.grow(b)
	}
	head := &t.buckets[hash&uint64(len(t.buckets)-1)]
	b.at(slot).hashNext, *head = *head, slot
	t.n++
}

func (t *table) grow(b *slab) {
	old := t.buckets
	t.buckets = make([]uint32, 2*len(old))
	for _, slot := range old {
		for slot != 0 {
			s := b.at(slot)
			next := s.hashNext
			head := &t.buckets[t.hash(&s.key)&uint64(len(t.buckets)-1)]
			s.hashNext, *head = *head, slot
			slot = next
		}
	}
}

func (t *table) remove(b *slab, slot uint32) {
	s := b.at(slot)
	link := &t.buckets[t.hash(&s.key)&uint64(len(t.buckets)-1)]
	for *link != slot {
		link = &b.at(*link).hashNext
	}
	*link = s.hashNext
	t.n--
}

// pathRef is a path that sessions of the worker use.
type pathRef struct {
	path           *relay.Path // nil: free
	refs           uint32
	idle, lifetime uint32 // ticks; 0: none
	gso            uint16 // as session.gso, toward the backend
}

func (w *worker) holdPath(p *relay.Path) uint32 {
	if i, ok := w.pathIndex[p]; ok {
		w.paths[i].refs++
		return i
	}
	ref := pathRef{path: p, refs: 1}
	if p.Idle > 0 {
		ref.idle = ticks(p.Idle)
	}
	if p.Lifetime > 0 {
		ref.lifetime = ticks(p.Lifetime)
	}
	var i uint32
	if n := len(w.freePaths); n > 0 {
		i = w.freePaths[n-1]
		w.freePaths = w.freePaths[:n-1]
		w.paths[i] = ref
	} else {
		i = uint32(len(w.paths))
		w.paths = append(w.paths, ref)
	}
	w.pathIndex[p] = i
	return i
}

func (w *worker) releasePath(i uint32) {
	p := &w.paths[i]
	if p.refs--; p.refs == 0 {
		w.settle() // what is still to be counted goes to this path
		delete(w.pathIndex, p.path)
		*p = pathRef{}
		w.freePaths = append(w.freePaths, i)
	}
}

// create makes a session in the table, without a socket.
func (w *worker) create(k *key, hash uint64, path *relay.Path, flags uint16) uint32 {
	slot := w.slab.take()
	s := w.slab.at(slot)
	s.key, s.flags, s.fd = *k, live|flags, -1
	if i := k.via(); i != 0 {
		w.vias[i].refs++
		w.vias[i].slot = slot
	}
	s.path = w.holdPath(path)
	w.startHeading(s)
	s.created, s.last = w.now, w.now
	w.table.insert(&w.slab, slot, hash)
	w.sessions.Add(1)
	so := w.sockets[k.ep]
	so.sessions++
	so.ep.sessions.Add(1)
	return slot
}

// connect gives the session its socket and starts its timers. The session
// owns fd from here on. It reports whether the session has survived.
func (w *worker) connect(slot uint32, fd int) bool {
	s := w.slab.at(slot)
	s.fd = int32(fd)
	if w.offload.gro {
		setGRO(fd)
	}
	w.event = unix.EpollEvent{Events: edge, Fd: int32(slot), Pad: int32(kindSession<<24 | s.gen)}
	if errno := epollAdd(w.epfd, fd, &w.event); errno != 0 {
		w.paths[s.path].path.Counters[w.id].Dropped[relay.UpstreamBind].Add(1)
		w.end(slot, relay.Error)
		return false
	}
	if w.paths[s.path].path.Transparent && !w.claim(s) {
		w.paths[s.path].path.Counters[w.id].Dropped[relay.UpstreamBind].Add(1)
		w.end(slot, relay.Error)
		return false
	}
	w.start(slot)
	w.tellOpened(slot, nil)
	return true
}

// tellOpened tells who wants to know that a session has reached its backend. conn
// is its Conn if it is held.
func (w *worker) tellOpened(slot uint32, conn *Conn) {
	if p := w.paths[w.slab.at(slot).path].path; p.Opened != nil {
		w.asking = p.Count(w.id)
		w.describeFlow(slot, conn, &w.closed)
		p.Opened(&w.closed)
	}
}

// start arms the timer of a session whose path's limits apply from now on.
func (w *worker) start(slot uint32) {
	w.slab.at(slot).last = w.now
	if due, _ := w.deadline(slot); due != never {
		w.arm(slot, due)
	}
}

const never = 1<<32 - 1

// deadline is the tick at which the session ends if nothing happens.
func (w *worker) deadline(slot uint32) (due uint32, why relay.Reason) {
	s := w.slab.at(slot)
	p := &w.paths[s.path]
	last := s.last
	if s.flags&held != 0 {
		last = max(last, w.conns[slot].lastWrite.Load())
	}
	due, why = never, relay.IdleTimeout
	if p.idle > 0 {
		due = last + p.idle
	}
	if p.lifetime > 0 && s.created+p.lifetime < due {
		due, why = s.created+p.lifetime, relay.Limit
	}
	return due, why
}

// end takes the session out of everything and tells the owner last.
func (w *worker) end(slot uint32, why relay.Reason) {
	if w.up.n > 0 && w.up.meta[0].slot == slot {
		w.flushUp()
	}
	w.flushDown() // its sender refers to sessions
	s := w.slab.at(slot)
	path, fd, established := w.paths[s.path].path, int(s.fd), true
	var conn *Conn
	if s.flags&held != 0 {
		conn = w.conns[slot]
		delete(w.conns, slot)
		path, fd, established = conn.finish()
	}
	via := s.via()
	info := &w.closed
	if established && path.Owner != nil {
		w.describe(slot, conn, info)
		info.Path = path
	}
	w.disarm(slot)
	w.table.remove(&w.slab, slot)
	if s.flags&claimed != 0 {
		w.unclaim(s)
	}
	if s.flags&noted != 0 {
		delete(w.notes, slot)
	}
	if fd >= 0 {
		closeFD(fd) // which takes it out of the epoll set too
	}
	so := w.sockets[s.ep]
	so.sessions--
	if so.sessions == 0 {
		so.replies.close()
	}
	so.ep.sessions.Add(-1)
	w.sessions.Add(-1)
	w.releasePath(s.path)
	w.slab.put(slot)
	if via != 0 {
		w.vias[via].slot = 0
		w.releaseVia(via)
	}
	if owner := w.owner(path); owner != nil && established {
		owner.Closed(path, info, why)
	}
}

// describe fills info. conn is the session's Conn if it is held.
func (w *worker) describe(slot uint32, conn *Conn, info *relay.Info) {
	w.describeFlow(slot, conn, info)
	s := w.slab.at(slot)
	if s.fd >= 0 && getsockname(int(s.fd), &w.name) {
		if a, port, _ := fromName(&w.name); port != 0 {
			info.UpstreamLocal = addrPort(a, port)
		}
	}
	if info.Path.Mapped && s.fd >= 0 && getpeername(int(s.fd), &w.name) {
		a, port, _ := fromName(&w.name)
		info.Upstream = addrPort(a, port)
	}
}

// describeFlow is describe without what the kernel has to be asked for.
func (w *worker) describeFlow(slot uint32, conn *Conn, info *relay.Info) {
	s := w.slab.at(slot)
	*info = relay.Info{
		ID:         relay.MakeID(true, w.id, slot, s.gen),
		Path:       w.paths[s.path].path,
		Client:     addrPort(s.client, s.port),
		Local:      w.sockets[s.ep].hit(&s.key),
		Age:        time.Duration(w.now-s.created) * tick,
		Idle:       time.Duration(w.now-s.last) * tick,
		Setup:      time.Duration(s.setup) * time.Microsecond,
		BytesC2S:   s.bytesC2S,
		BytesS2C:   s.bytesS2C,
		PacketsC2S: s.packetsC2S,
		PacketsS2C: s.packetsS2C,
	}
	if conn != nil {
		info.Idle = time.Duration(w.now-min(w.now, max(s.last, conn.lastWrite.Load()))) * tick
		info.BytesC2S += conn.bytesC2S.Load()
		info.BytesS2C += conn.bytesS2C.Load()
		info.PacketsC2S += conn.packetsC2S.Load()
		info.PacketsS2C += conn.packetsS2C.Load()
	}
}

// fromName reads a socket address: IPv4 mapped, the port in network order.
func fromName(n *unix.RawSockaddrInet6) (a [16]byte, port uint16, scope uint32) {
	if n.Family == unix.AF_INET {
		n4 := (*unix.RawSockaddrInet4)(unsafe.Pointer(n))
		a[10], a[11] = 0xff, 0xff
		copy(a[12:], n4.Addr[:])
		return a, n4.Port, 0
	}
	if linkLocal(&n.Addr) {
		scope = n.Scope_id
	}
	return n.Addr, n.Port, scope
}

func linkLocal(a *[16]byte) bool { return a[0] == 0xfe && a[1]&0xc0 == 0x80 }

// swap turns a port in network order into a number, and back.
func swap(port uint16) uint16 {
	b := (*[2]byte)(unsafe.Pointer(&port))
	return uint16(b[0])<<8 | uint16(b[1])
}

func addrPort(a [16]byte, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(a).Unmap(), swap(port))
}
