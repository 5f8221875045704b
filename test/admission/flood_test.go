package admission

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// flood sends datagrams to an address of loopback, from one source after the
// other, none of which there is: 127.16.0.0/12, or a /64 each of 2001:db8::/32.
type flood struct {
	fd   int
	to   unix.Sockaddr
	b    []byte
	src  []byte // in b
	sum  []byte // likewise; nil: none is needed
	port []byte
}

const nobody = "hello from nobody"

func newFlood(t *testing.T, to string) *flood {
	t.Helper()
	at := netip.MustParseAddrPort(to)
	f := new(flood)
	const udpLen = 8
	family := unix.AF_INET
	var udp []byte
	if at.Addr().Is4() {
		const ipLen = 20
		f.b = append(make([]byte, ipLen+udpLen), nobody...)
		f.b[0], f.b[8], f.b[9] = 0x45, 64, unix.IPPROTO_UDP
		binary.BigEndian.PutUint16(f.b[2:], uint16(len(f.b)))
		copy(f.b[16:], at.Addr().AsSlice())
		f.to, f.src, udp = &unix.SockaddrInet4{Addr: at.Addr().As4()}, f.b[12:16], f.b[ipLen:]
	} else {
		const ipLen = 40
		family = unix.AF_INET6
		f.b = append(make([]byte, ipLen+udpLen), nobody...)
		f.b[0], f.b[6], f.b[7] = 0x60, unix.IPPROTO_UDP, 64
		binary.BigEndian.PutUint16(f.b[4:], uint16(udpLen+len(nobody)))
		copy(f.b[24:], at.Addr().AsSlice())
		f.to, f.src, udp = &unix.SockaddrInet6{Addr: at.Addr().As16()}, f.b[8:24], f.b[ipLen:]
		f.sum = udp[6:8]
	}
	f.port = udp[:2]
	binary.BigEndian.PutUint16(udp[2:], at.Port())
	binary.BigEndian.PutUint16(udp[4:], uint16(udpLen+len(nobody)))
	var err error
	f.fd, err = unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	kit.Require(t, err, "right to send datagrams of others")
	t.Cleanup(func() { unix.Close(f.fd) })
	return f
}

// send sends one datagram from the nth source.
func (f *flood) send(n int) error {
	if f.sum == nil {
		binary.BigEndian.PutUint32(f.src, 127<<24|1<<20|uint32(n)&(1<<20-1))
	} else {
		binary.BigEndian.PutUint64(f.src, 0x20010db8<<32|uint64(uint32(n)))
	}
	binary.BigEndian.PutUint16(f.port, uint16(1024+n%60000))
	if f.sum != nil {
		f.sum[0], f.sum[1] = 0, 0
		udp := f.b[40:]
		s := uint32(len(udp)) + unix.IPPROTO_UDP
		for _, part := range [][]byte{f.b[8:40], udp} {
			for i := 0; i < len(part); i += 2 {
				s += uint32(part[i]) << 8
				if i+1 < len(part) {
					s += uint32(part[i+1])
				}
			}
		}
		for s > 0xffff {
			s = s&0xffff + s>>16
		}
		if s = ^s & 0xffff; s == 0 {
			s = 0xffff
		}
		binary.BigEndian.PutUint16(f.sum, uint16(s))
	}
	return unix.Sendto(f.fd, f.b, 0, f.to)
}

// spread sends from n sources at a rate until done says so, and returns how many
// datagrams it was.
func (f *flood) spread(sources, rate int, done func(sent int) bool) (sent int) {
	const every = 2 * time.Millisecond
	tick := time.NewTicker(every)
	defer tick.Stop()
	for due, last := 0.0, time.Now(); !done(sent); {
		now := <-tick.C
		due = min(due+float64(rate)*now.Sub(last).Seconds(), float64(rate)/20)
		for last = now; due >= 1; due-- {
			// Neighbours of one network do not follow each other.
			if f.send(int(uint64(sent)*0x9e3779b1%uint64(sources))) == nil {
				sent++
			}
		}
	}
	return sent
}

// missed counts what has not reached a socket of this network for want of room.
func missed(t *testing.T) (n float64) {
	t.Helper()
	for _, file := range []string{"/proc/net/snmp", "/proc/net/snmp6"} {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for line := range strings.Lines(string(b)) {
			f := strings.Fields(line)
			switch {
			case len(f) == 2 && f[0] == "Udp6RcvbufErrors":
				v, _ := strconv.ParseFloat(f[1], 64)
				n += v
			case len(f) > 0 && f[0] == "Udp:" && names == nil:
				names = f
			case len(f) > 0 && f[0] == "Udp:":
				for i := range f {
					if names[i] == "RcvbufErrors" {
						v, _ := strconv.ParseFloat(f[i], 64)
						n += v
					}
				}
			}
		}
	}
	return n
}

