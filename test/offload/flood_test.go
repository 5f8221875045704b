package offload

import (
	"encoding/binary"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// flood sends datagrams to the proxy from one source after the other of
// 100.64.0.0/10, none of which there is.
type flood struct {
	sources int
	rate    atomic.Int64 // datagrams a second
	sent    atomic.Int64
	stop    chan struct{}
	wg      sync.WaitGroup
}

func newFlood(t testing.TB, sources, rate int) *flood {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		t.Fatal("a socket for spoofed datagrams:", err)
	}
	f := &flood{sources: sources, stop: make(chan struct{})}
	f.rate.Store(int64(rate))
	f.wg.Go(func() {
		defer unix.Close(fd)
		f.run(fd)
	})
	t.Cleanup(f.end)
	return f
}

func (f *flood) end() {
	select {
	case <-f.stop:
	default:
		close(f.stop)
	}
	f.wg.Wait()
}

func (f *flood) run(fd int) {
	const ipLen, udpLen = 20, 8
	b := append(make([]byte, ipLen+udpLen), "hello from nobody"...)
	b[0], b[8], b[9] = 0x45, 64, unix.IPPROTO_UDP
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	to := &unix.SockaddrInet4{Addr: netip.MustParseAddr(proxy4).As4()}
	copy(b[16:], to.Addr[:])
	binary.BigEndian.PutUint16(b[22:], port)
	binary.BigEndian.PutUint16(b[24:], uint16(len(b)-ipLen)) // and no checksum
	const every = 5 * time.Millisecond
	tick := time.NewTicker(every)
	defer tick.Stop()
	const most = 500 // at once, for the backlog of the cable, which players share
	due, last := 0.0, time.Now()
	for n := 0; ; {
		select {
		case <-tick.C:
		case <-f.stop:
			return
		}
		now := time.Now()
		due = min(due+float64(f.rate.Load())*now.Sub(last).Seconds(), most)
		for last = now; due >= 1; due-- {
			n++
			// Neighbours of one network do not follow each other.
			i := uint32(uint64(n) * 0x9e3779b1 % uint64(f.sources))
			binary.BigEndian.PutUint32(b[12:], 100<<24|64<<16+i)
			binary.BigEndian.PutUint16(b[20:], uint16(1024+n%60000))
			if unix.Sendto(fd, b, 0, to) == nil {
				f.sent.Add(1)
			}
		}
	}
}

func limited() kit.M {
	return kit.M{"filter": "rate_limit", "per_ip": kit.M{"rate": 5, "burst": 10}, "per_net": kit.M{"rate": 5, "burst": 10}}
}

// TestFlood has very many sources that do not exist above their limits, beside
// players with sessions. Until the kernel has the networks the players may lose
// one message of a hundred, then one of a thousand, and none when it is over.
func TestFlood(t *testing.T) {
	s := newSite(t)
	players, sources := kit.Scaled(50, 500), kit.Scaled(64*256, 300_000)
	bound := kit.M{"limits": kit.M{"max_udp_sessions": 20_000}}
	config := func(filters ...kit.M) kit.M {
		c := s.config(kit.M{"kind": "nftables", "block_after": 2, "block_for": "5m"}, filters...)
		app := c["apps"].(kit.M)["wayhouse"].(kit.M)
		for k, v := range bound {
			app[k] = v
		}
		return c
	}
	p := s.start(t, config())
	const patience, each = 5, 10 // seconds, and messages a second of each player
	load := kit.StartLoad(t, kit.LoadOptions{UDP: at(proxy4).String(), Flows: players, Rate: each * players, Patience: patience * time.Second})
	p.MustLoad(config(limited()))
	load.Round(t)
	p.Collect()
	before := p.RSS()

	networks := float64((sources + 255) / 256)
	f := newFlood(t, sources, kit.Scaled(4000, 20_000))
	kit.Eventually(t, "the kernel has the networks", func() bool { return p.Metric("offload_entries", "kind", "blocked") >= networks })
	load.Go(t, (patience+1)*each*players) // takes long enough for all that is lost so far to be known
	first := load.Report()

	f.rate.Store(int64(kit.Scaled(20_000, 60_000)))
	dropped, sent := kernel(p, "u"), f.sent.Load()
	goal := float64(kit.Scaled(50_000, 400_000))
	kit.Eventually(t, "the kernel drops the flood", func() bool { return kernel(p, "u") >= dropped+goal })
	share := (kernel(p, "u") - dropped) / float64(f.sent.Load()-sent)
	load.Round(t)
	f.end()
	load.Go(t, (patience+1)*each*players)
	last := load.Report()
	load.Go(t, (patience+1)*each*players)
	over := load.Stop()
	if first.Lost*100 > first.Sent {
		t.Errorf("players, before the kernel had the networks: %v", &first)
	}
	if (last.Lost-first.Lost)*1000 > last.Sent-first.Sent {
		t.Errorf("players lost %d messages behind the kernel: %v", last.Lost-first.Lost, &last)
	}
	if over.Lost > last.Lost {
		t.Errorf("players lost %d messages after the flood: %v", over.Lost-last.Lost, &over)
	}
	if over.Duplicated+over.Damaged+over.Reset+over.Resourced+over.Moved+over.Failed > 0 {
		t.Errorf("players: %v", &over)
	}
	t.Logf("%d sources: %d datagrams sent, players lost %d of %d before the kernel had the networks; it dropped %.1f %% of the rest, they lost %d of %d more; RSS %d and then %d KiB",
		sources, f.sent.Load(), first.Lost, first.Sent, 100*share, last.Lost-first.Lost, last.Sent-first.Sent, before>>10, p.RSS()>>10)
	if share < 0.5 {
		t.Errorf("the kernel has dropped %.1f %% of the flood", 100*share)
	}
	if more := p.RSS() - before; more > 120<<20 {
		t.Errorf("the process has grown by %d MiB", more>>20)
	}
	for _, why := range []string{"max_blocked", "kept"} { // the queue is full when the machine is too busy for its reader
		if n := p.Metric("offload_missed_total", "reason", why); n != 0 {
			t.Errorf("%v things could not be told to the kernel: %s", n, why)
		}
	}
}

