package flow

import (
	"net/netip"
	"time"

	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// event is what a record of the session log tells.
type event uint8

const (
	sessionOpen event = iota
	sessionProgress
	sessionClose
	refused
	numEvents
)

var events = [numEvents]string{"session_open", "session_progress", "session_close", "refused"}

// messages stand in front of the fields.
var messages = [numEvents]string{"session opened", "session goes on", "session closed", "refused"}

// record is one line to be.
type record struct {
	at       time.Time
	event    event
	why      relay.Reason // of session_close
	listener string
	info     relay.Info

	rule       string // of refused
	suppressed int64
}

// The sides that may end a session.
const (
	sideClient  = "client"
	sideBackend = "backend"
	sideProxy   = "proxy"
)

// side is who has ended the session.
func (r *record) side() string {
	switch r.why {
	case relay.ClientClose:
		return sideClient
	case relay.BackendClose, relay.BackendDown:
		return sideBackend
	case relay.Error:
		if r.info.Tries > 0 && r.info.Failure != relay.Shortage {
			return sideBackend
		}
	}
	return sideProxy
}

// noPath is of flows that have come to none.
var noPath = &relay.Path{Route: -1}

// appendTo appends the fields of the record. Nothing of what a client has sent
// is among them.
func (r *record) appendTo(f []zap.Field) []zap.Field {
	i, p := &r.info, r.info.Path
	if p == nil {
		p = noPath
	}
	udp := i.ID.UDP()
	f = append(f, zap.String("event", events[r.event]), zap.String("listener", r.listener), zap.String("protocol", protocol(udp)),
		zap.String("src", text(i.Client)), zap.String("local", text(i.Local)))
	if r.event == refused {
		return append(f, zap.String("rule", r.rule), zap.Int64("suppressed", r.suppressed))
	}
	var route *int // null while it is being decided, as in GET /sessions
	if p.Route >= 0 {
		route = &p.Route
	}
	f = append(f, zap.String("session", i.ID.String()), zap.Intp("route", route), zap.String("resolver", p.Resolver),
		zap.String("pool", p.Pool), zap.String("backend", text(p.Backend)))
	if i.Upstream.IsValid() {
		f = append(f, zap.String("upstream", text(i.Upstream)))
	}
	if i.UpstreamLocal.IsValid() {
		f = append(f, zap.String("upstream_local", text(i.UpstreamLocal)))
	}
	f = append(f, zap.String("proxy_protocol", p.Proxy.Version.String()), zap.Int64("setup_ms", i.Setup.Milliseconds()))
	if r.event == sessionOpen {
		return f
	}
	f = append(f, zap.Int64("duration_ms", i.Age.Milliseconds()), zap.Uint64("bytes_c2s", i.BytesC2S), zap.Uint64("bytes_s2c", i.BytesS2C))
	if udp {
		f = append(f, zap.Uint64("pkts_c2s", i.PacketsC2S), zap.Uint64("pkts_s2c", i.PacketsS2C))
	}
	if r.event == sessionProgress {
		return append(f, zap.Int64("idle_ms", i.Idle.Milliseconds()))
	}
	f = append(f, zap.String("close_reason", r.why.String()), zap.String("phase", i.Phase.String()), zap.String("side", r.side()))
	if i.Tries > 0 {
		f = append(f, zap.Int("tries", i.Tries), zap.String("failure", i.Failure.String()))
	}
	return f
}

func protocol(udp bool) string {
	if udp {
		return "udp"
	}
	return "tcp"
}

// text is an address, "" for none.
func text(a netip.AddrPort) string {
	if !a.IsValid() {
		return ""
	}
	return a.String()
}
