package routing

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/wayhouse-proxy/wayhouse/internal/firstpackets"
	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// The routes of a listener of this test are, in this order: one for each host
// that a case may have, one for what is recognised without such a host, and
// one for the rest. The latter two are these places.
const (
	some = "recognised"
	rest = "rest"
)

// subject is a sniffer, or the matcher sni, and the cases for it.
type subject struct {
	protocol string // as the cases have it
	udp, sni bool
	cases    []firstpackets.Case
	hosts    []string

	name, addr string // of its listener
}

func subjects(t *testing.T) []*subject {
	var all []*subject
	add := func(udp, sni bool, protocols ...string) {
		for _, p := range protocols {
			s := &subject{protocol: p, udp: udp, sni: sni, name: fmt.Sprintf("%s-udp-%v-sni-%v", p, udp, sni), addr: kit.Local(kit.Port(t))}
			for _, c := range firstpackets.All(t, p) {
				if c.UDP() != udp {
					continue
				}
				s.cases = append(s.cases, c)
				if h := c.Expect.Host; h != "" && !slices.Contains(s.hosts, h) {
					s.hosts = append(s.hosts, h)
				}
			}
			all = append(all, s)
		}
	}
	add(false, false, "minecraft", "openvpn", "stun")
	add(false, true, "tls")
	add(true, false, "a2s", "quake3", "raknet", "quic", "wireguard", "openvpn", "teamspeak3", "enet", "stun", "dtls")
	add(true, true, "quic")
	return all
}

// at is the place for a host.
func (s *subject) at(host string) string {
	return fmt.Sprintf("host-%d", slices.Index(s.hosts, host))
}

// listener has the routes.
func (s *subject) listener() kit.M {
	to, network := tcp, "tcp"
	if s.udp {
		to, network = udp, "udp"
	}
	var routes []kit.M
	for _, h := range s.hosts {
		m := kit.M{"sniffer": kit.M{"name": s.protocol, "host": kit.A{h}}}
		if s.sni {
			m = kit.M{"sni": kit.M{"host": kit.A{h}}}
		}
		routes = append(routes, kit.Match(m, to(s.at(h))))
	}
	if !s.sni {
		routes = append(routes, kit.Match(kit.M{"sniffer": kit.M{"name": s.protocol}}, to(some)))
	}
	routes = append(routes, kit.Route(to(rest)))
	// The budget is for clients of which all bytes have come: it must not end
	// before a slow machine has seen the second part, and no test waits for it
	// but that of datagrams which may be the beginning of something.
	peek := kit.M{"timeout": "1m", "max_bytes": 16384}
	if s.udp {
		peek = kit.M{"timeout": "5s"}
	}
	return kit.With(kit.Listener([]string{network + "/" + s.addr}, routes...), kit.M{"peek": peek})
}

// want are the places where a case may end up once all of it has come and
// nothing more will.
func (s *subject) want(c *firstpackets.Case) []string {
	e := &c.Expect
	var places []string
	switch {
	case e.Recognised && e.Host != "":
		places = append(places, s.at(e.Host))
	case e.Recognised && s.sni:
		places = append(places, rest)
	case e.Recognised:
		places = append(places, some)
	case e.More && c.Segments[0] == "":
		places = append(places, rest) // who says nothing goes on to the routes that need no bytes
	case e.More:
		places = append(places, nowhere)
	default:
		places = append(places, rest)
	}
	if e.HostOptional && !s.sni {
		places = append(places, some)
	}
	if e.Tolerance == "either" || e.HostOptional && s.sni {
		places = append(places, rest)
	}
	if e.Tolerance == "either" {
		places = append(places, some, nowhere)
	}
	return places
}

// trial is one flow of a case.
type trial struct {
	s     *subject
	c     firstpackets.Case
	what  string
	parts [][]byte

	tcp *client
	udp *caller
}

// overlong is a case whose first 16 bytes are all of an OpenVPN hard reset,
// to which the 17th does not belong. Where the reset comes alone it is one: its
// sender would wait for an answer, and nobody could wait for more of it.
const overlong, resetLen = "ovpn-neg-tcp-len-over", 16

func (tr *trial) judge(t *testing.T, got string, err error) {
	want := tr.s.want(&tr.c)
	if tr.c.ID == overlong && len(tr.parts[0]) == resetLen {
		want = []string{some}
	}
	if !slices.Contains(want, got) || err != nil {
		t.Errorf("%s: went to %s, %v; want %s", tr.what, got, err, strings.Join(want, " or "))
	}
}

// vectorProcess runs the listeners of the subjects.
func vectorProcess(t *testing.T, all []*subject) *kit.Process {
	names := []string{some, rest}
	listeners := kit.M{}
	for _, s := range all {
		for i := range s.hosts {
			if n := fmt.Sprintf("host-%d", i); !slices.Contains(names, n) {
				names = append(names, n)
			}
		}
		listeners[s.name] = s.listener()
	}
	return kit.Start(t, kit.App(listeners, newTown(t, names...).pools()), kit.Options{})
}

const seed = 20260330

// mostCuts is how many cuts of one case are tried: all, but for the 54,000 of
// the hellos of TLS, all of which are tried in a soak.
func (s *subject) mostCuts() int {
	if s.sni {
		return kit.Scaled(48, 1<<20)
	}
	return 1 << 20
}

