package load

import (
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/bench/backend"
	"github.com/wayhouse-proxy/wayhouse/bench/payload"
)

// startBackend runs a backend for the test and returns its address.
func startBackend(t *testing.T) netip.AddrPort {
	t.Helper()
	b, err := backend.Listen(0)
	if err != nil {
		t.Fatal(err)
	}
	var stop [2]int
	if err := unix.Pipe2(stop[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- b.Run(stop[0]) }()
	t.Cleanup(func() {
		unix.Close(stop[1])
		if err := <-ended; err != nil {
			t.Errorf("backend: %v", err)
		}
		b.Close()
		unix.Close(stop[0])
	})
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), b.Port())
}

func openFiles(t *testing.T) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

func TestJobsAgainstTheBackendItself(t *testing.T) {
	const ms = time.Millisecond
	for name, tc := range map[string]struct {
		job    Job
		points []Point
		units  uint64 // at least
	}{
		"udp": {
			job:    Job{Kind: "udp", Sessions: 300, Size: 64, Rate: 5000, Warm: 20 * ms, Window: 200 * ms, Seed: 1},
			points: []Point{{Name: "start"}, {Name: "end"}}, units: 1,
		},
		"udp burst": {
			job:    Job{Kind: "udp", Sessions: 5, Size: 1000, Burst: 16, Rate: 100, Window: 200 * ms, Seed: 1},
			points: []Point{{Name: "start"}, {Name: "end"}}, units: 16,
		},
		"udp idle": {
			job:    Job{Kind: "udp-idle", Size: 64, Steps: []int{10, 500}},
			points: []Point{{Name: "held", Held: 10}, {Name: "held", Held: 500}}, units: 500,
		},
		"tcp round trips at a rate": {
			job:    Job{Kind: "tcp-rr", Sessions: 20, Size: 64, Rate: 2000, Window: 200 * ms},
			points: []Point{{Name: "start"}, {Name: "end"}}, units: 1,
		},
		"tcp round trips without one": {
			job:    Job{Kind: "tcp-rr", Sessions: 20, Size: 64, Window: 100 * ms},
			points: []Point{{Name: "start"}, {Name: "end"}}, units: 20,
		},
		"tcp connect": {
			job:    Job{Kind: "tcp-connect", Sessions: 16, Rate: 500, Window: 200 * ms},
			points: []Point{{Name: "start"}, {Name: "end"}}, units: 1,
		},
		"tcp down": {
			job:    Job{Kind: "tcp-down", Sessions: 8, Bytes: 16 << 20},
			points: []Point{{Name: "start"}, {Name: "end"}}, units: 16 << 20,
		},
		"tcp up": {
			job:    Job{Kind: "tcp-up", Sessions: 8, Bytes: 16 << 20},
			points: []Point{{Name: "start"}, {Name: "end"}}, units: 16 << 20,
		},
		"tcp idle": {
			job:    Job{Kind: "tcp-idle", Steps: []int{5, 50}},
			points: []Point{{Name: "held", Held: 5}, {Name: "held", Held: 50}}, units: 50,
		},
	} {
		t.Run(name, func(t *testing.T) {
			files := openFiles(t)
			t.Cleanup(func() { // after the backend's
				if n := openFiles(t); n != files {
					t.Errorf("%d files are open at the end, %d before", n, files)
				}
			})
			tc.job.Target = startBackend(t)
			routines := runtime.NumGoroutine()
			var points []Point
			res, err := Run(tc.job, func(p Point) error { points = append(points, p); return nil })
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(points, tc.points) {
				t.Errorf("points %v, want %v", points, tc.points)
			}
			if res.Units < tc.units || res.Lost+res.Bad+res.Duplicates+res.Refused != 0 {
				t.Errorf("%+v, want %d units or more and nothing lost, wrong, twice or refused", *res, tc.units)
			}
			if n := runtime.NumGoroutine(); n != routines {
				t.Errorf("%d goroutines after the job, %d before", n, routines)
			}
		})
	}
}

// A proxy that loses, doubles, garbles and crosses datagrams must be found out.
func TestUDPFaultsAreCounted(t *testing.T) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	const bye = "bye"
	ended := make(chan struct{})
	var lost, bad, twice uint64
	go func() {
		defer close(ended)
		b := make([]byte, 2048)
		for {
			n, from, err := unix.Recvfrom(fd, b, 0)
			if err != nil || string(b[:n]) == bye {
				return
			}
			session, seq, _, err := payload.Parse(b[:n], 64)
			if err != nil {
				return
			}
			switch { // number 1 of each session opens it and is answered well
			case seq == 1:
			case session == 0:
				lost++
				continue
			case session == 1:
				b[30] ^= 1
				lost++
				bad++
			case session == 2:
				from.(*unix.SockaddrInet4).Addr = source(3).As4()
				lost++
				bad++
			case session == 3:
				twice++
				unix.Sendto(fd, b[:n], 0, from)
			}
			unix.Sendto(fd, b[:n], 0, from)
		}
	}()
	target := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(sa.(*unix.SockaddrInet4).Port))
	res, err := Run(Job{Kind: "udp", Target: target, Sessions: 5, Size: 64, Rate: 1000, Window: 100 * time.Millisecond, Seed: 1}, func(Point) error { return nil })
	if err := unix.Sendto(fd, []byte(bye), 0, sa); err != nil {
		t.Fatal(err)
	}
	<-ended
	if err != nil {
		t.Fatal(err)
	}
	if lost == 0 || res.Lost != lost || res.Bad != bad || res.Duplicates != twice {
		t.Errorf("counted %d lost, %d bad, %d twice; want %d, %d, %d", res.Lost, res.Bad, res.Duplicates, lost, bad, twice)
	}
}

func TestPacerGivesUpWhatIsLongMissed(t *testing.T) {
	now := time.Now()
	p := pacer{start: now, rate: 1000}
	if n := p.due(now.Add(10 * time.Millisecond)); n != 10 {
		t.Errorf("%d due after 10 ms, want 10", n)
	}
	p.sent = 10
	if n := p.due(now.Add(time.Second)); n != 51 || p.skipped != 990-51 {
		t.Errorf("%d due and %d skipped after a second's gap, want 51 and 939", n, p.skipped)
	}
}

func TestSourcesAreDistinct(t *testing.T) {
	seen := map[netip.Addr]bool{}
	for i := range 20_000 {
		a := source(i)
		if seen[a] || !a.IsLoopback() {
			t.Fatal("client "+strconv.Itoa(i)+" has the address", a)
		}
		seen[a] = true
	}
}

func TestRunRefuses(t *testing.T) {
	good := netip.MustParseAddrPort("127.0.0.1:1")
	for name, j := range map[string]Job{
		"unknown kind":  {Kind: "sctp", Target: good},
		"IPv6 target":   {Kind: "udp", Target: netip.MustParseAddrPort("[::1]:1"), Sessions: 1, Size: 64},
		"tiny messages": {Kind: "udp", Target: good, Sessions: 1, Size: 8},
		"no sessions":   {Kind: "tcp-rr", Target: good, Size: 64},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := Run(j, func(Point) error { return nil }); err == nil {
				t.Error("no error")
			}
		})
	}
}
