// Package sniff has the seam for sniffers, which recognise a protocol by the
// first bytes of a flow and say what they have read in it: a host, a key. It
// keeps the sniffers of a config by name, whoever provides them, calls and
// counts them, and evaluates those of a listener for one flow. The native ones
// are in the package native.
package sniff

import "strconv"

// Input is what a sniffer sees of a flow: of a TCP stream no more than the
// listener's peek budget, of datagrams never a part. It belongs to the caller and must be neither changed nor kept.
type Input struct {
	Bytes     []byte   // TCP: the stream so far; UDP: the first datagram
	Datagrams [][]byte // UDP: all datagrams so far, the first included; nil on TCP
	Final     bool     // nothing more will come
}

// UDP reports whether the input is datagrams.
func (in *Input) UDP() bool { return in.Datagrams != nil }

// Verdict is the answer of a sniffer.
type Verdict uint8

// The verdicts. More bytes may turn Undecided into any other one and Partial
// into Recognised; Unrecognised and Recognised are for good.
const (
	Unrecognised Verdict = iota
	Recognised
	Undecided // also of a sniffer that has failed
	Partial   // the protocol is certain, its host not known yet
)

func (v Verdict) String() string {
	return [...]string{"unrecognised", "recognised", "undecided", "partial"}[v&3]
}

// Fault is why a sniffer that runs foreign code has no verdict; the sniffer
// answers Undecided.
type Fault uint8

// The faults, as wayhouse_sniffer_calls_total names them.
const (
	NoFault Fault = iota
	Timeout
	Trap
	BadOutput
	Busy
	Broken // not called: it has failed too often
)

// MaxParts is how many parts a hint can have.
const MaxParts = 4

// Part is a fact that a sniffer has read beside the host and the key.
type Part struct {
	Name  string // from a small fixed set of the sniffer
	Value []byte
}

// Hint is what a sniffer has read. The caller owns it with its buffers and
// uses it again, so that filling it in allocates nothing. It counts only with
// the verdicts Recognised and Partial; of a rejecting one only Reject does.
type Hint struct {
	Reject, HasHost, HasKey bool

	Host []byte // lower-case, without a trailing dot
	Key  []byte

	Fault Fault // with the verdict Undecided

	parts [MaxParts]Part
	n     int
}

// Reset empties the hint and keeps its buffers.
func (h *Hint) Reset() {
	h.Reject, h.HasHost, h.HasKey, h.Fault, h.n = false, false, false, NoFault, 0
	h.Host, h.Key = h.Host[:0], h.Key[:0]
}

// SetHost copies a host, in lower case and without one trailing dot.
func (h *Hint) SetHost(host []byte) {
	h.Host, h.HasHost = AppendHost(h.Host[:0], host), true
}

// SetKey copies a key.
func (h *Hint) SetKey(key string) {
	h.Key, h.HasKey = append(h.Key[:0], key...), true
}

// AddPart copies a part. One too many is a mistake of the sniffer.
func (h *Hint) AddPart(name, value string) {
	p := &h.parts[h.n]
	p.Name, p.Value = name, append(p.Value[:0], value...)
	h.n++
}

// AddNumber adds a part with a number.
func (h *Hint) AddNumber(name string, n int64) {
	p := &h.parts[h.n]
	p.Name, p.Value = name, strconv.AppendInt(p.Value[:0], n, 10)
	h.n++
}

// Parts are the parts added so far; they belong to the hint.
func (h *Hint) Parts() []Part { return h.parts[:h.n] }

// AppendHost appends a host as hints and patterns have it: ASCII in lower case
// and without one trailing dot.
func AppendHost(to, host []byte) []byte {
	if n := len(host); n > 0 && host[n-1] == '.' {
		host = host[:n-1]
	}
	for _, c := range host {
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		to = append(to, c)
	}
	return to
}

// Sniffer looks at the first bytes of a flow and fills in h, which is empty,
// when it recognises them. It is called from many goroutines at once, again
// for a flow that has got more bytes, and must not block or keep anything.
type Sniffer interface {
	Sniff(in *Input, h *Hint) Verdict
}

// NeverRejects is a Sniffer whose hints never reject a flow. Listeners do not
// wait for it before they try routes that do not ask it.
type NeverRejects interface{ NeverRejects() }

// OneLook is a Sniffer that cannot tell bytes it will never recognise from
// those that may be the beginning of something. On TCP its no is about the bytes
// it was shown, and it is asked again when there are more.
type OneLook interface{ OneLook() }

// Host is a module wayhouse.sniffer_hosts.NAME, which provides sniffers. The
// config calls it once, after Provision; the sniffers live as long as the
// config.
type Host interface {
	// Sniffers adds each sniffer with its name and the place in the config or
	// in the file system that it comes from, for errors.
	Sniffers(add func(name, place string, s Sniffer) error) error
}

// User is a matcher that asks sniffers.
type User interface {
	// Sniffers are those it asks, in order; it has them after Provision.
	Sniffers() []*Named
}
