package listener

import (
	"fmt"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
	"github.com/wayhouse-proxy/wayhouse/modules/filter"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	"github.com/wayhouse-proxy/wayhouse/modules/overload"
)

// admission tells what admit would say before it counts a flow in, and reports
// whether the flow would get that far.
func (t *trace) admission() bool {
	f := filter.Flow{Source: cidr.Plain(t.q.Client.Addr()), Client: t.q.Client, Local: t.q.Local, UDP: t.q.UDP, Stats: t.v.stats}
	gate := t.v.gated(t.q.UDP)
	returning := flow.Returning(f.Source)
	if t.v.refusing.Load() && !returning {
		t.end(Outcome{What: EndRefused, Reason: "the process is stopping, and the client is a stranger"})
		return false
	}
	if level := overload.Level(); level > 0 {
		reason := fmt.Sprintf("level %d, and the client is a stranger", level)
		if returning {
			reason = fmt.Sprintf("level %d, and the client comes back", level)
		} else if level == 1 {
			gate = overload.Rule
		}
		if !t.limit("overload", level == 1 || returning, reason) {
			return false
		}
	}
	pass := true
	t.v.filters.Explain(f, func(a filter.Answer) bool {
		s := Step{Kind: "filter", Name: a.Filter, Verdict: "passes", Reason: a.Reason}
		switch {
		case !a.Asked:
			s.Verdict = "not asked"
		case a.Rule != "":
			s.Verdict, pass = "refused", false
			t.end(Outcome{What: EndFilter, Reason: a.Rule + ": " + a.Reason})
		}
		t.add(s)
		return pass
	})
	if !pass || gate == "" {
		return pass
	}
	var first []byte
	for i, p := range t.q.Pieces {
		if i == 0 || !t.q.UDP {
			first = append(first, p...)
		}
	}
	known, _ := t.v.recognised(first, t.q.Client.Addr(), t.q.UDP, t.q.Final, true)
	return t.limit(gate, known, map[bool]string{true: "the first bytes are recognised", false: "the first bytes are not recognised"}[known])
}
