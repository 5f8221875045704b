package udprelay

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

var (
	formV2  = proxyproto.Form{Version: proxyproto.V2UDP, Mode: proxyproto.Every}
	formSPP = proxyproto.Form{Version: proxyproto.SPP}
)

const (
	one   = "198.51.100.1:1001"
	two   = "198.51.100.2:1002"
	six   = "[2001:db8::6]:1006"
	dest  = "203.0.113.9:7777"
	dest6 = "[2001:db8::9]:7777"
	local = "127.0.0.0/8"
)

func addr(s string) netip.AddrPort {
	if s == "" {
		return netip.AddrPort{}
	}
	return netip.MustParseAddrPort(s)
}

// tell is a datagram with a header; "" tells of no client.
func tell(f proxyproto.Form, client, dest, payload string) []byte {
	return append(f.Append(nil, &proxyproto.Flow{Client: addr(client), Local: addr(dest)}), payload...)
}

func trust(t *testing.T, p *relay.Path, require bool, from ...string) *HeaderIn {
	t.Helper()
	h := &HeaderIn{From: new(cidr.Set), Require: require, Counters: p.Counters}
	if err := h.From.AddAll(from); err != nil {
		t.Fatal(err)
	}
	return h
}

// TestTold: what an acceptor, a backend, the counters and the list of sessions get to
// see, and how answers go back.
func TestTold(t *testing.T) {
	for _, at := range []struct{ bind, hit string }{
		{"127.0.0.1:0", "127.0.0.1"}, {"[::1]:0", "::1"}, {"0.0.0.0:0", "127.0.0.2"}, {"[::]:0", "127.0.0.3"}, {"[::]:0", "::1"},
	} {
		for _, tc := range []struct{ client, dest string }{{one, dest}, {six, dest6}} {
			for _, form := range []proxyproto.Form{formV2, formSPP} {
				t.Run(fmt.Sprint(form.Version, " ", at, " ", tc.client), func(t *testing.T) {
					e := startEngine(t, 2)
					own := new(owner)
					p := newPath(e, echoBackend(t, "127.0.0.1:0"), own)
					opened := make(chan Opening, 1)
					forward := forwardTo(p)
					ep := listen(t, e, at.bind, acceptFunc(func(o *Opening) Decision {
						o2 := *o
						o2.Data = bytes.Clone(o.Data)
						opened <- o2
						return forward(o)
					}))
					ep.SetHeaders(trust(t, p, true, local, "::1"))
					to := netip.AddrPortFrom(netip.MustParseAddr(at.hit), ep.Addr().Port())
					c := dial(t, to)
					head := tell(form, tc.client, tc.dest, "")
					sum := 0
					for _, n := range []int{5, 0, 1400, 60000, 1} {
						payload := bytes.Repeat([]byte{'x'}, n)
						sum += n
						want := payload
						if form.Version == proxyproto.SPP {
							want = append(head[:len(head):len(head)], payload...)
						}
						send(t, c, append(head[:len(head):len(head)], payload...))
						if got := receive(t, c); !bytes.Equal(got, want) {
							t.Fatalf("of %d bytes %d came back, want %d", n, len(got), len(want))
						}
					}
					o := <-opened
					if peer := c.LocalAddr().(*net.UDPAddr).AddrPort(); o.Client != addr(tc.client) || o.Local != addr(tc.dest) || o.Peer != peer || o.Hit != to || string(o.Data) != "xxxxx" {
						t.Errorf("opened with %v to %v, by %v to %v, %q", o.Client, o.Local, o.Peer, o.Hit, o.Data)
					}
					var info relay.Info
					e.Flows(func(i *relay.Info) bool { info = *i; return true })
					if info.Client != addr(tc.client) || info.Local != addr(tc.dest) {
						t.Errorf("listed as %v to %v", info.Client, info.Local)
					}
					ep.Close(relay.Admin)
					if _, info, _ := own.lastClosed(); info.Client != addr(tc.client) || info.Local != addr(tc.dest) || info.BytesC2S != uint64(sum) || info.BytesS2C != uint64(sum) {
						t.Errorf("closed: %+v, want %d bytes: headers do not count", info, sum)
					}
				})
			}
		}
	}
}

