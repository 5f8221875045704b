package listener

import (
	"net/netip"

	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/modules/filter"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
)

// Who gets in. Nothing has been kept of a flow that is asked about here, and it
// runs on the engines' workers: it allocates nothing and waits for nobody.
//
//	the process ends → filters → limits and caps, which count the flow in
//
// Whoever is refused hears nothing; operators find the rule in the counters and,
// sampled, in the log.

// Rules beside those of filters.
const (
	ruleDraining   = "draining" // the process is ending
	ruleMaxConn    = "max_conn"
	ruleMaxUDP     = "max_udp"
	ruleMaxNewRate = "max_new_rate"
)

// admit says which rule keeps a new flow out. One that no rule keeps out, for
// which it returns "", is counted in by then.
func (v *view) admit(client, local netip.AddrPort, udp bool) (rule string) {
	f := filter.Flow{Source: cidr.Plain(client.Addr()), Client: client, Local: local, UDP: udp, Stats: v.stats}
	switch {
	case v.refusing.Load():
		rule = ruleDraining
	default:
		if rule = v.filters.Check(f); rule == "" {
			rule = v.countIn(f)
		}
	}
	switch {
	case v.shield == nil:
	case rule != "":
		v.shield.Refused(f.Source, rule)
	case udp:
		v.shield.Admitted(client)
	}
	if rule == "" {
		return ""
	}
	v.refuse(rule, client, local, udp)
	return rule
}

// refuse counts a flow that a rule keeps out, and logs one out of many.
func (v *view) refuse(rule string, client, local netip.AddrPort, udp bool) {
	r := v.stats.Rule(rule)
	if rule != ruleDraining {
		r.Count()
	}
	if held, ok := r.Tell(); ok {
		v.logger.Info("refused", zap.String("proto", network(udp)), zap.Stringer("remote", client), zap.Stringer("local", local),
			zap.String("rule", rule), zap.Int64("suppressed", held))
	}
}

// countIn counts a flow in, or says which limit or cap is in its way.
func (v *view) countIn(f filter.Flow) (rule string) {
	b := flow.Bounds{Process: v.limits.max(f.UDP)}
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
	if rule == ruleDraining {
		return relay.Draining
	}
	return relay.Filtered // and under the rule
}
