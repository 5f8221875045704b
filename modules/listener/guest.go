package listener

import (
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/udprelay"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
)

// A guest is a client of a server that listens on the network of a UDP listener:
// what a session is elsewhere. It is admitted with its first datagram and counted
// in until neither side has sent anything for heldIdle. It belongs to the
// process, as the server may too.
//
//	divert → find, letIn    on the worker that has the client
//	server → moved
//	timer  → sweep          while there are guests
//
// To the server it is the client's address, which knows the way back.
type guest struct {
	net.UDPAddr
	text string // of it, for servers that know clients by that

	key      guestKey
	way      udprelay.Way // to it
	id       relay.ID
	to       frontPort   // where its server listens
	path     *relay.Path // what operators see
	stats    *flow.Listener
	counters *relay.Counters
	at       int // in the part, guarded by its mu

	opened  int64        // nanoseconds after started
	last    atomic.Int64 // likewise
	in, out traffic
}

type traffic struct{ packets, bytes atomic.Uint64 }

// guestKey is what tells guests apart.
type guestKey struct {
	ep            *endpoint
	client, local netip.AddrPort
	peer          netip.AddrPort // who sends its datagrams: the client, or who is trusted to tell of it
}

// String implements net.Addr.
func (g *guest) String() string { return g.text }

// moved notes a datagram of either side.
func (g *guest) moved(t *traffic, n int) {
	t.packets.Add(1)
	t.bytes.Add(uint64(n))
	g.last.Store(sinceStarted())
}

func sinceStarted() int64 { return int64(time.Since(started)) }

func (g *guest) info() relay.Info {
	now := sinceStarted()
	return relay.Info{
		ID: g.id, Path: g.path, Client: g.key.client, Local: g.key.local,
		Age: time.Duration(now - g.opened), Idle: time.Duration(now - g.last.Load()), Phase: relay.Handled,
		BytesC2S: g.in.bytes.Load(), BytesS2C: g.out.bytes.Load(),
		PacketsC2S: g.in.packets.Load(), PacketsS2C: g.out.packets.Load(),
	}
}

// letIn admits a client that is no guest of the server on a name yet, or says
// which rule keeps it out.
func (v *view) letIn(key guestKey, o *udprelay.Opening, to frontPort, path *relay.Path) (*guest, string) {
	if rule, _ := v.admit(o.Client, o.Local, true, o.Data, false); rule != "" {
		return nil, rule // nothing is for later: no route recognises anybody
	}
	g := v.newGuest(key, o, to, path)
	if !v.guests.add(o.Worker, g) {
		v.stats.Abandoned(true, o.Client.Addr())
		v.refuse(ruleMaxUDP, o.Client, o.Local, true)
		return nil, ruleMaxUDP
	}
	v.begins(o.Client)
	v.heard(o)
	g.begins()
	return g, ""
}

// begins tells of a guest that its server has from now on.
func (g *guest) begins() {
	if flow.LogsOpen(g.id) {
		i := g.info()
		g.stats.Opened(&i)
	}
}

func (v *view) newGuest(key guestKey, o *udprelay.Opening, to frontPort, path *relay.Path) *guest {
	now := sinceStarted()
	g := &guest{
		UDPAddr: *net.UDPAddrFromAddrPort(key.client), text: key.client.String(),
		key: key, way: o.Way(), id: relay.MakeID(true, takenWorker, guestSlots.Add(1), 0), to: to,
		path: path, stats: v.stats, counters: v.counters(o.Worker), opened: now,
	}
	g.last.Store(now)
	return g
}

var guestSlots atomic.Uint32

const (
	maxGuests  = 65_536 // of a listener
	guestParts = 64

	// guestTries is how many guests are looked at for one that can make room.
	guestTries = 8

	guestSweep = 5 * time.Second
	// guestStep is for how many of them a worker may have to wait.
	guestStep = 256
)

// guests are those of a listener, in parts by worker: a part's lock is for one
// worker and the sweep.
type guests struct {
	most  int64
	n     atomic.Int64
	armed atomic.Bool // the timer of the sweep
	parts [guestParts]guestPart
}

type guestPart struct {
	mu    sync.Mutex
	byKey map[guestKey]*guest
	all   []*guest
	_     [64]byte // keep two parts off one cache line
}