// TestToldInTurn: what comes of the datagrams of one socket, one after the other.
func TestToldInTurn(t *testing.T) {
	v2 := func(client, payload string) string { return string(tell(formV2, client, dest, payload)) }
	spp := func(client, payload string) string { return string(tell(formSPP, client, dest, payload)) }
	unspec := v2("", "")[:12] + "\x21\x00\x00\x00"
	broken := v2(one, "")
	stream := broken[:13] + "\x11" + broken[14:]
	long := broken[:14] + "\x02\x09" + broken[16:] + strings.Repeat("\x00", 521)
	const peer = "peer" // the socket's own address
	type step struct{ send, client, payload string }
	drop := func(s string) step { return step{send: s} }
	for name, tc := range map[string]struct {
		require bool
		from    string
		steps   []step
	}{
		"v2 first": {require: true, steps: []step{{v2(one, "a"), one, "a"}, {"b", one, "b"}, {"", one, ""}}},
		"v2 until reply, every": {require: true, steps: []step{
			{v2(one, "a"), one, "a"}, {v2(one, ""), one, ""}, {"b", one, "b"}, {v2(one, "c"), one, "c"}}},
		"v2, then another": {steps: []step{
			{v2(one, "a"), one, "a"}, drop(v2(two, "b")), drop(string(tell(formV2, one, "203.0.113.9:7778", "c"))), {"d", one, "d"}}},
		"v2, then LOCAL":           {steps: []step{{v2(one, "a"), one, "a"}, drop(v2("", "b")), {v2(one, "c"), one, "c"}}},
		"v2, then broken":          {steps: []step{{v2(one, "a"), one, "a"}, drop(stream), drop(broken[:20]), {broken[:11], one, broken[:11]}}},
		"v2, then SPP's magic":     {steps: []step{{v2(one, "a"), one, "a"}, {"\x56\xecb", one, "\x56\xecb"}, {spp(two, "c"), one, spp(two, "c")}}},
		"v2, no destination":       {steps: []step{{string(tell(formV2, one, "0.0.0.0:0", "a")), one, "a"}}},
		"LOCAL":                    {require: true, steps: []step{{v2("", "a"), peer, "a"}, {"b", peer, "b"}, drop(v2(one, "c")), {v2("", "d"), peer, "d"}}},
		"UNSPEC":                   {require: true, steps: []step{{unspec + "a", peer, "a"}, {"\x56\xecb", peer, "\x56\xecb"}}},
		"bare":                     {steps: []step{{"a", peer, "a"}, drop(v2(one, "b")), {v2("", "c"), peer, "c"}, {"d", peer, "d"}}},
		"bare, required":           {require: true, steps: []step{drop("a"), drop(""), {v2(one, "b"), one, "b"}}},
		"broken, not required":     {steps: []step{drop(stream), drop(broken[:20]), drop(long), drop("\x56\xecshort"), {"a", peer, "a"}}},
		"nobody":                   {steps: []step{drop(v2("0.0.0.0:9", "a")), drop(v2("224.0.0.1:9", "b")), drop(spp("[::]:9", "c")), drop(spp("[ff02::1]:9", "d"))}},
		"SPP":                      {require: true, steps: []step{{spp(one, "a"), one, "a"}, {spp(two, "b"), two, "b"}, {spp(six, ""), six, ""}, {spp(one, "c"), one, "c"}}},
		"SPP, another destination": {steps: []step{{spp(one, "a"), one, "a"}, {string(tell(formSPP, one, dest6, "b")), one, "b"}}},
		"SPP, no destination":      {steps: []step{{string(tell(formSPP, one, "0.0.0.0:0", "a")), one, "a"}}},
		"SPP, then bare":           {steps: []step{{spp(one, "a"), one, "a"}, drop("b"), drop("\x56\xecb"), drop(v2(one, "c")), {spp(two, "d"), two, "d"}}},
		"not trusted":              {from: "192.0.2.0/24", steps: []step{{v2(one, "a"), peer, v2(one, "a")}, {spp(one, "b"), peer, spp(one, "b")}, {"c", peer, "c"}}},
		"not trusted, required":    {from: "192.0.2.0/24", require: true, steps: []step{drop(v2(one, "a")), drop(spp(one, "b")), drop("c"), drop("")}},
	} {
		t.Run(name, func(t *testing.T) {
			e := startEngine(t, 1)
			b := newHeadBackend(t, "127.0.0.1:0")
			p := newPath(e, b.addr, nil)
			p.Proxy = formV2 // so that the backend knows the client
			ep := listen(t, e, "127.0.0.1:0", forwardTo(p))
			if tc.from == "" {
				tc.from = local
			}
			h := trust(t, p, tc.require, tc.from)
			var heard atomic.Int64
			c := dial(t, ep.Addr())
			own := c.LocalAddr().(*net.UDPAddr).AddrPort()
			h.Refused = func(peer, hit netip.AddrPort) {
				if peer != own || hit != ep.Addr() {
					t.Errorf("refused %v to %v", peer, hit)
				}
				heard.Add(1)
			}
			ep.SetHeaders(h)
			lost, known := 0, false
			for i, s := range tc.steps {
				send(t, c, []byte(s.send))
				if s.client == "" {
					lost++
					eventually(t, fmt.Sprintf("drop %d", lost), func() bool { return dropped(p, relay.ProxyHeader) == uint64(lost) })
					if !known && heard.Load() != int64(lost) {
						t.Errorf("step %d: heard of %d, want %d", i, heard.Load(), lost)
					}
					continue
				}
				known = true
				want := own
				if s.client != peer {
					want = addr(s.client)
				}
				got := b.wait(t, i+1-lost)
				hd, payload, headed := split(got[len(got)-1])
				if len(got) != i+1-lost || !headed || hd.Client != want || payload != s.payload {
					t.Fatalf("step %d: %d datagrams, the last %q of %v, want %q of %v", i, len(got), payload, hd.Client, s.payload, want)
				}
				switch {
				case name == "v2, no destination" && hd.Dest != ep.Addr():
					t.Errorf("to %v, want %v", hd.Dest, ep.Addr())
				case name == "SPP, no destination" && hd.Dest != addr("0.0.0.0:0"): // as answers must have it
					t.Errorf("to %v, want what the header says", hd.Dest)
				}
			}
		})
	}
}

