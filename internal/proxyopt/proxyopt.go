// Package proxyopt has the options proxy_protocol that a pool and a resolver
// share.
package proxyopt

import (
	"fmt"
	"slices"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
)

// Options say what headers backends get.
type Options struct {
	// The header by which backends learn who the client is: v1 or v2 in front of
	// a TCP connection, v2-udp or spp, which is Cloudflare's, in front of
	// datagrams, or none. Backends must expect it, and should take it from this
	// host alone. Refused for a version that does not fit the listeners.
	// Default: none.
	ProxyProtocol string `json:"proxy_protocol,omitempty"`

	// Which datagrams of a session have the header of v2-udp: first, until_reply,
	// each one until the backend has answered, or every. spp is on every one.
	// Default: until_reply.
	ProxyProtocolUDP string `json:"proxy_protocol_udp,omitempty"`

	// What else is in a header of v2 and v2-udp: authority, the host that the
	// client has named, where a matcher has looked for one; unique_id, the ID that
	// the flow has in GET /sessions; traceparent, the span of its set-up while the
	// app is tracing, in the field 0xE7; crc32c, a checksum. Default: none.
	ProxyProtocolTLVs []string `json:"proxy_protocol_tlvs,omitempty"`
}

var fields = []string{"authority", "unique_id", "traceparent", "crc32c"}

// ProxyForm is what the options say. Errors begin with the key.
func (o *Options) ProxyForm() (f proxyproto.Form, err error) {
	var ok bool
	if o.ProxyProtocol != "" {
		if f.Version, ok = proxyproto.ParseVersion(o.ProxyProtocol); !ok {
			return f, fmt.Errorf("proxy_protocol: %q is none of none, v1, v2, v2-udp, spp", o.ProxyProtocol)
		}
	}
	if o.ProxyProtocolUDP != "" {
		if f.Mode, ok = proxyproto.ParseMode(o.ProxyProtocolUDP); !ok {
			return f, fmt.Errorf("proxy_protocol_udp: %q is none of first, until_reply, every", o.ProxyProtocolUDP)
		}
		switch {
		case f.Version == proxyproto.SPP && f.Mode != proxyproto.Every:
			return f, fmt.Errorf("proxy_protocol_udp: %s, but spp stands in front of every datagram by its definition: leave it out", f.Mode)
		case !f.Version.UDP():
			return f, fmt.Errorf("proxy_protocol_udp: proxy_protocol is %s, which is not for datagrams: leave it out, or choose v2-udp", f.Version)
		}
	}
	for i, s := range o.ProxyProtocolTLVs {
		switch {
		case !slices.Contains(fields, s):
			return f, fmt.Errorf("proxy_protocol_tlvs[%d]: %q is none of authority, unique_id, traceparent, crc32c", i, s)
		case slices.Contains(o.ProxyProtocolTLVs[:i], s):
			return f, fmt.Errorf("proxy_protocol_tlvs[%d]: %s is listed twice", i, s)
		}
		f.Authority = f.Authority || s == "authority"
		f.UniqueID = f.UniqueID || s == "unique_id"
		f.Trace = f.Trace || s == "traceparent"
		f.CRC = f.CRC || s == "crc32c"
	}
	if len(o.ProxyProtocolTLVs) > 0 && f.Version != proxyproto.V2 && f.Version != proxyproto.V2UDP {
		return f, fmt.Errorf("proxy_protocol_tlvs: proxy_protocol is %s, which has none: leave them out, or choose v2 or v2-udp", f.Version)
	}
	return f, nil
}

// ProxyOptions are the options as a Caddyfile has them. Syntax:
//
//	proxy_protocol      none|v1|v2|v2-udp|spp [first|until_reply|every]
//	proxy_protocol_tlvs [authority] [unique_id] [traceparent] [crc32c]
func (o *Options) ProxyOptions() caddyopt.Options {
	version := caddyopt.Enum(&o.ProxyProtocol, "none", "v1", "v2", "v2-udp", "spp")
	mode := caddyopt.Enum(&o.ProxyProtocolUDP, "first", "until_reply", "every")
	return caddyopt.Options{
		"proxy_protocol": caddyopt.Func(func(d *caddyfile.Dispenser) error {
			if err := version.Read(d); err != nil || d.CountRemainingArgs() == 0 {
				return err
			}
			return mode.Read(d)
		}),
		"proxy_protocol_tlvs": caddyopt.Strings(&o.ProxyProtocolTLVs),
	}
}

// Fits says what is wrong when flows of one kind go where headers of the form
// are expected.
func Fits(f proxyproto.Form, udp bool) error {
	switch {
	case f.Version == proxyproto.None || f.Version.UDP() == udp:
		return nil
	case f.Version == proxyproto.V2:
		return fmt.Errorf("proxy_protocol: v2 is for TCP, and UDP sessions come too: choose v2-udp, or give them a pool of their own")
	case udp:
		return fmt.Errorf("proxy_protocol: %s is for TCP, and UDP sessions come too: give them a pool of their own", f.Version)
	}
	return fmt.Errorf("proxy_protocol: %s is for UDP, and TCP connections come too: give them a pool of their own with v1 or v2", f.Version)
}
