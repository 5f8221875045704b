package pool

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/mholt/caddy-l4/layer4"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/modules/balancer"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/pool"
	"github.com/wayhouse-proxy/wayhouse/modules/tracing"
)

// The way of a flow that another handler has wrapped or another app's server
// has accepted: two goroutines copy, and the handler returns when the flow has
// ended.

// copyStream copies a TCP-like connection.
func (h *Handler) copyStream(cx *layer4.Connection, at *listener.Place, client, local netip.AddrPort) error {
	if !h.header.fits(false) {
		return errMisfit
	}
	up, b, err := h.dialTCP(setupOf(cx), at, client, local)
	if err != nil {
		return err
	}
	defer b.Release()
	if err := h.header.beginStream(cx, up, client, local); err != nil {
		up.Close()
		return err
	}
	s := h.pool.Settings()
	show(cx, h.path(at, b))
	return pumpStream(cx, up, at, watch(s.IdleTimeout, s.MaxLifetime, cutter(cx, up)), b)
}

// evidence hears what a flow says of its backend.
type evidence interface {
	PassiveOK()
	Passive(relay.Failure)
}

// pumpStream copies until both directions have ended, and closes up.
func pumpStream(cx *layer4.Connection, up net.Conn, at *listener.Place, w *watcher, b evidence) error {
	defer up.Close()
	defer w.stop()
	count := counters(cx, at)
	done := make(chan struct{})
	go func() {
		defer close(done)
		closeClient(cx, w.copy(cx, up, &count.BytesS2C, b))
	}()
	closeWrite(up, w.copy(up, cx, &count.BytesC2S, nobody{}))
	<-done
	return nil
}

// counters are where the bytes of a connection are counted: nowhere for one of
// a listener of ours, which counts what is read from it and written to it.
func counters(cx *layer4.Connection, at *listener.Place) *relay.Counters {
	if listener.ConnOf(cx) != nil {
		return new(relay.Counters)
	}
	return &at.Counters[0]
}

// dialTCP connects to a backend, and to the next one while it fails.
func (h *Handler) dialTCP(setup *tracing.Setup, at *listener.Place, client, local netip.AddrPort) (net.Conn, *pool.Backend, error) {
	s := h.pool.Settings()
	f := balancer.Flow{Client: client, Local: local}
	var tried []netip.AddrPort
	last := errors.New("no backend to give")
	for range s.MaxTries {
		b, result := h.pool.Pick(f, tried)
		if result != pool.OK {
			break
		}
		path := h.path(at, b)
		to, err := h.target(path, b, client, local)
		if err != nil {
			b.Release()
			return nil, nil, fmt.Errorf("pool %s: %w", h.pool.Name(), err)
		}
		began := time.Now()
		up, err := connectTCP(path, client, to, h.pool.Source(to.Addr()), s.ConnectTimeout, keepalive(s.Keepalive))
		setup.Tried(path, began, time.Now(), failureOf(err))
		if err == nil {
			up.(*net.TCPConn).SetNoDelay(s.NoDelay)
			return up, b, nil
		}
		b.Passive(dialFailure(err))
		b.Release()
		tried, last = append(tried, b.Addr()), err
	}
	return nil, nil, fmt.Errorf("pool %s: %w", h.pool.Name(), last)
}

// setupOf is the traced set-up of a flow, nil where it is not.
func setupOf(cx *layer4.Connection) *tracing.Setup {
	if c := listener.ConnOf(cx); c != nil {
		return c.Setup()
	}
	return nil
}

// failureOf is the kind of failure of a connect, "" for none.
func failureOf(err error) string {
	if err == nil {
		return ""
	}
	return dialFailure(err).String()
}

func keepalive(d time.Duration) time.Duration {
	if d == 0 {
		return -1 // off, to net.Dialer
	}
	return d
}

func dialFailure(err error) relay.Failure {
	var errno interface{ Timeout() bool }
	if errors.As(err, &errno) && errno.Timeout() {
		return relay.Timeout
	}
	return relay.ConnectFailure(errnoOf(err))
}

// show tells operators where the bytes of a connection go.
func show(cx *layer4.Connection, p *relay.Path) {
	if c := listener.ConnOf(cx); c != nil {
		c.SetPath(p)
	}
}

// copyDatagrams copies a UDP session.
func (h *Handler) copyDatagrams(cx *layer4.Connection, at *listener.Place, client, local netip.AddrPort) error {
	s := h.pool.Settings()
	if !h.header.fits(true) {
		return errMisfit
	}
	b, result := h.pool.Pick(balancer.Flow{Client: client, Local: local}, nil)
	if result != pool.OK {
		return fmt.Errorf("pool %s: no backend to give", h.pool.Name())
	}
	defer b.Release()
	path := h.path(at, b)
	to, err := h.target(path, b, client, local)
	if err != nil {
		return fmt.Errorf("pool %s: %w", h.pool.Name(), err)
	}
	began := time.Now()
	up, err := connectUDP(path, client, to, h.pool.Source(to.Addr()))
	setupOf(cx).Tried(path, began, time.Now(), failureOf(err))
	if err != nil {
		b.Passive(relay.ConnectFailure(errnoOf(err)))
		return err
	}
	show(cx, path)
	return pumpDatagrams(cx, h.header.datagrams(cx, up, client, local), at, watch(s.IdleTimeout, s.MaxLifetime, cutter(cx, up)), b)
}

