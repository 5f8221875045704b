package listener

import (
	"net/netip"

	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/udprelay"
	"github.com/wayhouse-proxy/wayhouse/modules/filter"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	"github.com/wayhouse-proxy/wayhouse/modules/overload"
)

// Who gets in. Nothing has been kept of a flow that is asked about here, and it
// runs on the engines' workers: it allocates nothing and waits for nobody.
//
//	the process ends, overload → filters → first-packet gate → limits and caps,
//	which count the flow in
//
// Of the first two whoever comes back is spared, for a hiccup of the network is no
// reason to lose a player.
//
// Whoever is refused hears nothing; operators find the rule in the counters and,
// sampled, in the log.

// Rules beside those of filters.
const (
	ruleDraining   = "draining" // the process is ending
	ruleMaxConn    = "max_conn"
	ruleMaxUDP     = "max_udp"
	ruleMaxNewRate = "max_new_rate"
	ruleGate       = "first_packet_gate"
	ruleHeader     = "proxy_header" // missing, wrong, or of somebody who is not trusted
	rulePanic      = "panic"        // of a filter or what the gate asks; counted as a panic alone
)

// admit says which rule keeps a new flow out. One that no rule keeps out, for
// which it returns "", is counted in by then; later is a rule that has yet to see
// more of it, in a goroutine: see gate.go. first is the first datagram of a
// session. A flow that was held while its client was not known is not held any
// more, whatever the answer.
func (v *view) admit(client, local netip.AddrPort, udp bool, first []byte, held bool) (rule, later string) {
	counted := false
	defer func() {
		if held && !counted {
			v.stats.Release(udp)
		}
	}()
	defer v.contain(client, func() { rule, later = rulePanic, "" })
	f := filter.Flow{Source: cidr.Plain(client.Addr()), Client: client, Local: local, UDP: udp, Stats: v.stats}
	gate := v.gated(udp)
	level, ending := overload.Level(), v.refusing.Load()
	switch {
	case level == 0 && !ending, flow.Returning(f.Source):
	case ending:
		rule = ruleDraining
	case level == 1:
		gate = overload.Rule
	default:
		rule = overload.Rule
	}
	if rule == "" {
		rule = v.filters.Check(f)
	}
	if rule == "" && gate != "" {
		var look bool
		if rule, look = v.gate(client, udp, first, gate); look {
			later = gate
		}
	}
	if rule == "" {
		counted = true
		rule = v.countIn(f, held)
	}
	if rule == "" {
		return "", later
	}
	if v.shield != nil {
		v.shield.Refused(f.Source, rule)
	}
	v.refuse(rule, client, local, udp)
	return rule, ""
}

// begins notes that a session of a client that was admitted is about to be.
func (v *view) begins(client netip.AddrPort) {
	if v.shield != nil {
		v.shield.Admitted(client)
	}
}

// gated is the rule by which sessions are kept out that are not recognised, "" for
// none.
func (v *view) gated(udp bool) string {
	if v.firstPacketGate && udp {
		return ruleGate
	}
	return ""
}

// refuse counts a flow that a rule keeps out, and logs one out of many.
func (v *view) refuse(rule string, client, local netip.AddrPort, udp bool) {
	switch {
	case rule == ruleDraining && !udp:
		v.stats.Draining.Inc()
	case rule == ruleDraining, rule == ruleGate: // which are reasons of dropped datagrams
	default:
		v.stats.Rule(rule).Count()
	}
	v.tell(rule, client, local, udp)
}

// tell logs one out of many flows that a rule keeps out.
func (v *view) tell(rule string, client, local netip.AddrPort, udp bool) {
	if held, ok := v.stats.Rule(rule).Tell(); ok && !v.stats.LogRefused(rule, client, local, udp, held) {
		v.logger.Info("refused", zap.String("proto", network(udp)), zap.Stringer("remote", client), zap.Stringer("local", local),
			zap.String("rule", rule), zap.Int64("suppressed", held))
	}
}

// drop refuses a datagram that no filter or limit has kept out, and tells of one
// out of many.
func (v *view) drop(o *udprelay.Opening, why relay.Drop) udprelay.Decision {
	v.tell(why.String(), o.Client, o.Local, true)
	o.Reason = why
	return udprelay.Refuse
}

// countIn counts a flow in, or says which limit or cap is in its way.
func (v *view) countIn(f filter.Flow, held bool) (rule string) {
	b := flow.Bounds{Process: v.limits.max(f.UDP), Held: held}
	b.PerIP, b.PerNet = v.filters.Caps()
	switch v.stats.Open(f.UDP, f.Source, b) {
	case flow.FullProcess:
		if f.UDP {
			return ruleMaxUDP
		}
		return ruleMaxConn
	case flow.FullIP:
		return filter.RuleConnIP
	case flow.FullNet:
		return filter.RuleConnNet
	}
	if most := v.limits.MaxNewSessionsPerSec; most != nil && !newSessions.Take(*most, *most) {
		v.stats.Abandoned(f.UDP, f.Source)
		return ruleMaxNewRate
	}
	return ""
}

// dropOf is what the datagram of a session that a rule keeps out is counted
// under.
func dropOf(rule string) relay.Drop {
	switch rule {
	case ruleDraining:
		return relay.Draining
	case ruleGate:
		return relay.FirstPacketGate
	}
	return relay.Filtered // and under the rule
}
