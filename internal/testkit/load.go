package testkit

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// LoadOptions say what a Load does.
type LoadOptions struct {
	TCP, UDP string        // where to, "" for none
	Conns    int           // TCP connections
	Flows    int           // UDP sessions
	Rate     int           // messages a second of all together; 0: as fast as answers come
	Window   int           // messages on their way at a time, of each protocol; 0: 32
	Body     int           // bytes in a message beside its frame
	Patience time.Duration // how long a message may take before it counts as lost; 0: 10s
}

// Report is what became of the messages of a Load.
type Report struct {
	Sent, Answered int64
	Lost           int64 // no answer within the patience
	Duplicated     int64 // an answer that came again, or to no question
	Damaged        int64
	Reset          int64 // connections that ended, and sessions with an ICMP error
	Resourced      int64 // the backend saw another source address than before
	Moved          int64 // another backend answered than before
	Failed         int64 // could not be opened
	Examples       []string
}

// Perfect reports whether every message was answered once by the backend that
// answered before.
func (r *Report) Perfect() bool {
	return r.Sent == r.Answered && r.Lost+r.Duplicated+r.Damaged+r.Reset+r.Resourced+r.Moved+r.Failed == 0
}

func (r *Report) String() string {
	return fmt.Sprintf("sent %d answered %d lost %d duplicated %d damaged %d reset %d resourced %d moved %d failed %d %q",
		r.Sent, r.Answered, r.Lost, r.Duplicated, r.Damaged, r.Reset, r.Resourced, r.Moved, r.Failed, r.Examples)
}

// A Load is connections and sessions that ask a backend one question after the
// other, each from a goroutine of its own:
//
//	pace → tokens → flow.run: send, wait for the answer, check it
//
// There is never more under way than the window, so that nothing is lost to a
// full socket buffer when the machine is slow; how many flows are alive does
// not depend on it.
type Load struct {
	o      LoadOptions
	flows  []*loadFlow
	tokens chan struct{} // nil without a rate
	window [2]chan struct{}
	stop   chan struct{}
	wg     sync.WaitGroup
	once   sync.Once

	sent, answered atomic.Int64

	mu     sync.Mutex
	report Report
}

type loadFlow struct {
	load    *Load
	id      uint32
	udp     bool
	conn    net.Conn
	seq     uint64
	from    netip.AddrPort
	backend uint16
	buf     []byte
	out     []byte
	body    []byte
	dead    bool
}

var flowIDs atomic.Uint32

// StartLoad opens every flow, waits for its first answer and lets it go on.
func StartLoad(t testing.TB, o LoadOptions) *Load {
	t.Helper()
	if o.Window == 0 {
		o.Window = 32
	}
	if o.Patience == 0 {
		o.Patience = 10 * time.Second
	}
	l := &Load{o: o, stop: make(chan struct{})}
	for i := range l.window {
		l.window[i] = make(chan struct{}, o.Window)
	}
	var opening sync.WaitGroup
	for i := range o.Conns + o.Flows {
		f := &loadFlow{load: l, id: flowIDs.Add(1), udp: i >= o.Conns, body: make([]byte, o.Body)}
		l.flows = append(l.flows, f)
		opening.Go(f.open)
	}
	opening.Wait()
	if o.Rate > 0 {
		l.tokens = make(chan struct{}, o.Window)
		l.wg.Go(l.pace)
	}
	for _, f := range l.flows {
		if !f.dead {
			l.wg.Go(f.run)
		}
	}
	t.Cleanup(func() { l.Stop() })
	return l
}

func (l *Load) pace() {
	const every = 5 * time.Millisecond
	tick := time.NewTicker(every)
	defer tick.Stop()
	due := 0.0
	for {
		select {
		case <-l.stop:
			return
		case <-tick.C:
		}
		for due += float64(l.o.Rate) * every.Seconds(); due >= 1; due-- {
			select {
			case l.tokens <- struct{}{}:
			case <-l.stop:
				return
			}
		}
	}
}

// Answered is how many messages have been answered so far.
func (l *Load) Answered() int64 { return l.answered.Load() }

// Go waits until n more messages have been answered.
func (l *Load) Go(t testing.TB, n int) {
	t.Helper()
	goal := l.Answered() + int64(n)
	Eventually(t, fmt.Sprintf("%d more answers", n), func() bool { return l.Answered() >= goal })
}

// Round waits until every flow has had an answer to a question asked from now
// on, more or less.
func (l *Load) Round(t testing.TB) { t.Helper(); l.Go(t, 2*len(l.flows)) }

// Stop ends the load and tells what became of it.
func (l *Load) Stop() Report {
	l.once.Do(func() {
		close(l.stop)
		l.wg.Wait()
		for _, f := range l.flows {
			f.close()
		}
	})
	return l.Report()
}

