package listener_test

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	wl "github.com/wayhouse-proxy/wayhouse/modules/listener"
)

// echoes answers every datagram with itself, until the test ends.
func echoes(t *testing.T, pc net.PacketConn) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 2000)
		for {
			n, from, err := pc.ReadFrom(b)
			if err != nil {
				return
			}
			pc.WriteTo(b[:n], from)
		}
	}()
	t.Cleanup(func() {
		pc.Close()
		<-done
	})
}

// TestGuest follows a client of a server on a UDP listener's network from its
// first datagram to its end.
func TestGuest(t *testing.T) {
	port := ports(t, 1)[0]
	load(t, fmt.Sprintf(`{"listeners": {"guests": {"bind": ["udp/127.0.0.1:%d"]}}}`, port))
	echoes(t, listenOn(t, "guests").(net.PacketConn))
	stats := flow.ListenerOf("guests")
	listed := func() (list []relay.Info) {
		wl.Running().Flows(func(i *relay.Info) bool {
			if i.Path.Listener == "guests" {
				list = append(list, *i)
			}
			return true
		})
		return list
	}
	live := func(want int64) {
		t.Helper()
		if n := stats.Sessions.Load(); n != want {
			t.Errorf("%d sessions are counted, want %d", n, want)
		}
		if ofIP, _ := stats.Live(netip.MustParseAddr("127.0.0.1")); ofIP != want {
			t.Errorf("%d flows of the source are counted, want %d", ofIP, want)
		}
		if n := len(listed()); n != int(want) {
			t.Errorf("%d flows are listed, want %d", n, want)
		}
	}
	c := dial(t, "udp", fmt.Sprintf("127.0.0.1:%d", port))
	for range 3 {
		send(t, c, "hello")
		expect(t, c, "hello")
	}
	kit.Settles(t, "datagrams of the guest that were answered", uint64(3), func() uint64 { return listed()[0].PacketsS2C })
	live(1)
	i := listed()[0]
	if i.Client.String() != c.LocalAddr().String() || i.Local.String() != c.RemoteAddr().String() || i.PacketsC2S != 3 || i.BytesC2S != 15 || i.BytesS2C != 15 || i.Path.Listener != "guests" {
		t.Errorf("it is listed as %+v", i)
	}
	if one, ok := wl.Running().Flow(i.ID); !ok || one.Client != i.Client {
		t.Errorf("asked for by its ID it is %+v, %v", one, ok)
	}

	wl.SweepGuests("guests", false)
	live(1)
	wl.SweepGuests("guests", true)
	live(0)
	if !flow.Returning(netip.MustParseAddr("127.0.0.1")) {
		t.Error("the source is not remembered")
	}
	send(t, c, "again")
	expect(t, c, "again")
	live(1)
	if i = listed()[0]; !wl.Running().CloseFlow(i.ID, relay.Admin) || wl.Running().CloseFlow(i.ID, relay.Admin) {
		t.Error("it can not be closed, or twice")
	}
	live(0)
	send(t, c, "once more")
	expect(t, c, "once more")
	live(1)

	load(t, fmt.Sprintf(`{"shutdown_grace": "0s", "listeners": {"guests": {"bind": ["udp/127.0.0.1:%d"], "filters": [{"filter": "source_limit", "max_per_ip": 1}], "routes": [{"handle": [{"handler": "echo"}]}]}}}`, port))
	send(t, c, "a session now")
	expect(t, c, "a session now")
	live(1)
	load(t, `{}`)
	kit.Settles(t, "sessions", 0, stats.Sessions.Load)
}

// TestGuestsAreBounded fills the table. A newcomer takes the place of one that
// has sent one datagram, and of no other.
func TestGuestsAreBounded(t *testing.T) {
	const most = 4
	wl.BoundGuests("full", most)
	port := ports(t, 1)[0]
	load(t, fmt.Sprintf(`{"workers": 1, "listeners": {"full": {"bind": ["udp/127.0.0.1:%d"]}}}`, port))
	echoes(t, listenOn(t, "full").(net.PacketConn))
	stats := flow.ListenerOf("full")
	at := fmt.Sprintf("127.0.0.1:%d", port)
	speak := func(c net.Conn) {
		t.Helper()
		send(t, c, "hello")
		expect(t, c, "hello")
	}
	for range most {
		speak(dial(t, "udp", at))
	}
	if n := stats.Sessions.Load(); n != most {
		t.Fatalf("%d sessions are counted, want %d", n, most)
	}
	for range 100 { // each takes the place of a stranger, or is refused as there is none
		c := dial(t, "udp", at)
		if send(t, c, "hello"); !answered(t, c, stats) {
			break
		}
		speak(c) // and is none from now on
		if n := stats.Sessions.Load(); n != most {
			t.Fatalf("%d sessions are counted, want %d", n, most)
		}
	}
	if n := testutil.ToFloat64(stats.Rule("max_udp").Counter()); n != 1 {
		t.Errorf("%v were refused when all had come to stay, want 1", n)
	}
}

// answered waits for an answer, or for a client to be refused.
func answered(t *testing.T, c net.Conn, stats *flow.Listener) bool {
	t.Helper()
	got := make(chan bool, 1)
	go func() {
		b := make([]byte, 10)
		n, _ := c.Read(b)
		got <- n > 0
	}()
	yes := false
	kit.Eventually(t, "an answer or a refusal", func() bool {
		select {
		case yes = <-got:
			return true
		default:
			return testutil.ToFloat64(stats.Rule("max_udp").Counter()) > 0
		}
	})
	if !yes {
		c.SetReadDeadline(time.Now()) // for who still waits
	}
	return yes
}

// TestGuestAllocatesNothing is about the datagrams of a client that is known.
func TestGuestAllocatesNothing(t *testing.T) {
	if kit.Race {
		t.Skip("the race detector has pools drop what is in them")
	}
	port := ports(t, 1)[0]
	load(t, fmt.Sprintf(`{"listeners": {"quick": {"bind": ["udp/127.0.0.1:%d"], "filters": [{"filter": "source_limit", "max_per_ip": 1}]}}}`, port))
	echoes(t, listenOn(t, "quick").(net.PacketConn))
	c := dial(t, "udp", fmt.Sprintf("127.0.0.1:%d", port))
	p, b := []byte("hello"), make([]byte, 100)
	if n := testing.AllocsPerRun(1000, func() {
		if _, err := c.Write(p); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(b); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations for a datagram and its answer", n)
	}
}