// TestPeersDoNotMix: two proxies that tell of the same clients have sessions of their
// own, and each hears the answers to what it has sent.
func TestPeersDoNotMix(t *testing.T) {
	for _, form := range []proxyproto.Form{formV2, formSPP} {
		t.Run(form.Version.String(), func(t *testing.T) {
			e := startEngine(t, 2)
			p := newPath(e, echoBackend(t, "127.0.0.1:0"), nil)
			ep := listen(t, e, "127.0.0.1:0", forwardTo(p))
			ep.SetHeaders(trust(t, p, true, local))
			var edges []*net.UDPConn
			for range 8 {
				edges = append(edges, dial(t, ep.Addr()))
			}
			clients := []string{one}
			if form.Version == proxyproto.SPP {
				clients = append(clients, two, six)
			}
			for round := range 3 {
				for i, c := range edges {
					for _, client := range clients {
						send(t, c, tell(form, client, dest, fmt.Sprint(i, round, client)))
					}
				}
				for i, c := range edges {
					want := map[string]bool{}
					for _, client := range clients {
						want[client] = true
					}
					for range clients {
						got := receive(t, c)
						for client := range want {
							text := fmt.Sprint(i, round, client)
							if string(got) == text && form.Version == proxyproto.V2UDP || bytes.Equal(got, tell(form, client, dest, text)) {
								delete(want, client)
							}
						}
					}
					if len(want) != 0 {
						t.Fatalf("edge %d, round %d: no answer for %v", i, round, want)
					}
				}
			}
			if n, want := e.Sessions(), len(edges)*len(clients); n != want {
				t.Errorf("%d sessions, want %d", n, want)
			}
		})
	}
}

