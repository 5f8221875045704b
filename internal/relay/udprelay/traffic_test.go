package udprelay

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

func TestClientsDoNotMix(t *testing.T) {
	e := startEngine(t, 2)
	p := newPath(e, echoBackend(t, "127.0.0.1:0"), nil)
	ep := listen(t, e, "127.0.0.1:0", forwardTo(p))
	var clients []*net.UDPConn
	for range 20 {
		clients = append(clients, dial(t, ep.Addr()))
	}
	for round := range 20 {
		for i, c := range clients {
			send(t, c, fmt.Appendf(nil, "%d/%d", i, round))
		}
		for i, c := range clients {
			if got, want := string(receive(t, c)), fmt.Sprintf("%d/%d", i, round); got != want {
				t.Fatalf("client %d got %q, want %q", i, got, want)
			}
		}
	}
	if n := e.Sessions(); n != len(clients) {
		t.Errorf("%d sessions, want %d", n, len(clients))
	}
}

// TestBursts sends and gets back runs that segmentation can and cannot carry,
// in order.
func TestBursts(t *testing.T) {
	for name, off := range map[string]offload{"offload": probeOffload(), "gso only": {gso: probeOffload().gso}, "plain": {}} {
		t.Run(name, func(t *testing.T) {
			e := startEngineWith(t, 1, off)
			seed := uint64(7)
			t.Logf("seed %d", seed)
			rng := rand.New(rand.NewPCG(seed, 0))
			p := newPath(e, echoBackend(t, "127.0.0.1:0"), nil)
			ep := listen(t, e, "[::]:0", forwardTo(p))
			c := dial(t, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), ep.Addr().Port()))
			rc, err := c.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			n := uint32(0)
			for range 200 {
				size, run := []int{4, 64, 1000, 1472, 4000}[rng.IntN(5)], 1+rng.IntN(16)
				if off.gso && size < 1400 && rng.IntN(2) == 0 {
					// One buffer that the kernel may hand on whole.
					buf := make([]byte, size*run)
					for i := range run {
						binary.BigEndian.PutUint32(buf[i*size:], n+uint32(i))
					}
					tail := size - rng.IntN(size-3) // the last one is shorter
					buf = buf[:size*(run-1)+tail]
					var ctl control
					end := ctl.put(0, unix.SOL_UDP, unix.UDP_SEGMENT, binary.NativeEndian.AppendUint16(nil, uint16(size)))
					rc.Write(func(fd uintptr) bool {
						_, err = unix.SendmsgN(int(fd), buf, ctl.bytes()[:end], nil, 0)
						return true
					})
					if err != nil {
						t.Fatal(err)
					}
				} else {
					for i := range run {
						buf := make([]byte, size)
						binary.BigEndian.PutUint32(buf, n+uint32(i))
						send(t, c, buf)
					}
				}
				for range run {
					got := receive(t, c)
					if id := binary.BigEndian.Uint32(got); id != n || len(got) > size {
						t.Fatalf("got datagram %d of %d bytes, want %d of at most %d", id, len(got), n, size)
					}
					n++
				}
			}
			if got := p.Counters[0].PacketsC2S.Load(); got != uint64(n) {
				t.Errorf("%d datagrams counted, want %d", got, n)
			}
		})
	}
}

func TestForwardingDoesNotAllocate(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	for name, tc := range map[string]struct {
		bind string
		form proxyproto.Form
		head []byte // in front of what the client sends
	}{
		"bound":        {bind: "127.0.0.1:0"},
		"wildcard":     {bind: "[::]:0"},
		"until reply":  {bind: "[::]:0", form: proxyproto.Form{Version: proxyproto.V2UDP}},
		"every header": {bind: "[::]:0", form: proxyproto.Form{Version: proxyproto.V2UDP, Mode: proxyproto.Every, UniqueID: true, CRC: true}},
		"spp":          {bind: "[::]:0", form: proxyproto.Form{Version: proxyproto.SPP}},
		"told by v2":   {bind: "[::]:0", head: tell(formV2, six, dest6, "")},
		"told by spp":  {bind: "[::]:0", head: tell(formSPP, one, dest, ""), form: formSPP},
	} {
		t.Run(name, func(t *testing.T) {
			e := startEngine(t, 1)
			// Both ends are raw sockets of this goroutine, so that the engine
			// is all that could allocate.
			b, err := sock.ListenUDP(netip.MustParseAddrPort("127.0.0.1:0"), sock.Options{})
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(b)
			baddr, _ := sock.LocalAddr(b)
			p := newPath(e, baddr, new(owner))
			p.Idle, p.Proxy = time.Minute, tc.form
			ep := listen(t, e, tc.bind, forwardTo(p))
			if tc.head != nil {
				ep.SetHeaders(trust(t, p, true, local))
			}
			c, errno := sock.DialUDP(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), ep.Addr().Port()), netip.Addr{})
			if errno != 0 {
				t.Fatal(errno)
			}
			defer unix.Close(c)
			buf := make([]byte, 1000)
			copy(buf, tc.head)
			var name unix.RawSockaddrInet6
			trip := func(burst int) {
				for range burst {
					sendto(c, &buf[0], len(buf), nil, 0)
				}
				for range burst {
					recvFrom(t, b, buf, &name)
				}
				for range burst {
					if errno := sendto(b, &buf[0], len(buf), &name, unix.SizeofSockaddrInet4); errno != 0 {
						t.Fatal(errno)
					}
				}
				for range burst {
					recvFrom(t, c, buf, nil)
				}
			}
			trip(16)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			const rounds = 500
			for i := range rounds {
				trip(1 + i%16)
			}
			runtime.ReadMemStats(&after)
			// The runtime itself allocates a little now and then.
			if n := after.Mallocs - before.Mallocs; n > rounds/10 {
				t.Errorf("%d allocations in %d rounds", n, rounds)
			}
		})
	}
}

// readable is kept here so that polling does not allocate.
var readable [1]unix.PollFd

// recvFrom receives from a raw socket without allocating.
func recvFrom(t *testing.T, fd int, p []byte, name *unix.RawSockaddrInet6) {
	for {
		_, errno := rawRecv(fd, p, name)
		if errno == 0 {
			return
		}
		readable[0] = unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
		if n, err := unix.Poll(readable[:], int(patience.Milliseconds())); errno != unix.EAGAIN || (n == 0 && err == nil) {
			t.Fatal(errno)
		}
	}
}
