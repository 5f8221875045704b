// Package relay holds what the two data-path engines, udprelay and tcprelay,
// share with each other and with those who hand flows to them: what the flows
// of one route and backend have in common (Path), why a flow ended (Reason),
// and what can be seen of a live one (Info).
package relay

import (
	"net/netip"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
)

// Reason says why a flow ended.
type Reason uint8

// The reasons, as operators see them in logs and answers.
const (
	ClientClose  Reason = iota + 1 // the client ended it
	BackendClose                   // the backend ended it
	IdleTimeout                    // no byte in either direction for the pool's idle timeout
	Drain                          // the listener, the backend or the process was drained and its grace has passed
	Limit                          // the pool's max_lifetime has passed
	BackendDown                    // the backend is down or gone
	Error                          // no backend could be reached, or our side failed
	Admin                          // an operator closed it
	Rejected                       // a route turns it away, behind handlers that have had it
	NumReasons
)

var reasons = [...]string{"unknown", "client_close", "backend_close", "idle_timeout", "drain", "limit", "backend_down", "error", "admin", "reject"}

func (r Reason) String() string {
	if int(r) < len(reasons) {
		return reasons[r]
	}
	return reasons[0]
}

// Phase is how far a flow has come.
type Phase uint8

// The phases, as operators see them.
const (
	Established Phase = iota // it has reached its backend
	Header                   // its PROXY header is waited for
	Peek                     // its first bytes are looked at
	Routing                  // its route is being decided
	Resolve                  // a resolver is asked
	Connect                  // backends are tried
	Handled                  // a handler or a server has it, and no backend is known
)

var phases = [...]string{"established", "header", "peek", "route", "resolve", "connect", "handler"}

func (p Phase) String() string { return phases[p] }

// Drop says why a datagram was not passed on.
type Drop uint8

// The drop reasons. The strings are label values of
// wayhouse_datagrams_dropped_total.
const (
	NoRoute         Drop = iota // no route matched
	NoBackend                   // the pool had no backend to give
	UpstreamBind                // no socket toward the backend
	UpstreamSend                // the kernel refused a datagram toward the backend
	Draining                    // a new session on an endpoint that takes none
	ReplySend                   // the kernel refused a datagram toward the client
	PendingFull                 // the route of a session is being decided and its buffer, or the worker's, is full
	SnifferReject               // a sniffer wants the session dropped
	FirstPacketGate             // the listener's gate has not recognised the first datagram
	Filtered                    // a filter or a limit turned the session away; counted there by rule
	OutsidePrefix               // sent to an address that is not in the listener's prefix
	Loop                        // the backend would be this process, or the client itself
	ProxyHeader                 // its PROXY header is missing, wrong or of somebody else, or the backend's is not one for datagrams
	Reject                      // a route turns the session away
	NumDrops
)

var drops = [NumDrops]string{"no_route", "no_backend", "upstream_bind", "upstream_send", "draining", "reply_send", "pending_full", "sniffer_reject", "first_packet_gate", "filtered", "outside_prefix", "loop", "proxy_header", "reject"}

func (d Drop) String() string { return drops[d] }

// Counters are the traffic of one listener on one worker. Only that worker
// adds to them, anyone may read; a worker adds once a batch.
type Counters struct {
	BytesC2S, BytesS2C     atomic.Uint64
	PacketsC2S, PacketsS2C atomic.Uint64 // UDP only
	Dropped                [NumDrops]atomic.Uint64
	Panics                 atomic.Uint64 // of those whom the worker asks or tells
	_                      [64]byte      // keep two workers off one cache line
}

// Failure is a kind of passive evidence against a backend.
type Failure uint8

// The failures. The first four are of a connect; a Shortage is our own lack of
// descriptors, ports, memory, buffers or permission and says nothing about the
// backend.
const (
	Refused Failure = iota
	Timeout
	Unreachable
	Shortage
	EarlyReset // reset, or ICMP port unreachable, before the backend's first byte
	PortClosed // ICMP port unreachable on a session that has had answers
	SendFailed // a send to the backend failed
)

var failures = [...]string{"refused", "timeout", "unreachable", "shortage", "early_reset", "port_unreachable", "send_error"}

func (f Failure) String() string { return failures[f] }

// ConnectFailure names the kind of failure that a connect's errno stands for.
func ConnectFailure(errno syscall.Errno) Failure {
	switch errno {
	case syscall.ECONNREFUSED, syscall.ECONNRESET:
		return Refused
	case syscall.ETIMEDOUT:
		return Timeout
	case syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.ENOBUFS, syscall.EADDRNOTAVAIL, syscall.EADDRINUSE, syscall.EAGAIN,
		syscall.EPERM, syscall.EACCES: // the last two: this host's own firewall
		return Shortage
	}
	return Unreachable
}

