package load

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/bench/backend"
	"github.com/wayhouse-proxy/wayhouse/bench/payload"
)

// bulkLoad is a number of streams that each carry an equal share of the job's
// bytes, all in one direction.
type bulkLoad struct {
	job     Job
	up      bool
	loop    *loop
	pattern *payload.Pattern
	buf     []byte
	streams []stream
	open    int // streams that have not ended
	res     Result
}

type stream struct {
	fd     int
	off    uint64
	length uint64
}

func runBulk(j Job, sync Sync) (*Result, error) {
	l, err := newLoop()
	if err != nil {
		return nil, err
	}
	b := &bulkLoad{job: j, up: j.Kind == "tcp-up", loop: l, pattern: payload.NewPattern(), buf: make([]byte, payload.MaxChunk)}
	defer b.close()
	for i := range j.Sessions {
		fd, err := dial(j.Target, i)
		if err != nil {
			return nil, err
		}
		b.streams = append(b.streams, stream{fd: fd, length: j.Bytes / uint64(j.Sessions)})
	}
	if err := sync(Point{Name: "start"}); err != nil {
		return nil, err
	}
	if err := b.transfer(); err != nil {
		return nil, err
	}
	if err := sync(Point{Name: "end"}); err != nil {
		return nil, err
	}
	b.res.Units = b.res.Bytes
	return &b.res, nil
}

func (b *bulkLoad) close() {
	for _, s := range b.streams {
		if s.fd >= 0 {
			unix.Close(s.fd)
		}
	}
	b.loop.close()
}

// transfer begins all streams and returns when all have ended.
func (b *bulkLoad) transfer() error {
	start := time.Now()
	mode, events := byte(backend.Down), uint32(unix.EPOLLIN)
	if b.up {
		mode, events = backend.Up, unix.EPOLLOUT
	}
	for i, s := range b.streams {
		if _, err := unix.Write(s.fd, backend.Header(mode, uint32(i), s.length)); err != nil {
			return os.NewSyscallError("write", err)
		}
		if err := b.loop.set(unix.EPOLL_CTL_ADD, s.fd, events, int32(i)); err != nil {
			return err
		}
		b.open++
	}
	for b.open > 0 {
		events, err := b.loop.next(stalled)
		if err != nil {
			return err
		}
		if len(events) == 0 {
			return errStalled
		}
		for _, ev := range events {
			i := int(ev.Fd)
			if err := b.turn(i, &b.streams[i]); err != nil {
				return fmt.Errorf("stream %d, after %d of %d bytes: %w", i, b.streams[i].off, b.streams[i].length, err)
			}
		}
	}
	b.res.Elapsed = time.Since(start)
	return nil
}

// turn does one read or write of a stream.
func (b *bulkLoad) turn(i int, s *stream) error {
	if b.up && s.off < s.length {
		n, err := unix.Write(s.fd, b.pattern.At(uint32(i), s.off, int(min(payload.MaxChunk, s.length-s.off))))
		if err == unix.EAGAIN || err == unix.EINTR {
			return nil
		}
		if err != nil {
			return os.NewSyscallError("write", err)
		}
		b.res.Bytes += uint64(n)
		if s.off += uint64(n); s.off == s.length {
			return b.loop.set(unix.EPOLL_CTL_MOD, s.fd, unix.EPOLLIN, int32(i))
		}
		return nil
	}
	n, err := unix.Read(s.fd, b.buf)
	if err == unix.EAGAIN || err == unix.EINTR {
		return nil
	}
	if err != nil {
		return os.NewSyscallError("read", err)
	}
	switch {
	case b.up && n == 1: // the backend's verdict
		if b.buf[0] != backend.Ack {
			b.res.Bad++
		}
	case b.up:
		return fmt.Errorf("%d bytes where the backend's answer was due", n)
	case n > 0:
		if s.off+uint64(n) > s.length || !b.pattern.Match(uint32(i), s.off, b.buf[:n]) {
			b.res.Bad++
		}
		s.off += uint64(n)
		b.res.Bytes += uint64(n)
		return nil
	case s.off < s.length:
		return fmt.Errorf("the stream ended early")
	}
	b.open--
	unix.Close(s.fd)
	s.fd = -1
	return nil
}
