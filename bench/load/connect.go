package load

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/bench/stats"
)

// connectLoad opens connections at a rate, at most Sessions at once: connect,
// one byte, its echo, close.
type connectLoad struct {
	job  Job
	loop *loop
	free []int // slots without a connection
	busy []attempt
	next int
	hist stats.Hist
	res  Result
}

type attempt struct {
	fd      int // -1: none
	began   time.Time
	written bool
	b       byte
}

func runConnect(j Job, sync Sync) (*Result, error) {
	l, err := newLoop()
	if err != nil {
		return nil, err
	}
	c := &connectLoad{job: j, loop: l}
	for i := range j.Sessions {
		c.free, c.busy = append(c.free, i), append(c.busy, attempt{fd: -1})
	}
	defer c.close()
	if err := c.offer(j.Warm); err != nil {
		return nil, err
	}
	if err := sync(Point{Name: "start"}); err != nil {
		return nil, err
	}
	c.res, c.hist = Result{}, stats.Hist{}
	if err := c.offer(j.Window); err != nil {
		return nil, err
	}
	// The proxy has still to see the last ends.
	if err := wait(l.ep, 100*time.Millisecond); err != nil {
		return nil, err
	}
	if err := sync(Point{Name: "end"}); err != nil {
		return nil, err
	}
	c.res.times(&c.hist)
	return &c.res, nil
}

func (c *connectLoad) close() {
	for _, a := range c.busy {
		if a.fd >= 0 {
			unix.Close(a.fd)
		}
	}
	c.loop.close()
}

func (c *connectLoad) offer(d time.Duration) error {
	start := time.Now()
	p := pacer{start: start, rate: c.job.Rate}
	for nextTick := start; ; {
		now := time.Now()
		over := now.Sub(start) >= d
		if over && len(c.free) == len(c.busy) {
			c.res.Elapsed, c.res.Skipped = now.Sub(start), p.skipped
			return nil
		}
		if !now.Before(nextTick) {
			nextTick = now.Add(tick)
			for due := p.due(now); !over && due > 0 && len(c.free) > 0; due-- {
				if err := c.begin(); err != nil {
					return err
				}
				p.sent++
			}
			for slot, a := range c.busy {
				if a.fd >= 0 && now.Sub(a.began) > stalled {
					c.end(slot, errStalled)
				}
			}
		}
		events, err := c.loop.next(time.Until(nextTick))
		if err != nil {
			return err
		}
		for _, ev := range events {
			c.turn(int(ev.Fd))
		}
	}
}

func (c *connectLoad) begin() error {
	slot := c.free[len(c.free)-1]
	fd, err := open(c.next % 16)
	if err != nil {
		return err
	}
	c.next++
	c.free = c.free[:len(c.free)-1]
	c.busy[slot] = attempt{fd: fd, began: time.Now(), b: 'a' + byte(c.next%26)}
	c.res.Sent++
	if err := unix.Connect(fd, sockaddr(c.job.Target)); err != nil && err != unix.EINPROGRESS {
		return os.NewSyscallError("connect", err)
	}
	return c.loop.set(unix.EPOLL_CTL_ADD, fd, unix.EPOLLOUT, int32(slot))
}

// turn takes the connection in slot one step on.
func (c *connectLoad) turn(slot int) {
	a := &c.busy[slot]
	if a.fd < 0 {
		return
	}
	if !a.written {
		a.written = true
		_, err := unix.Write(a.fd, []byte{a.b})
		if err == nil {
			err = c.loop.set(unix.EPOLL_CTL_MOD, a.fd, unix.EPOLLIN, int32(slot))
		}
		if err != nil {
			c.end(slot, fmt.Errorf("write: %w", err))
		}
		return
	}
	var b [2]byte
	n, err := unix.Read(a.fd, b[:])
	if err == unix.EAGAIN || err == unix.EINTR {
		return
	}
	switch {
	case err != nil:
		err = fmt.Errorf("read: %w", err)
	case n == 0:
		err = io.ErrUnexpectedEOF
	case n != 1 || b[0] != a.b:
		c.res.Bad++
		err = errWrong
	}
	c.end(slot, err)
}

var errWrong = errors.New("another byte than was sent")

// end closes the connection in slot and counts it; err says why it had no
// answer.
func (c *connectLoad) end(slot int, err error) {
	a := &c.busy[slot]
	if err == nil {
		c.res.Units++
		c.res.Received++
		c.hist.Add(time.Since(a.began))
	} else {
		c.res.lose(err.Error())
	}
	unix.Close(a.fd)
	a.fd = -1
	c.free = append(c.free, slot)
}

// runTCPIdle opens connections up to each step, each with one byte there and
// back so that the proxy has finished with it, and at the end asks each once
// more, to know that all had been kept.
func runTCPIdle(j Job, sync Sync) (*Result, error) {
	var fds []int
	defer func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}()
	var res Result
	for _, n := range j.Steps {
		for len(fds) < n {
			fd, err := dial(j.Target, len(fds)%16)
			if err != nil {
				return nil, err
			}
			fds = append(fds, fd)
			if err := echo(fd); err != nil {
				return nil, err
			}
		}
		if err := sync(Point{Name: "held", Held: n}); err != nil {
			return nil, err
		}
	}
	for i, fd := range fds {
		res.Sent++
		if err := echo(fd); err != nil {
			res.lose(fmt.Sprintf("connection %d of %d: %v", i, len(fds), err))
			continue
		}
		res.Received++
		res.Units++
	}
	return &res, nil
}

// echo sends a byte on a connection and waits for it.
func echo(fd int) error {
	b := []byte{'e'}
	if _, err := unix.Write(fd, b); err != nil {
		return os.NewSyscallError("write", err)
	}
	b[0] = 0
	for {
		if err := await(fd, unix.POLLIN); err != nil {
			return err
		}
		n, err := unix.Read(fd, b)
		switch {
		case err == unix.EAGAIN || err == unix.EINTR:
			continue
		case err != nil:
			return os.NewSyscallError("read", err)
		case n == 0:
			return io.ErrUnexpectedEOF
		case b[0] != 'e':
			return errWrong
		}
		return nil
	}
}
