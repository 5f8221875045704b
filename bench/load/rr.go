package load

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/bench/payload"
	"github.com/wayhouse-proxy/wayhouse/bench/stats"
)

// rrLoad is a number of TCP connections on which messages of one size go out
// and come back. At a rate it sends whether or not the last answer has come;
// without one each connection sends its next message on the answer.
type rrLoad struct {
	job     Job
	loop    *loop
	conns   []rrConn
	next    int
	msg     []byte
	buf     []byte
	base    time.Time
	tracker *payload.Tracker
	hist    stats.Hist
	res     Result
	flight  uint64 // messages without an answer
	sending bool   // without a rate: answers are followed by messages
}

type rrConn struct {
	fd   int
	seq  uint64
	part []byte // the beginning of a message, while its rest has not come
}

func runRR(j Job, sync Sync) (*Result, error) {
	if j.Size < payload.MinSize || j.Sessions < 1 {
		return nil, fmt.Errorf("size %d, sessions %d: at least %d and 1", j.Size, j.Sessions, payload.MinSize)
	}
	l, err := newLoop()
	if err != nil {
		return nil, err
	}
	r := &rrLoad{job: j, loop: l, msg: make([]byte, j.Size), buf: make([]byte, 64<<10), base: time.Now(), tracker: payload.NewTracker(j.Sessions)}
	defer r.close()
	for i := range j.Sessions {
		fd, err := dial(j.Target, i%16)
		if err != nil {
			return nil, err
		}
		r.conns = append(r.conns, rrConn{fd: fd, part: make([]byte, 0, j.Size)})
		if err := l.set(unix.EPOLL_CTL_ADD, fd, unix.EPOLLIN, int32(i)); err != nil {
			return nil, err
		}
	}
	if err := r.offer(j.Warm); err != nil {
		return nil, err
	}
	if err := sync(Point{Name: "start"}); err != nil {
		return nil, err
	}
	r.res, r.hist = Result{}, stats.Hist{}
	if err := r.offer(j.Window); err != nil {
		return nil, err
	}
	if err := sync(Point{Name: "end"}); err != nil {
		return nil, err
	}
	r.res.Units, r.res.Lost = r.res.Received, r.res.Sent-r.res.Received
	r.res.times(&r.hist)
	return &r.res, nil
}

func (r *rrLoad) close() {
	for _, c := range r.conns {
		unix.Close(c.fd)
	}
	r.loop.close()
}

// offer sends for d and then waits for the answers.
func (r *rrLoad) offer(d time.Duration) error {
	start := time.Now()
	p := pacer{start: start, rate: r.job.Rate}
	r.sending = true
	if r.job.Rate == 0 {
		for i := range r.conns {
			if err := r.send(i); err != nil {
				return err
			}
		}
	}
	nextTick, heard := start, start
	for {
		now := time.Now()
		if r.sending && now.Sub(start) >= d {
			r.sending = false
			r.res.Elapsed, r.res.Skipped = now.Sub(start), p.skipped
		}
		if !r.sending && r.flight == 0 {
			return nil
		}
		if now.Sub(heard) > stalled {
			return errStalled
		}
		for !now.Before(nextTick) {
			nextTick = now.Add(tick)
			for due := p.due(now); r.sending && due > 0; due-- {
				if err := r.send(r.next); err != nil {
					return err
				}
				r.next = (r.next + 1) % len(r.conns)
				p.sent++
			}
		}
		events, err := r.loop.next(time.Until(nextTick))
		if err != nil {
			return err
		}
		for _, ev := range events {
			if err := r.receive(int(ev.Fd)); err != nil {
				return err
			}
			heard = now
		}
	}
}

func (r *rrLoad) send(i int) error {
	c := &r.conns[i]
	c.seq++
	payload.Put(r.msg, uint32(i), c.seq, time.Since(r.base))
	n, err := unix.Write(c.fd, r.msg)
	if err != nil || n < len(r.msg) {
		return fmt.Errorf("connection %d took %d of %d bytes: %w", i, n, len(r.msg), os.NewSyscallError("write", err))
	}
	r.flight++
	r.res.Sent++
	return nil
}

func (r *rrLoad) receive(i int) error {
	c := &r.conns[i]
	n, err := unix.Read(c.fd, r.buf)
	if err == unix.EAGAIN || err == unix.EINTR {
		return nil
	}
	if err != nil || n == 0 {
		return fmt.Errorf("connection %d was closed with %d messages in flight: %w", i, r.flight, os.NewSyscallError("read", err))
	}
	now := time.Since(r.base)
	for data := r.buf[:n]; len(data) > 0; {
		take := min(r.job.Size-len(c.part), len(data))
		c.part, data = append(c.part, data[:take]...), data[take:]
		if len(c.part) < r.job.Size {
			return nil
		}
		s, seq, sent, err := payload.Parse(c.part, r.job.Size)
		c.part = c.part[:0]
		r.flight--
		switch {
		case err != nil || int(s) != i || r.tracker.Take(s, seq) != payload.Fresh:
			r.res.Bad++
		default:
			r.res.Received++
			r.hist.Add(now - sent)
		}
		if r.job.Rate == 0 && r.sending {
			if err := r.send(i); err != nil {
				return err
			}
		}
	}
	return nil
}
