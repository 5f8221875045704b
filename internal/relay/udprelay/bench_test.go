package udprelay

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

// The ends run in this process too, so a figure is more than the engine's
// share; compare figures with each other.

func BenchmarkRoundTrip(b *testing.B) {
	for name, size := range map[string]int{"64B": 64, "1000B": 1000} {
		b.Run(name, func(b *testing.B) { benchmark(b, 1, size, probeOffload()) })
	}
}

func BenchmarkBurst(b *testing.B) {
	b.Run("16x1000B/offload", func(b *testing.B) { benchmark(b, 16, 1000, probeOffload()) })
	b.Run("16x1000B/plain", func(b *testing.B) { benchmark(b, 16, 1000, offload{}) })
}

func benchmark(b *testing.B, burst, size int, off offload) {
	e, err := start(Options{Workers: 1}, off)
	if err != nil {
		b.Fatal(err)
	}
	defer e.Close()
	echo, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		b.Fatal(err)
	}
	defer echo.Close()
	go func() {
		buf := make([]byte, 64<<10)
		for {
			n, from, err := echo.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			echo.WriteToUDPAddrPort(buf[:n], from)
		}
	}()
	p := &relay.Path{Backend: echo.LocalAddr().(*net.UDPAddr).AddrPort(), Idle: time.Minute, Counters: make([]relay.Counters, 1)}
	ep, err := e.Listen(netip.MustParseAddrPort("127.0.0.1:0"), sock.Options{}, forwardTo(p))
	if err != nil {
		b.Fatal(err)
	}
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(ep.Addr()))
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	buf := make([]byte, size)
	c.SetReadDeadline(time.Now().Add(time.Minute))
	b.ResetTimer()
	for range b.N {
		for range burst {
			if _, err := c.Write(buf); err != nil {
				b.Fatal(err)
			}
		}
		for range burst {
			if _, err := c.Read(buf); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.StopTimer()
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*burst), "ns/datagram")
}