// guestTables has them by listener, for as long as the process lives.
var guestTables sync.Map // *flow.Listener → *guests

func guestsOf(l *flow.Listener) *guests {
	if t, ok := guestTables.Load(l); ok {
		return t.(*guests)
	}
	t, _ := guestTables.LoadOrStore(l, &guests{most: maxGuests})
	return t.(*guests)
}

func (t *guests) part(worker int) *guestPart { return &t.parts[worker%guestParts] }

func (t *guests) find(worker int, key guestKey) *guest {
	p := t.part(worker)
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.byKey[key]
}

// add keeps a guest. When there are too many, one makes room that has sent no
// more than its first datagram and may be anybody: else a flood of forged
// addresses would keep everybody out until their time is over.
func (t *guests) add(worker int, g *guest) bool {
	p := t.part(worker)
	p.mu.Lock()
	defer p.mu.Unlock()
	if t.n.Load() >= t.most {
		old := p.stranger()
		if old == nil {
			return false
		}
		t.removeLocked(p, old)
		last := old.info()
		old.stats.Closed(&last, relay.Limit)
	}
	if p.byKey == nil {
		p.byKey = make(map[guestKey]*guest)
	}
	g.at = len(p.all)
	p.all = append(p.all, g)
	p.byKey[g.key] = g
	t.n.Add(1)
	t.arm()
	return true
}

// stranger is one that can make room, among a few; nil: none was found.
func (p *guestPart) stranger() *guest {
	for range min(guestTries, len(p.all)) {
		if g := p.all[rand.IntN(len(p.all))]; g.in.packets.Load() <= 1 {
			return g
		}
	}
	return nil
}

func (t *guests) removeLocked(p *guestPart, g *guest) {
	last := len(p.all) - 1
	p.all[g.at] = p.all[last]
	p.all[g.at].at = g.at
	p.all[last] = nil
	p.all = p.all[:last]
	delete(p.byKey, g.key)
	t.n.Add(-1)
}

// arm has the guests swept, as long as there are any.
func (t *guests) arm() {
	if t.armed.CompareAndSwap(false, true) {
		time.AfterFunc(guestSweep, func() {
			t.sweep(sinceStarted())
			t.armed.Store(false)
			if t.n.Load() > 0 {
				t.arm()
			}
		})
	}
}

// sweep ends those that have been idle.
func (t *guests) sweep(now int64) {
	t.end(func(g *guest) bool { return now-g.last.Load() >= int64(heldIdle) }, relay.IdleTimeout)
}

// end ends the guests that match selects and counts them out.
func (t *guests) end(match func(*guest) bool, why relay.Reason) (n int) {
	for i := range t.parts {
		for from := 0; from >= 0; {
			var gone []*guest
			gone, from = t.take(&t.parts[i], from, match)
			for _, g := range gone {
				last := g.info()
				g.stats.Closed(&last, why)
			}
			n += len(gone)
		}
	}
	return n
}

// take removes those that match among a few from a position on, and returns
// where to go on; -1 is the end.
func (t *guests) take(p *guestPart, from int, match func(*guest) bool) (gone []*guest, next int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for range guestStep {
		if from >= len(p.all) {
			return gone, -1
		}
		if g := p.all[from]; match(g) {
			t.removeLocked(p, g) // and another one is there
			gone = append(gone, g)
			continue
		}
		from++
	}
	return gone, from
}

// endGuests is end for all listeners.
func endGuests(match func(*guest) bool, why relay.Reason) (n int) {
	guestTables.Range(func(_, t any) bool {
		n += t.(*guests).end(match, why)
		return true
	})
	return n
}

// guestFlows are the guests as flows.
func guestFlows(yield func(*relay.Info) bool) {
	guestTables.Range(func(_, t any) bool {
		for i := range t.(*guests).parts {
			for _, g := range t.(*guests).parts[i].list() {
				if info := g.info(); !yield(&info) {
					return false
				}
			}
		}
		return true
	})
}

func (p *guestPart) list() []*guest {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.all)
}

// guestFlow is the guest of that ID as a flow.
func guestFlow(id relay.ID) (found relay.Info, ok bool) {
	guestFlows(func(i *relay.Info) bool {
		if ok = i.ID == id; ok {
			found = *i
		}
		return !ok
	})
	return found, ok
}