// TestToldBursts: datagrams of several clients and sizes that the kernel puts together
// and takes apart keep their clients, both ways, and with headers on the other side too.
func TestToldBursts(t *testing.T) {
	for _, out := range []proxyproto.Form{{}, formV2, formSPP} {
		for _, form := range []proxyproto.Form{formV2, formSPP} {
			for name, off := range map[string]offload{"offload": probeOffload(), "gso only": {gso: probeOffload().gso}, "plain": {}} {
				t.Run(fmt.Sprint(form.Version, "→", out.Version, " ", name), func(t *testing.T) {
					e := startEngineWith(t, 1, off)
					echo := backend(t, "127.0.0.1:0", func(c *net.UDPConn, from netip.AddrPort, p []byte) {
						_, payload, _ := split(p)
						if out.Version == proxyproto.SPP { // in one piece with its header
							payload = string(p)
						}
						c.WriteToUDPAddrPort([]byte(payload), from)
					})
					p := newPath(e, echo, nil)
					p.Proxy = out
					ep := listen(t, e, "127.0.0.1:0", forwardTo(p))
					ep.SetHeaders(trust(t, p, true, local))
					c := dial(t, ep.Addr())
					clients := []string{one, one, one, one, one, one, two, two, six}
					if form.Version != proxyproto.SPP {
						clients = []string{one}
					}
					n, seen := uint32(0), map[string]uint32{}
					for _, size := range []int{4, 64, 1000, 1300, 4000} {
						for run := 1; run <= 16; run++ {
							var all []byte
							count := map[string]int{}
							for i := range run {
								n++
								client := clients[i%len(clients)]
								count[client]++
								payload := make([]byte, size+4)
								if i == run-1 {
									payload = payload[i%2:] // the last one of a run may be shorter
								}
								binary.BigEndian.PutUint32(payload, n)
								d := tell(form, client, dest, string(payload))
								if off.gso && size < 1400 {
									all = append(all, d...)
								} else {
									send(t, c, d)
								}
							}
							if len(all) > 0 {
								sendRun(t, c, all, len(tell(form, one, dest, ""))+size+4)
							}
							for range run {
								got := receive(t, c)
								client := one
								if form.Version == proxyproto.SPP {
									h, payload, headed := split(got)
									if !headed || !h.SPP || h.Dest != addr(dest) {
										t.Fatalf("an answer without its header: % x", got[:min(40, len(got))])
									}
									got, client = []byte(payload), h.Client.String()
								}
								id := binary.BigEndian.Uint32(got)
								if id <= seen[client] || id > n || (len(got) != size+4 && len(got) != size+3) {
									t.Fatalf("%s got datagram %d of %d bytes after %d", client, id, len(got), seen[client])
								}
								seen[client] = id
								count[client]--
							}
							for client, left := range count {
								if left != 0 {
									t.Fatalf("%s misses %d", client, left)
								}
							}
						}
					}
					eventually(t, "all counted", func() bool { return p.Counters[0].PacketsS2C.Load() == uint64(n) })
				})
			}
		}
	}
}