// Report is what has become of the load so far.
func (l *Load) Report() Report {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.report
	r.Sent, r.Answered = l.sent.Load(), l.answered.Load()
	return r
}

// Sources are the addresses that the backend saw each UDP session at, by flow.
func (l *Load) Sources() map[uint32]netip.AddrPort {
	m := make(map[uint32]netip.AddrPort)
	for _, f := range l.flows {
		if f.udp {
			m[f.id] = f.from
		}
	}
	return m
}

// note counts something that went wrong.
func (f *loadFlow) note(count *int64, format string, args ...any) {
	f.load.mu.Lock()
	defer f.load.mu.Unlock()
	*count++
	if len(f.load.report.Examples) < 5 {
		f.load.report.Examples = append(f.load.report.Examples, fmt.Sprintf("flow %d %s: ", f.id, f.conn.LocalAddr())+fmt.Sprintf(format, args...))
	}
}

func (f *loadFlow) open() {
	l := f.load
	slot := f.slot()
	slot <- struct{}{}
	defer func() { <-slot }()
	network, addr := "tcp", l.o.TCP
	if f.udp {
		network, addr = "udp", l.o.UDP
	}
	conn, err := net.DialTimeout(network, addr, l.o.Patience)
	if err != nil {
		f.dead = true
		l.mu.Lock()
		defer l.mu.Unlock()
		l.report.Failed++
		l.report.Examples = append(l.report.Examples[:min(4, len(l.report.Examples))], err.Error())
		return
	}
	f.conn = conn
	f.ask()
}

func (f *loadFlow) slot() chan struct{} {
	if f.udp {
		return f.load.window[1]
	}
	return f.load.window[0]
}

func (f *loadFlow) run() {
	l, slot := f.load, f.slot()
	for !f.dead {
		if l.tokens != nil {
			select {
			case <-l.stop:
				return
			case <-l.tokens:
			}
		}
		select {
		case <-l.stop:
			return
		case slot <- struct{}{}:
		}
		f.ask()
		<-slot
	}
}

// ask sends a message and waits for its answer.
func (f *loadFlow) ask() {
	l := f.load
	f.seq++
	q := Frame{Flow: f.id, Seq: f.seq, Body: f.body}
	f.out = q.Append(f.out[:0])
	l.sent.Add(1)
	if _, err := f.conn.Write(f.out); err != nil {
		f.broke(err)
		return
	}
	f.conn.SetReadDeadline(time.Now().Add(l.o.Patience))
	for !f.dead {
		a, err := f.read()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			f.note(&l.report.Lost, "message %d unanswered", f.seq)
			f.dead = !f.udp // the stream would be out of step
			return
		case errors.Is(err, errDamaged), errors.Is(err, errNotFrame), errors.Is(err, errShort):
			f.note(&l.report.Damaged, "%v", err)
			f.dead = !f.udp
		case err != nil:
			f.broke(err)
			return
		case a.Flow != f.id || a.Seq > f.seq:
			f.note(&l.report.Damaged, "an answer to flow %d message %d", a.Flow, a.Seq)
		case a.Seq < f.seq:
			f.note(&l.report.Duplicated, "message %d answered while waiting for %d", a.Seq, f.seq)
		default:
			f.check(&a)
			l.answered.Add(1)
			return
		}
	}
}

func (f *loadFlow) check(a *Frame) {
	if f.from.IsValid() && a.From != f.from {
		f.note(&f.load.report.Resourced, "from %s, before from %s", a.From, f.from)
	}
	if f.backend != 0 && a.Backend != f.backend {
		f.note(&f.load.report.Moved, "answered by %d, before by %d", a.Backend, f.backend)
	}
	f.from, f.backend = a.From, a.Backend
}

func (f *loadFlow) read() (Frame, error) {
	if !f.udp {
		var a Frame
		var err error
		a, f.buf, err = ReadFrame(f.conn, f.buf)
		return a, err
	}
	if f.buf == nil {
		f.buf = make([]byte, headLen+len(f.body)+crcLen+1)
	}
	n, err := f.conn.Read(f.buf)
	if err != nil {
		return Frame{}, err
	}
	a, _, err := ParseFrame(f.buf[:n])
	return a, err
}

// broke counts the end of a connection, or an ICMP error that a session goes on
// after.
func (f *loadFlow) broke(err error) {
	f.note(&f.load.report.Reset, "%v", err)
	f.dead = !f.udp || !errors.Is(err, syscall.ECONNREFUSED)
}

// close looks for answers that nobody waits for before it closes.
func (f *loadFlow) close() {
	if f.conn == nil {
		return
	}
	defer f.conn.Close()
	if f.dead || !f.udp {
		return
	}
	f.conn.SetReadDeadline(time.Now().Add(time.Millisecond))
	for {
		if _, err := f.read(); err != nil {
			return
		}
		f.note(&f.load.report.Duplicated, "an answer too many after message %d", f.seq)
	}
}
