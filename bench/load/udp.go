package load

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/bench/mmsg"
	"github.com/wayhouse-proxy/wayhouse/bench/payload"
	"github.com/wayhouse-proxy/wayhouse/bench/stats"
)

// udpLoad is any number of UDP clients in one socket: it is bound to all
// addresses, and each client sends from an address of its own.
type udpLoad struct {
	job     Job
	fd      int
	out, in *mmsg.Batch
	base    time.Time // zero of the times in messages
	from    time.Duration
	order   []int // the sessions, in the order they send
	next    int   // position in order
	seq     []uint64
	sources []netip.Addr
	tracker *payload.Tracker
	heard   []bool // sessions that have had an answer
	hist    stats.Hist
	res     Result
}

func newUDP(j Job, sessions int) (*udpLoad, error) {
	if j.Size < payload.MinSize || sessions < 1 {
		return nil, fmt.Errorf("size %d, sessions %d: at least %d and 1", j.Size, sessions, payload.MinSize)
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 32<<20)
	unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 32<<20)
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_PKTINFO, 1); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("setsockopt", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{}); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("bind", err)
	}
	u := &udpLoad{
		job: j, fd: fd, out: mmsg.New(64, j.Size), in: mmsg.New(64, max(j.Size, 2048)), base: time.Now(),
		order: rand.New(rand.NewPCG(j.Seed, 0)).Perm(sessions), seq: make([]uint64, sessions),
		sources: make([]netip.Addr, sessions), tracker: payload.NewTracker(sessions), heard: make([]bool, sessions),
	}
	for i := range u.sources {
		u.sources[i] = source(i)
	}
	rng := rand.New(rand.NewPCG(j.Seed, 1))
	for i := range u.out.Cap() {
		for b := range u.out.Buf(i) {
			u.out.Buf(i)[b] = byte(rng.Uint32())
		}
	}
	return u, nil
}

func (u *udpLoad) close() { unix.Close(u.fd) }

// put makes datagram i of the outgoing batch the next of session s.
func (u *udpLoad) put(i, s int) {
	u.seq[s]++
	payload.Put(u.out.Buf(i), uint32(s), u.seq[s], time.Since(u.base))
	u.out.Set(i, u.job.Size, u.sources[s], u.job.Target)
}

// flush sends the first n datagrams of the outgoing batch.
func (u *udpLoad) flush(n int) {
	u.res.Sent += uint64(n)
	u.res.Refused += uint64(u.out.SendAll(u.fd, n))
}

// receive takes everything that is there.
func (u *udpLoad) receive() {
	for {
		n, errno := u.in.Recv(u.fd)
		if errno != 0 {
			return
		}
		now := time.Since(u.base)
		for i := range n {
			s, seq, sent, err := payload.Parse(u.in.Data(i), u.job.Size)
			if err != nil || int(s) >= len(u.seq) || seq > u.seq[s] || u.in.Local(i) != u.sources[s] {
				u.res.Bad++
				continue
			}
			if sent < u.from {
				continue // the answer to a datagram from before the window
			}
			switch u.tracker.Take(s, seq) {
			case payload.Duplicate:
				u.res.Duplicates++
				continue
			case payload.Reordered:
				u.res.Reordered++
			}
			u.res.Received++
			u.hist.Add(now - sent)
			if !u.heard[s] {
				u.heard[s] = true
			}
		}
		if n < u.in.Cap() {
			return
		}
	}
}

// drain receives until every datagram has been answered, or for drainFor.
func (u *udpLoad) drain() error {
	for end := time.Now().Add(drainFor); u.res.Received < u.res.Sent && time.Now().Before(end); {
		if err := wait(u.fd, time.Until(end)); err != nil {
			return err
		}
		u.receive()
	}
	return nil
}

// reset begins a new window: what was counted until now is forgotten.
func (u *udpLoad) reset() {
	u.res, u.hist, u.from = Result{}, stats.Hist{}, time.Since(u.base)
}

// opening sends a datagram of each session up to the number n that has had no
// answer, until all have: what is lost while sessions are made is sent again.
func (u *udpLoad) opening(n int) error {
	const rate = 5000
	for try := 0; ; try++ {
		var todo []int
		for s := range n {
			if !u.heard[s] {
				todo = append(todo, s)
			}
		}
		if len(todo) == 0 {
			return nil
		}
		if try == 5 {
			return fmt.Errorf("%d of %d sessions have no answer after %d tries", len(todo), n, try)
		}
		for p := (pacer{start: time.Now(), rate: rate}); len(todo) > 0; {
			m := min(int(p.due(time.Now())), len(todo), u.out.Cap())
			for i, s := range todo[:m] {
				u.put(i, s)
			}
			u.flush(m)
			p.sent += uint64(m)
			todo = todo[m:]
			if err := wait(u.fd, tick); err != nil {
				return err
			}
			u.receive()
		}
		if err := u.drain(); err != nil {
			return err
		}
	}
}

// offer sends bursts at the job's rate for d.
func (u *udpLoad) offer(d time.Duration) error {
	burst := max(u.job.Burst, 1)
	start := time.Now()
	p := pacer{start: start, rate: u.job.Rate}
	for nextTick := start; ; {
		now := time.Now()
		if now.Sub(start) >= d {
			break
		}
		if !now.Before(nextTick) {
			nextTick = now.Add(tick)
			n := 0
			for due := p.due(now); due > 0; due-- {
				s := u.order[u.next]
				u.next = (u.next + 1) % len(u.order)
				for range burst {
					u.put(n, s)
					if n++; n == u.out.Cap() {
						u.flush(n)
						n = 0
					}
				}
				p.sent++
			}
			u.flush(n)
		}
		if err := wait(u.fd, time.Until(nextTick)); err != nil {
			return err
		}
		u.receive()
	}
	u.res.Skipped = p.skipped * uint64(burst)
	u.res.Elapsed = time.Since(start)
	return u.drain()
}

func runUDP(j Job, sync Sync) (*Result, error) {
	u, err := newUDP(j, j.Sessions)
	if err != nil {
		return nil, err
	}
	defer u.close()
	if err := u.opening(j.Sessions); err != nil {
		return nil, err
	}
	u.reset()
	if err := u.offer(j.Warm); err != nil {
		return nil, err
	}
	if err := sync(Point{Name: "start"}); err != nil {
		return nil, err
	}
	u.reset()
	if err := u.offer(j.Window); err != nil {
		return nil, err
	}
	if err := sync(Point{Name: "end"}); err != nil {
		return nil, err
	}
	u.res.Units, u.res.Lost = u.res.Received, u.res.Sent-u.res.Received
	u.res.times(&u.hist)
	return &u.res, nil
}

// runUDPIdle opens sessions up to each step, and at the end asks each for one
// more answer, to know that all had been kept.
func runUDPIdle(j Job, sync Sync) (*Result, error) {
	last := 0
	for _, n := range j.Steps {
		last = max(last, n)
	}
	u, err := newUDP(j, last)
	if err != nil {
		return nil, err
	}
	defer u.close()
	for _, n := range j.Steps {
		if err := u.opening(n); err != nil {
			return nil, err
		}
		if err := sync(Point{Name: "held", Held: n}); err != nil {
			return nil, err
		}
	}
	u.reset()
	clear(u.heard)
	if err := u.opening(last); err != nil {
		return nil, err
	}
	u.res.Units, u.res.Lost = u.res.Received, u.res.Sent-u.res.Received
	return &u.res, nil
}