// cuts are where to cut n bytes in two: everywhere, or at a number of places
// that always has the ends.
func cuts(rnd *rand.Rand, n, most int) []int {
	if n-1 <= most {
		all := make([]int, 0, n)
		for i := 1; i < n; i++ {
			all = append(all, i)
		}
		return all
	}
	some := []int{1, n - 1}
	for len(some) < most {
		if i := 1 + rnd.IntN(n-1); !slices.Contains(some, i) {
			some = append(some, i)
		}
	}
	return some
}

// TestStreams sends every TCP case as it came and in one piece, and cut in two
// anywhere, with the second part only after the proxy has seen the first.
// Where a flow goes depends on its bytes alone.
func TestStreams(t *testing.T) {
	var all []*subject
	for _, s := range subjects(t) {
		if !s.udp {
			all = append(all, s)
		}
	}
	p := vectorProcess(t, all)
	t.Logf("cut at random places with the seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	var trials []*trial
	for _, s := range all {
		for _, c := range s.cases {
			parts := c.Data(t)
			whole := slices.Concat(parts...)
			trials = append(trials, &trial{s: s, c: c, what: c.ID, parts: [][]byte{whole}})
			if len(parts) > 1 {
				trials = append(trials, &trial{s: s, c: c, what: c.ID + " as it came", parts: parts})
			}
			for _, at := range cuts(rnd, len(whole), s.mostCuts()) {
				trials = append(trials, &trial{s: s, c: c, what: fmt.Sprintf("%s cut at %d of %d", c.ID, at, len(whole)), parts: [][]byte{whole[:at], whole[at:]}})
			}
		}
	}
	t.Logf("%d connections", len(trials))
	for batch := range slices.Chunk(trials, 500) {
		streams(t, p, batch)
	}
}

// streams has the trials send their n-th parts together, and their next ones
// when the proxy has taken all connections.
func streams(t *testing.T, p *kit.Process, batch []*trial) {
	ended := func() float64 { return p.Metric("listener_connections_total", "result", "no_route") }
	kit.Settles(t, "active connections before a batch", 0.0, func() float64 { return p.Metric("active_connections") })
	before := ended()
	longest := 0
	together(batch, func(tr *trial) {
		tr.tcp = dial(t, tr.s.addr)
		tr.tcp.send(tr.parts[0])
	})
	for _, tr := range batch {
		longest = max(longest, len(tr.parts))
	}
	for i := 1; i < longest; i++ {
		if i == 1 {
			kit.Eventually(t, "the proxy has taken the connections", func() bool {
				return p.Metric("active_connections")+ended()-before >= float64(len(batch))
			})
			p.Metrics() // by the time of this answer it has looked at them too
		}
		together(batch, func(tr *trial) {
			if i < len(tr.parts) {
				tr.tcp.send(tr.parts[i])
			}
		})
	}
	together(batch, func(tr *trial) {
		if tr.c.Expect.More || slices.Contains(tr.s.want(&tr.c), nowhere) {
			tr.tcp.c.CloseWrite() // it is not the budget that is tried here
		}
		got, err := tr.tcp.where()
		tr.judge(t, got, err)
	})
}

// together calls do for all trials, some at a time.
func together(batch []*trial, do func(*trial)) {
	var wg sync.WaitGroup
	work := make(chan *trial)
	for range 16 {
		wg.Go(func() {
			for tr := range work {
				do(tr)
			}
		})
	}
	for _, tr := range batch {
		work <- tr
	}
	close(work)
	wg.Wait()
}

// TestDatagrams sends every UDP case, each datagram after the proxy has seen
// those before.
func TestDatagrams(t *testing.T) {
	var all []*subject
	for _, s := range subjects(t) {
		if s.udp {
			all = append(all, s)
		}
	}
	p := vectorProcess(t, all)
	for _, s := range all {
		t.Run(s.name, func(t *testing.T) { datagrams(t, p, s) })
	}
}

func datagrams(t *testing.T, p *kit.Process, s *subject) {
	drops := func() float64 { return p.Metric("datagrams_dropped_total", "listener", s.name) }
	before, sent, longest := drops(), 0, 0
	var trials []*trial
	for _, c := range s.cases {
		tr := &trial{s: s, c: c, what: c.ID, parts: c.Data(t), udp: call(t, s.addr)}
		trials, sent, longest = append(trials, tr), sent+len(tr.parts), max(longest, len(tr.parts))
	}
	for i := range longest {
		for _, tr := range trials {
			if i < len(tr.parts) {
				tr.udp.send(t, tr.parts[i])
			}
		}
		kit.Eventually(t, "the proxy has taken the sessions", func() bool {
			return p.Metric("active_udp_sessions", "listener", s.name)+drops()-before >= float64(len(trials))
		})
		p.Metrics()
	}
	for _, tr := range trials {
		if want := s.want(&tr.c); slices.Contains(want, nowhere) {
			// It may be dropped: then there is nothing to wait for but that.
			kit.Eventually(t, tr.what+" is answered or dropped", func() bool {
				return tr.udp.silent() != nil || drops() > before
			})
			if tr.udp.silent() == nil {
				before += float64(len(tr.parts))
				continue
			}
		}
		got, err := tr.udp.where()
		tr.judge(t, got, err)
	}
}