// sendRun sends datagrams of seg bytes that the kernel may hand on as one buffer.
func sendRun(t *testing.T, c *net.UDPConn, p []byte, seg int) {
	t.Helper()
	rc, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var ctl control
	end := ctl.put(0, unix.SOL_UDP, unix.UDP_SEGMENT, binary.NativeEndian.AppendUint16(nil, uint16(seg)))
	rc.Write(func(fd uintptr) bool {
		_, err = unix.SendmsgN(int(fd), p, ctl.bytes()[:end], nil, 0)
		return true
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestAnswerRuns: answers of two clients that come in runs, and leave one by one, have
// each their own header however many there are.
func TestAnswerRuns(t *testing.T) {
	off := probeOffload()
	e := startEngineWith(t, 1, offload{gro: off.gro})
	const run, size = 50, 40
	b := backend(t, "127.0.0.1:0", func(c *net.UDPConn, from netip.AddrPort, p []byte) {
		rc, err := c.SyscallConn()
		if err != nil {
			t.Error(err)
			return
		}
		one := append(make([]byte, size-len(p)), p...)
		if !off.gso {
			for range run {
				c.WriteToUDPAddrPort(one, from)
			}
			return
		}
		buf := bytes.Repeat(one, run)
		var ctl control
		end := ctl.put(0, unix.SOL_UDP, unix.UDP_SEGMENT, binary.NativeEndian.AppendUint16(nil, size))
		rc.Write(func(fd uintptr) bool {
			to := from.Addr().Unmap().As4()
			_, err = unix.SendmsgN(int(fd), buf, ctl.bytes()[:end], &unix.SockaddrInet4{Port: int(from.Port()), Addr: to}, 0)
			return true
		})
		if err != nil {
			t.Error(err)
		}
	})
	p := newPath(e, b, nil)
	ep := listen(t, e, "127.0.0.1:0", forwardTo(p))
	ep.SetHeaders(trust(t, p, true, local))
	c := dial(t, ep.Addr())
	for range 20 {
		left := map[string]int{}
		for _, client := range []string{one, two, six, one, two} {
			send(t, c, tell(formSPP, client, dest, client))
			left[client] += run
		}
		for range 5 * run {
			got := receive(t, c)
			h, payload, headed := split(got)
			client := strings.TrimLeft(payload, "\x00")
			if !headed || h.Client.String() != client || len(payload) != size {
				t.Fatalf("%q of %v", payload, h.Client)
			}
			left[client]--
		}
		for client, n := range left {
			if n != 0 {
				t.Fatalf("%s misses %d", client, n)
			}
		}
	}
}

// TestAnswerTooLarge: one that has no room for its header is counted and not cut, the
// same in both families.
func TestAnswerTooLarge(t *testing.T) {
	for _, bind := range []string{"127.0.0.1:0", "[::1]:0"} {
		t.Run(bind, func(t *testing.T) { answerTooLarge(t, bind) })
	}
}

func answerTooLarge(t *testing.T, bind string) {
	e := startEngine(t, 1)
	b := newHeadBackend(t, "127.0.0.1:0")
	p := newPath(e, b.addr, nil)
	ep := listen(t, e, bind, forwardTo(p))
	ep.SetHeaders(trust(t, p, true, local, "::1"))
	c := dial(t, ep.Addr())
	b.answer.Store(make([]byte, 65507-37)) // one byte too many
	send(t, c, tell(formSPP, one, dest, "a"))
	eventually(t, "a drop", func() bool { return dropped(p, relay.ReplySend) == 1 })
	b.answer.Store(make([]byte, 65507-38))
	send(t, c, tell(formSPP, one, dest, "b"))
	if got := receive(t, c); len(got) != 65507 {
		t.Errorf("%d bytes", len(got))
	}
}

// FuzzTold has a trusted socket send two datagrams. The acceptor is given the end of each
// or nothing, of the socket itself or of whom the datagram names; what is known of the
// socket fits what is kept.
func FuzzTold(f *testing.F) {
	for _, a := range [][]byte{nil, []byte("a"), tell(formV2, one, dest, "a"), tell(formV2, six, dest6, ""), tell(formV2, "", "", "a"), tell(formSPP, one, dest, "a"), tell(formSPP, six, dest, "")[:37]} {
		for _, b := range [][]byte{[]byte("b"), tell(formV2, one, dest, "b"), tell(formV2, two, dest, "b"), tell(formSPP, two, dest, "b")} {
			f.Add(a, b, true)
			f.Add(a, b, false)
		}
	}
	e, err := start(Options{Workers: 1}, offload{})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(e.Close)
	peer := netip.MustParseAddrPort("127.0.0.1:999")
	var in []byte
	var t *testing.T
	ep, err := e.Listen(netip.MustParseAddrPort("127.0.0.1:0"), sock.Options{}, acceptFunc(func(o *Opening) Decision {
		h, n, err := proxyproto.ReadDatagram(in)
		if !bytes.HasSuffix(in, o.Data) || o.Peer != peer || o.Client != peer && err == nil && len(o.Data) < len(in) && (o.Client != h.Client || len(o.Data) != len(in)-n) {
			t.Errorf("%d of %d bytes of %v by %v", len(o.Data), len(in), o.Client, o.Peer)
		}
		return Divert
	}))
	if err != nil {
		f.Fatal(err)
	}
	h := &HeaderIn{From: new(cidr.Set), Counters: make([]relay.Counters, 1)}
	if err := h.From.Add(local); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(tt *testing.T, a, b []byte, require bool) {
		h.Require = require
		if !e.workers[0].call(func(w *worker) {
			t = tt
			wire := key{ep: ep.index, client: peer.Addr().As16(), port: swap(peer.Port()), local: ep.sockets[0].local}
			for _, in = range [][]byte{a, b} {
				if via, may := w.tells(h, ep.sockets[0], &wire); may {
					w.told(h, ep.sockets[0], via, &wire, in)
				}
			}
			if len(w.viaIndex) != len(w.kept) || ep.sockets[0].vias != len(w.kept) {
				t.Errorf("%d known, %d kept, %d of the socket", len(w.viaIndex), len(w.kept), ep.sockets[0].vias)
			}
			for len(w.kept) > 0 {
				w.forget(w.kept[0])
			}
		}) {
			tt.Error("it panics")
		}
	})
}
