// Package load offers the load of a benchmark and counts what comes back. A
// job runs in one thread that is never in two places: send what is due,
// receive what is there, wait for whichever is next.
package load

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/bench/stats"
)

// Job says what load to offer. Fields a kind does not name are not read by it.
type Job struct {
	Kind     string         `json:"kind"`               // a key of Kinds
	Target   netip.AddrPort `json:"target"`             // the proxy, or the backend itself
	Sessions int            `json:"sessions,omitempty"` // clients at once: udp, tcp-rr, tcp-connect, tcp-down, tcp-up
	Size     int            `json:"size,omitempty"`     // bytes of a message: udp, udp-idle, tcp-rr
	Burst    int            `json:"burst,omitempty"`    // datagrams of one session sent back to back: udp
	Rate     float64        `json:"rate,omitempty"`     // bursts, round trips or connections a second: udp, tcp-rr (0: as fast as answers come), tcp-connect
	Warm     time.Duration  `json:"warm,omitempty"`     // the same load before the window: udp, tcp-rr, tcp-connect
	Window   time.Duration  `json:"window,omitempty"`   // udp, tcp-rr, tcp-connect
	Bytes    uint64         `json:"bytes,omitempty"`    // of all streams together: tcp-down, tcp-up
	Steps    []int          `json:"steps,omitempty"`    // numbers of sessions to hold, one after another: udp-idle, tcp-idle
	Seed     uint64         `json:"seed,omitempty"`     // of the order of sessions: udp
}

// Kinds are the jobs there are.
var Kinds = map[string]func(Job, Sync) (*Result, error){
	"udp":         runUDP,
	"udp-idle":    runUDPIdle,
	"tcp-rr":      runRR,
	"tcp-connect": runConnect,
	"tcp-down":    runBulk,
	"tcp-up":      runBulk,
	"tcp-idle":    runTCPIdle,
}

// Point is where a job stands while it waits for whoever measures.
type Point struct {
	Name string `json:"name"`           // start and end of the window, or held
	Held int    `json:"held,omitempty"` // sessions that are open, for held
}

// Sync is called at every Point, when nothing is in flight. The job goes on
// when it returns.
type Sync func(Point) error

// Result is what came of a window.
type Result struct {
	Units      uint64        `json:"units"`                // round trips, or connections, that were completed
	Sent       uint64        `json:"sent,omitempty"`       // messages
	Received   uint64        `json:"received,omitempty"`   // messages, each number once
	Lost       uint64        `json:"lost,omitempty"`       // Sent without Received, or connections without an answer
	Bad        uint64        `json:"bad,omitempty"`        // wrong size, checksum, session or content
	Duplicates uint64        `json:"duplicates,omitempty"` // messages that came once more
	Reordered  uint64        `json:"reordered,omitempty"`  // messages that came after a later one of their session
	Refused    uint64        `json:"refused,omitempty"`    // datagrams the kernel would not take from us
	Skipped    uint64        `json:"skipped,omitempty"`    // units that were due but not offered: we were too slow
	Bytes      uint64        `json:"bytes,omitempty"`      // of bulk streams
	Why        string        `json:"why,omitempty"`        // of the first Lost connection
	Elapsed    time.Duration `json:"elapsed"`
	P50        time.Duration `json:"p50,omitempty"`
	P99        time.Duration `json:"p99,omitempty"`
	Max        time.Duration `json:"max,omitempty"`
}

// Line is what a job's process writes to its output: a point, or last the
// result.
type Line struct {
	Point  *Point  `json:"point,omitempty"`
	Result *Result `json:"result,omitempty"`
}

// Run runs a job.
func Run(j Job, sync Sync) (*Result, error) {
	run := Kinds[j.Kind]
	if run == nil {
		return nil, fmt.Errorf("kind: there is no job %q", j.Kind)
	}
	if !j.Target.Addr().Is4() {
		return nil, fmt.Errorf("target: %v is not an IPv4 address", j.Target)
	}
	// Sleep as long as was asked for and no longer.
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0); err != nil {
		return nil, os.NewSyscallError("prctl", err)
	}
	return run(j, sync)
}

// lose counts a connection without an answer.
func (r *Result) lose(why string) {
	if r.Lost++; r.Lost == 1 {
		r.Why = why
	}
}