// TestFloodAgainstSessions is D15: forged sources, each a session of its own,
// beside players who have theirs.
func TestFloodAgainstSessions(t *testing.T) {
	players, sources, rate := kit.Scaled(50, 500), kit.Scaled(1<<16, 1<<20), kit.Scaled(5_000, 30_000)
	most, lasts := kit.Scaled(1000, 5000), kit.Scaled(3, 30)
	addr := kit.Local(kit.Port(t))
	b := kit.NewUDPBackend(t, 1, "127.0.0.1:0")
	p := kit.Start(t, kit.App(kit.M{"l": kit.ToPool("udp", "udp/"+addr)}, kit.M{"udp": kit.With(kit.Pool(b.Addr), kit.M{"idle_timeout": "2s"})},
		kit.M{"limits": kit.M{"max_udp_sessions": most}}), kit.Options{})
	const patience = 5        // seconds
	each := kit.Scaled(4, 10) // messages a second of each player
	load := kit.StartLoad(t, kit.LoadOptions{UDP: addr, Flows: players, Rate: each * players, Patience: patience * time.Second})
	load.Round(t)
	p.Collect()
	before := p.RSS()

	f := newFlood(t, addr)
	end := time.Now().Add(time.Duration(lasts) * time.Second)
	var wg sync.WaitGroup
	var sent, sessions float64
	wg.Go(func() {
		sent = float64(f.spread(sources, rate, func(int) bool { return time.Now().After(end) }))
	})
	for time.Now().Before(end) {
		sessions = max(sessions, p.Metric("active_udp_sessions"))
	}
	wg.Wait()
	load.Go(t, (patience+1)*each*players) // takes long enough for all that is lost to be known
	during := load.Report()
	p.Collect()
	grown := p.RSS() - before
	kit.Settles(t, "the sessions of players alone", float64(players), func() float64 { return p.Metric("active_udp_sessions") })
	load.Go(t, (patience+1)*each*players)
	after := load.Stop()
	t.Logf("%v datagrams, %v sessions at most, %v refused, %v missed; players lost %d of %d, and then %d; RSS grown by %d KiB",
		sent, sessions, refusals(p, "l", "max_udp"), missed(t), during.Lost, during.Sent, after.Lost-during.Lost, grown>>10)
	if sessions > float64(most) || sessions < float64(players) {
		t.Errorf("%v sessions, of at most %d", sessions, most)
	}
	if refusals(p, "l", "max_udp") == 0 {
		t.Error("nothing was refused")
	}
	if after.Lost > during.Lost || after.Duplicated+after.Damaged+after.Moved > 0 {
		t.Errorf("after the flood players noticed: %v", &after)
	}
	if kit.Soak() && during.Lost*100 > during.Sent {
		t.Errorf("during the flood players lost %d of %d", during.Lost, during.Sent)
	}
	if grown > 150<<20 {
		t.Errorf("the process has grown by %d MiB", grown>>20)
	}
}

// TestFloodOfSources is D14 on the wire: every datagram of a flood is let in,
// refused by its bucket or missed by a full socket; the tables are bounded, and
// who is known keeps his service.
func TestFloodOfSources(t *testing.T) {
	sources, rate := kit.Scaled(30_000, 300_000), kit.Scaled(10_000, 60_000)
	for name, host := range map[string]string{"of /24s": "127.0.0.1", "of /64s": "::1"} {
		t.Run(name, func(t *testing.T) {
			addr := netip.AddrPortFrom(netip.MustParseAddr(host), uint16(kit.Port(t))).String()
			known := kit.Local(kit.Port(t))
			p := kit.Start(t, kit.App(kit.M{"l": kit.With(
				kit.Listener([]string{"udp/" + addr, "udp/" + known}, kit.Match(kit.M{"client_cidr": kit.M{"cidrs": kit.A{"127.0.0.2"}}}, kit.M{"handler": "pool", "pool": "udp"}), kit.Route(kit.M{"handler": "reject"})),
				kit.M{"filters": kit.A{kit.M{"filter": "rate_limit", "per_ip": kit.M{"rate": 1, "burst": 1}, "per_net": kit.M{"rate": 20}}}})}, game(t)), kit.Options{})
			player := dial(t, "udp", "127.0.0.2", known)
			player.served()
			p.Collect()
			before, wereMissed := p.RSS(), missed(t)
			f := newFlood(t, addr)
			sent := f.spread(sources, rate, func(sent int) bool { return sent >= 2*sources })
			seen := func() (n float64) {
				m := p.Metrics()
				return m.Sum("datagrams_dropped_total", "reason", "reject") + m.Sum("filter_blocked_total") + missed(t) - wereMissed
			}
			kit.Settles(t, "all that was sent", float64(sent), seen)
			grown := p.RSS() - before
			for range 3 {
				player.served()
			}
			t.Logf("%d datagrams of %d sources: %v let in, %v refused by address and %v by network; RSS grown by %d KiB", sent, sources,
				p.Metric("datagrams_dropped_total", "reason", "reject"), refusals(p, "l", "rate_ip"), refusals(p, "l", "rate_net"), grown>>10)
			if n := p.Metric("active_udp_sessions"); n != 1 {
				t.Errorf("%v sessions", n)
			}
			if grown > 120<<20 {
				t.Errorf("the process has grown by %d MiB", grown>>20)
			}
		})
	}
}

