// Package proxyproto writes and reads the headers that tell a server behind a
// proxy who the client is: the PROXY protocol of HAProxy, versions 1 and 2, and
// Cloudflare's Simple Proxy Protocol (SPP). Nothing here reads a socket, and
// neither side allocates for what goes in front of a datagram.
package proxyproto

import "bytes"

// Version is a kind of header.
type Version uint8

// The versions.
const (
	None  Version = iota
	V1            // a line of text, on TCP
	V2            // binary, on TCP
	V2UDP         // version 2 in front of datagrams
	SPP           // Cloudflare's, in front of every datagram, also of those from the server
)

var versions = [...]string{"none", "v1", "v2", "v2-udp", "spp"}

func (v Version) String() string { return versions[v] }

// UDP reports whether the version is one for datagrams.
func (v Version) UDP() bool { return v == V2UDP || v == SPP }

// ParseVersion reads a version as users write it.
func ParseVersion(s string) (Version, bool) {
	for v, name := range versions {
		if s == name {
			return Version(v), true
		}
	}
	return None, false
}

// Mode says which datagrams of a session a header stands in front of.
type Mode uint8

// The modes.
const (
	UntilReply Mode = iota // each one until the server has answered
	First                  // the first
	Every                  // each one
)

var modes = [...]string{"until_reply", "first", "every"}

func (m Mode) String() string { return modes[m] }

// ParseMode reads a mode as users write it.
func ParseMode(s string) (Mode, bool) {
	for m, name := range modes {
		if s == name {
			return Mode(m), true
		}
	}
	return UntilReply, false
}

// Form is what headers a server gets.
type Form struct {
	Version Version
	Mode    Mode // of V2UDP

	// What headers of version 2 have besides.
	Authority bool // the host that the client has named
	UniqueID  bool // the ID of the flow
	Trace     bool // the trace that its set-up is in
	CRC       bool // a checksum of the header
}

// First reports whether the first datagram alone has a header.
func (f *Form) First() bool { return f.Version == V2UDP && f.Mode == First }

// UntilReply reports whether the server's first answer ends the headers.
func (f *Form) UntilReply() bool { return f.Version == V2UDP && f.Mode == UntilReply }

// Answer takes the header off a server's answer. By SPP's definition that
// begins with the same header as what the server gets, so that no client is
// given what is meant for another; then it is not ok. A server that knows
// nothing of that answers without.
func (f *Form) Answer(p, head []byte) (rest []byte, ok bool) {
	switch {
	case f.Version != SPP:
	case bytes.HasPrefix(p, head):
		return p[len(head):], true
	case isSPP(p):
		return nil, false
	}
	return p, true
}