// TestLimited has one client over its limit: the kernel takes over, and lets as
// much through as the limit admits; sessions of the same address go on, whether
// they are of the listener's routes or of a server on its network.
func TestLimited(t *testing.T) {
	s := newSite(t)
	help := kit.M{"kind": "nftables", "block_after": 3, "block_for": "5m"}
	t.Run("routes", func(t *testing.T) { limits(t, s.start(t, s.config(help, limited()))) })
	t.Run("server", func(t *testing.T) {
		config := s.config(help, limited())
		apps := config["apps"].(kit.M)
		u := apps["wayhouse"].(kit.M)["listeners"].(kit.M)["u"].(kit.M)
		apps["layer4"] = kit.M{"servers": kit.M{"s": kit.M{"listen": kit.A{"wayhouse/u"}, "routes": u["routes"]}}}
		delete(u, "routes")
		limits(t, s.start(t, config))
	})
}

func limits(t *testing.T, p *kit.Process) {
	var inside []*caller
	for i := range 10 {
		c := call(t, uint32(i+1), later4)
		c.ask(t)
		inside = append(inside, c)
	}
	n := uint32(100)
	kit.Eventually(t, "the kernel has the source", func() bool {
		for range 20 {
			n++
			call(t, n, later4).send(t)
		}
		return kernel(p, "u") > 0
	})
	for range 20 {
		for _, c := range inside {
			c.ask(t)
		}
	}
	call(t, 50, player4).ask(t) // another address, another network
	// As soon as it keeps to its limit it gets in again, by the kernel and by the
	// filter.
	c := call(t, 51, later4)
	answered := func() bool {
		c.send(t)
		c.c.SetReadDeadline(time.Now().Add(time.Second))
		got, err := c.c.Read(make([]byte, 2048))
		return err == nil && got > 0
	}
	kit.Eventually(t, "the source gets in again", answered)
	kit.Eventually(t, "it is in, once the kernel has heard of it", answered)
}

// TestNoRoom has clients over their limit where no backend has room: what is let
// through begins no session, and the kernel is not told that one has begun.
func TestNoRoom(t *testing.T) {
	s := newSite(t)
	config := s.config(kit.M{"kind": "nftables", "block_after": 3, "block_for": "5m"}, limited())
	pools := config["apps"].(kit.M)["wayhouse"].(kit.M)["pools"].(kit.M)
	pools["udp"] = kit.With(kit.Pool(s.udp.Addr), kit.M{"per_backend": kit.M{"max_sessions": 1}})
	p := s.start(t, config)
	inside := call(t, 1, later4)
	inside.ask(t)
	n := uint32(100)
	more := func() {
		for range 20 {
			n++
			c := call(t, n, later4)
			c.send(t)
			c.c.Close()
		}
	}
	kit.Eventually(t, "the kernel has the source", func() bool { more(); return kernel(p, "u") > 0 })
	refused := func() float64 { return p.Metric("datagrams_dropped_total", "listener", "u", "reason", "no_backend") }
	before := refused()
	kit.Eventually(t, "backends have no room for what is let through", func() bool { more(); return refused() >= before+15 })
	if n := p.Metric("offload_entries", "kind", "kept"); n > 1 {
		t.Errorf("%v clients are kept, and one has a session", n)
	}
	inside.ask(t)
}