func (r *Result) times(h *stats.Hist) {
	r.P50, r.P99, r.Max = h.Quantile(0.5), h.Quantile(0.99), h.Max()
}

const (
	tick       = 200 * time.Microsecond // how often what is due is sent
	behind     = 50 * time.Millisecond  // more than this is not made up for
	drainFor   = 500 * time.Millisecond // how long the last answers may take
	stalled    = 10 * time.Second       // nothing at all for this long ends a job
	sourceBase = 127<<24 | 16<<16       // clients are 127.16.0.1 and up
)

var errStalled = errors.New("no answer for 10 s")

// source is the address of client i; there are more than two million.
func source(i int) netip.Addr {
	a := uint32(sourceBase + i/250<<8 + 1 + i%250)
	return netip.AddrFrom4([4]byte{byte(a >> 24), byte(a >> 16), byte(a >> 8), byte(a)})
}

// pacer says how many units are due.
type pacer struct {
	start   time.Time
	rate    float64
	sent    uint64
	skipped uint64
}

// due is how many units ought to be sent now. What was missed for longer than
// behind is given up and counted, so that a slow generator does not turn into
// a burst that no client would send.
func (p *pacer) due(now time.Time) uint64 {
	want := uint64(now.Sub(p.start).Seconds() * p.rate)
	n := want - min(want, p.sent+p.skipped)
	if most := uint64(behind.Seconds()*p.rate) + 1; n > most {
		p.skipped += n - most
		n = most
	}
	return n
}

// wait waits until fd can be read, but no longer than d.
func wait(fd int, d time.Duration) error {
	ts := unix.NsecToTimespec(int64(max(d, 0)))
	_, err := unix.Ppoll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, &ts, nil)
	if err == unix.EINTR {
		return nil
	}
	return os.NewSyscallError("ppoll", err)
}

// dial connects from the address of client i and leaves the socket
// non-blocking.
func dial(target netip.AddrPort, i int) (int, error) {
	fd, err := open(i)
	if err != nil {
		return -1, err
	}
	err = unix.Connect(fd, sockaddr(target))
	if err == unix.EINPROGRESS || err == unix.EINTR {
		if err = await(fd, unix.POLLOUT); err == nil {
			var errno int
			if errno, err = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR); err == nil && errno != 0 {
				err = syscall.Errno(errno)
			}
		}
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("connecting client %d: %w", i, err)
	}
	return fd, nil
}

// await waits until fd is ready for events, or for stalled.
func await(fd int, events int16) error {
	for end := time.Now().Add(stalled); ; {
		ts := unix.NsecToTimespec(int64(max(time.Until(end), 0)))
		n, err := unix.Ppoll([]unix.PollFd{{Fd: int32(fd), Events: events}}, &ts, nil)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return os.NewSyscallError("ppoll", err)
		case n == 0:
			return errStalled
		default:
			return nil
		}
	}
}

// open makes a non-blocking TCP socket that will connect from the address of client i. Its
// port is chosen at connect, for only then may it be shared with other targets.
func open(i int) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, os.NewSyscallError("socket", err)
	}
	err = errors.Join(
		os.NewSyscallError("setsockopt", unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)),
		os.NewSyscallError("setsockopt", unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)),
		os.NewSyscallError("bind", unix.Bind(fd, &unix.SockaddrInet4{Addr: source(i).As4()})),
	)
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
}

// loop is an epoll of connections.
type loop struct {
	ep     int
	events [256]unix.EpollEvent
}

func newLoop() (*loop, error) {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	return &loop{ep: ep}, os.NewSyscallError("epoll_create1", err)
}

// set watches fd, which is known to the caller as id.
func (l *loop) set(op, fd int, events uint32, id int32) error {
	return os.NewSyscallError("epoll_ctl", unix.EpollCtl(l.ep, op, fd, &unix.EpollEvent{Events: events, Fd: id}))
}

// next waits no longer than d for events and returns them.
func (l *loop) next(d time.Duration) ([]unix.EpollEvent, error) {
	if err := wait(l.ep, d); err != nil {
		return nil, err
	}
	n, err := unix.EpollWait(l.ep, l.events[:], 0)
	if err == unix.EINTR {
		return nil, nil
	}
	return l.events[:max(n, 0)], os.NewSyscallError("epoll_wait", err)
}

func (l *loop) close() { unix.Close(l.ep) }