// Path is what all flows of one listener's route to one backend have in
// common. Sessions refer to it by index, so that their tables hold no
// pointers. It does not change once a flow uses it.
type Path struct {
	Listener string // name of the listener, for operators
	Route    int    // position of the route in it, from 0
	Resolver string // name of the resolver that has chosen; "": none has
	Pool     string
	Backend  netip.AddrPort

	Transparent bool // sockets to the backend are bound to the client's address and port, where the families allow it
	Mapped      bool // the backend's port is another for each flow: Info.Upstream has it

	Idle     time.Duration // no byte in either direction for this long ends the flow; 0: never
	Lifetime time.Duration // age that ends the flow; 0: none

	// Proxy is the header that the backend gets in front of datagrams. Of a
	// connection the engine is told by its dialer.
	Proxy proxyproto.Form

	Counters []Counters // of the listener, one for each worker
	Owner    Owner

	// Opened, where it is set, hears of every flow that has reached the backend;
	// Owner.Closed hears of its end. Like the Owner's methods it is called from the
	// workers. i is only valid during the call and may lack the addresses upstream.
	Opened func(i *Info)
}

// Count are the counters of a worker, nil where the path has none for it.
func (p *Path) Count(worker int) *Counters {
	if worker < len(p.Counters) {
		return &p.Counters[worker]
	}
	return nil
}

// Owner hears what becomes of the flows of its paths. The engines call it from
// their workers: it must not block and must not call the engine back except
// through the methods documented as safe there.
type Owner interface {
	// ConnectFailed reports a backend that a TCP flow could not reach. The
	// flow's place at the backend is free again; no Closed follows.
	ConnectFailed(p *Path, f Failure, errno syscall.Errno)

	// Answered reports the first bytes from the backend of a flow.
	Answered(p *Path)

	// Failed reports evidence against the backend of an established flow.
	Failed(p *Path, f Failure, errno syscall.Errno)

	// Closed reports the end of a flow that had been established, once.
	// s is only valid during the call.
	Closed(p *Path, s *Info, why Reason)
}

// Info is a live flow as an operator sees it, or the last state of an ended
// one.
type Info struct {
	ID            ID
	Path          *Path
	Client, Local netip.AddrPort // the client, and the address of ours it spoke to
	UpstreamLocal netip.AddrPort // our address as the backend sees it; unset where the kernel would not say
	Upstream      netip.AddrPort // where the bytes go, of a path that is Mapped; unset of others
	Age, Idle     time.Duration
	Setup         time.Duration // how old it was when it had reached its backend
	Phase         Phase

	Tries   int     // backends that could not be reached, of a flow that has given up
	Failure Failure // of the last of them

	BytesC2S, BytesS2C     uint64
	PacketsC2S, PacketsS2C uint64 // UDP only
}

// ID names a flow for as long as the process lives: protocol, worker, slot and
// the slot's generation.
type ID uint64

// MakeID packs the parts of an ID.
func MakeID(udp bool, worker int, slot, gen uint32) ID {
	id := ID(worker&0x7f)<<56 | ID(gen&0xffffff)<<32 | ID(slot)
	if udp {
		id |= 1 << 63
	}
	return id
}

// UDP reports whether the flow is a UDP session.
func (id ID) UDP() bool { return id>>63 == 1 }

// Worker, Slot and Gen are the parts MakeID has packed.
func (id ID) Worker() int { return int(id >> 56 & 0x7f) }

// Slot is the position in the worker's table.
func (id ID) Slot() uint32 { return uint32(id) }

// Gen is the generation of the slot, its low 24 bits.
func (id ID) Gen() uint32 { return uint32(id >> 32 & 0xffffff) }

// String is the form operators see: u-… or t-… and hexadecimal digits.
func (id ID) String() string { return string(id.AppendTo(nil)) }

// AppendTo appends what String returns.
func (id ID) AppendTo(b []byte) []byte {
	prefix := "t-"
	if id.UDP() {
		prefix = "u-"
	}
	return strconv.AppendUint(append(b, prefix...), uint64(id&^(1<<63)), 16)
}

// ParseID reads the form String writes.
func ParseID(s string) (ID, bool) {
	if len(s) < 3 || s[1] != '-' || (s[0] != 'u' && s[0] != 't') {
		return 0, false
	}
	n, err := strconv.ParseUint(s[2:], 16, 63)
	if err != nil {
		return 0, false
	}
	if s[0] == 'u' {
		n |= 1 << 63
	}
	return ID(n), true
}
