package filter

import (
	"strings"
	"testing"

	"github.com/wayhouse-proxy/wayhouse/modules/flow"
)

func TestSourceLimit(t *testing.T) {
	stats := flow.ListenerOf(t.Name())
	c := mustChain(t, `[{"filter": "source_limit", "max_per_ip": 2, "max_per_net": 9}, {"filter": "source_limit", "max_per_ip": 5, "max_per_net": 3}]`)
	if perIP, perNet := c.Caps(); perIP != 2 || perNet != 3 {
		t.Errorf("the caps are %d and %d, want the smallest ones", perIP, perNet)
	}
	open := func(client string) {
		stats.Open(true, from(t, client).Source, flow.Bounds{})
		t.Cleanup(func() { stats.Abandoned(true, from(t, client).Source) })
	}
	want := func(client, rule string) {
		t.Helper()
		if got := c.Check(from(t, client)); got != rule {
			t.Errorf("%s: %q, want %q", client, got, rule)
		}
	}
	open("192.0.2.1")
	want("192.0.2.1", "")
	open("::ffff:192.0.2.1")
	for _, form := range []string{"192.0.2.1", "::ffff:192.0.2.1", "::192.0.2.1", "::ffff:192.0.2.1%eth0"} {
		want(form, RuleConnIP)
	}
	want("192.0.2.2", "")
	open("192.0.2.2")
	want("192.0.2.3", RuleConnNet)
	want("192.0.3.1", "")
}

func TestSourceLimitMistakes(t *testing.T) {
	for options, want := range map[string]string{
		`"max_per_ip": null`:                `neither max_per_ip nor max_per_net is given`,
		`"max_per_ip": 0`:                   `max_per_ip: 0 would let nobody in`,
		`"max_per_ip": 1, "max_per_net": 0`: `max_per_net: 0 would let nobody in`,
		`"per_ip": 1`:                       `per_ip: unknown key`,
	} {
		if _, err := chain(t, `[{"filter": "source_limit", `+options+`}]`); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", options, err, want)
		}
	}
}