// TestCostOfRefusal tells what the process pays for a datagram that is refused,
// the kernel's part of receiving it included. bench/README.md has the figures.
func TestCostOfRefusal(t *testing.T) {
	list := make(kit.A, 0, 10_000)
	for i := range cap(list) {
		list = append(list, fmt.Sprintf("10.%d.%d.0/24", i>>8, i&0xff))
	}
	for rule, l := range map[string]kit.M{
		"acl":               {"filters": kit.A{kit.M{"filter": "acl", "deny": append(list, "127.16.0.0/12")}}},
		"rate_net":          {"filters": kit.A{kit.M{"filter": "rate_limit", "per_net": kit.M{"rate": 1}}}},
		"src_conn_net":      {"filters": kit.A{kit.M{"filter": "source_limit", "max_per_net": 1}}},
		"max_udp":           {},
		"first_packet_gate": {"first_packet_gate": true},
		"no_route":          {},
	} {
		t.Run(rule, func(t *testing.T) {
			addr := kit.Local(kit.Port(t))
			route := kit.Match(kit.M{"client_cidr": kit.M{"cidrs": kit.A{"127.0.0.0/8"}}}, kit.M{"handler": "pool", "pool": "udp"})
			options := kit.M{"workers": 1}
			sources := 1 << 20
			switch rule {
			case "first_packet_gate":
				route = kit.Match(kit.M{"first_bytes": kit.M{"prefix": "ascii:WH"}}, kit.M{"handler": "pool", "pool": "udp"})
			case "no_route":
				route = kit.Match(kit.M{"client_cidr": kit.M{"cidrs": kit.A{"192.0.2.1"}}}, kit.M{"handler": "pool", "pool": "udp"})
			case "max_udp":
				options["limits"] = kit.M{"max_udp_sessions": 1}
			case "rate_net", "src_conn_net":
				sources = 256 // of one network, which has one session at the most
			}
			p := kit.Start(t, kit.App(kit.M{"l": kit.With(kit.Listener([]string{"udp/" + addr}, route), l)}, game(t), options), kit.Options{})
			f := newFlood(t, addr)
			counted, cpu := refusals(p, "l", rule), processorTime(t, p)
			sent := f.spread(sources, kit.Scaled(20_000, 100_000), func(sent int) bool { return sent >= kit.Scaled(10_000, 500_000) })
			kit.Eventually(t, "the flood is refused", func() bool { // but for who is let in, whose datagrams go on
				return refusals(p, "l", rule)+missed(t)+p.Metric("packets_total", "listener", "l", "dir", "c2s") >= counted+float64(sent)*0.99
			})
			n := refusals(p, "l", rule) - counted
			t.Logf("%s: %.2f µs for each of %v", rule, (processorTime(t, p)-cpu).Seconds()*1e6/n, n)
			if live := p.Metric("active_udp_sessions"); live > 100 { // rate_net lets one in a second
				t.Errorf("%v sessions", live)
			}
		})
	}
}

// processorTime is what the threads of a process have run so far.
func processorTime(t *testing.T, p *kit.Process) (sum time.Duration) {
	t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", p.PID()))
	if err != nil || len(tasks) == 0 {
		t.Fatal("no threads to be seen: ", err)
	}
	for _, task := range tasks {
		b, err := os.ReadFile(task)
		if err != nil {
			continue // it has ended
		}
		ns, _, _ := strings.Cut(string(b), " ")
		n, _ := strconv.ParseInt(ns, 10, 64)
		sum += time.Duration(n)
	}
	return sum
}