// pumpDatagrams copies until the session ends, and closes up.
func pumpDatagrams(cx *layer4.Connection, up net.Conn, at *listener.Place, w *watcher, b evidence) error {
	defer up.Close()
	defer w.stop()
	count := counters(cx, at)
	go func() {
		w.packets(cx, up, &count.BytesS2C, &count.PacketsS2C, b, true)
		cx.Close()
	}()
	err := w.packets(up, cx, &count.BytesC2S, &count.PacketsC2S, b, false)
	if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// watcher ends a flow that is idle or too old.
type watcher struct {
	began time.Time
	last  atomic.Int64 // nanoseconds after began
	timer *time.Timer

	// of a UDP session
	answered atomic.Bool
	blamed   atomic.Int64 // nanoseconds after began
}

// cutter ends both sides of a flow, the client's first: it is asked why.
func cutter(cx *layer4.Connection, up net.Conn) func(relay.Reason) {
	return func(why relay.Reason) {
		if c := listener.ConnOf(cx); c != nil {
			c.End(why)
		}
		cx.Close()
		up.Close()
	}
}

func watch(idle, lifetime time.Duration, end func(relay.Reason)) *watcher {
	w := &watcher{began: time.Now()}
	armed := make(chan struct{})
	w.timer = time.AfterFunc(idle, func() {
		<-armed
		age := time.Since(w.began)
		left, why := idle-(age-time.Duration(w.last.Load())), relay.IdleTimeout
		if lifetime > 0 && lifetime-age < left {
			left, why = lifetime-age, relay.Limit
		}
		if left <= 0 {
			end(why)
			return
		}
		w.timer.Reset(left)
	})
	if lifetime > 0 && lifetime < idle {
		w.timer.Reset(lifetime)
	}
	close(armed)
	return w
}

func (w *watcher) stop() { w.timer.Stop() }

func (w *watcher) moved() { w.last.Store(int64(time.Since(w.began))) }

// buffers are for copying: large enough for any datagram.
var buffers = sync.Pool{New: func() any { b := make([]byte, 64<<10); return &b }}

// copy copies until src ends and tells from what src says of it. err is nil for
// an ordinary end. What dst refuses says nothing about src.
func (w *watcher) copy(dst io.Writer, src io.Reader, count *atomic.Uint64, from evidence) error {
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	answered := false
	for {
		n, err := src.Read(*buf)
		if n > 0 {
			if !answered {
				answered = true
				from.PassiveOK()
			}
			if _, err := dst.Write((*buf)[:n]); err != nil {
				return err
			}
			count.Add(uint64(n))
			w.moved()
		}
		switch {
		case err == io.EOF:
			return nil
		case isReset(err) && !answered:
			from.Passive(relay.EarlyReset)
			return err
		case err != nil:
			return err
		}
	}
}

// packets copies datagrams, of no bytes too, and tells backend what it hears of
// it: the backend is src when back is set, else dst. A datagram the kernel
// refuses is lost; the session goes on.
func (w *watcher) packets(dst io.Writer, src io.Reader, bytes, packets *atomic.Uint64, backend evidence, back bool) error {
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	for {
		n, err := src.Read(*buf)
		switch {
		case back && isReset(err):
			w.refused(backend)
			continue
		case err != nil:
			return err
		case back && !w.answered.Swap(true):
			backend.PassiveOK()
		}
		_, err = dst.Write((*buf)[:n])
		if !back && isReset(err) {
			// An ICMP message about an earlier datagram has taken the place of
			// this one, which the kernel has not looked at.
			w.refused(backend)
			_, err = dst.Write((*buf)[:n])
		}
		switch {
		case errors.Is(err, net.ErrClosed):
			return err
		case err != nil:
			if !back && !ours(err) {
				w.blame(backend, relay.SendFailed)
			}
			continue
		}
		bytes.Add(uint64(n))
		packets.Add(1)
		w.moved()
	}
}

// refused tells a UDP backend that nothing listens there.
func (w *watcher) refused(backend evidence) {
	if w.answered.Load() {
		w.blame(backend, relay.PortClosed)
	} else {
		w.blame(backend, relay.EarlyReset)
	}
}

// blame tells a UDP backend of a failure, at most once a second for a session,
// as the engine does.
func (w *watcher) blame(backend evidence, f relay.Failure) {
	now, last := max(int64(time.Since(w.began)), 1), w.blamed.Load()
	if last != 0 && now-last < int64(time.Second) || !w.blamed.CompareAndSwap(last, now) {
		return
	}
	backend.Passive(f)
}

// ours reports whether a failed send says nothing about the backend: the datagram
// is too large for the way, or something is short here.
func ours(err error) bool {
	errno := errnoOf(err)
	return errno == 0 || errno == syscall.EMSGSIZE || relay.ConnectFailure(errno) == relay.Shortage
}

// closeWrite passes the end of one direction on: a half-close where the
// connection can, the end of both after an error.
func closeWrite(c net.Conn, err error) {
	if err != nil || !halfClose(c) {
		c.Close()
	}
}

// closeClient is closeWrite for the client. Behind a handler whose connections
// know no half-close it is the socket's: everything has been written by then.
func closeClient(cx *layer4.Connection, err error) {
	if err == nil && (halfClose(cx.Conn) || halfClose(listener.ConnOf(cx))) {
		return
	}
	cx.Close()
}

// halfClose reports whether the connection knows half-closes. Of one that is
// reset already the error is left to those who read.
func halfClose(c net.Conn) bool {
	cw, ok := c.(interface{ CloseWrite() error })
	return ok && !errors.Is(cw.CloseWrite(), errors.ErrUnsupported)
}
