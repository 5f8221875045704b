package offload

import (
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// TestFloodOfSessions has very many sources that do not exist begin sessions,
// with no filter and no help of the kernel, beside players: there are never more
// than the limit, players lose at most one message of a hundred meanwhile, and
// none when it has ended.
func TestFloodOfSessions(t *testing.T) {
	s := newSite(t)
	players, most := kit.Scaled(50, 500), kit.Scaled(1000, 5000)
	config := s.config(nil)
	config["apps"].(kit.M)["wayhouse"].(kit.M)["limits"] = kit.M{"max_udp_sessions": most}
	p := s.start(t, config)
	patience, each := kit.Scaled(2, 5), 10 // seconds, and messages a second of each player
	load := kit.StartLoad(t, kit.LoadOptions{UDP: at(proxy4).String(), Flows: players, Rate: each * players, Patience: time.Duration(patience) * time.Second})
	load.Round(t)
	p.Collect()
	before := p.RSS()

	f := newFlood(t, kit.Scaled(1<<14, 1<<20), kit.Scaled(4000, 30_000))
	sessions, highest := 0.0, 0.0
	goal := int64(kit.Scaled(20_000, 900_000))
	kit.Eventually(t, "the flood has been sent", func() bool {
		sessions = p.Metric("active_udp_sessions")
		highest = max(highest, sessions)
		return f.sent.Load() >= goal
	})
	f.end()
	grown := p.RSS() - before
	if highest > float64(most) || sessions < float64(most) {
		t.Errorf("there were up to %v sessions and in the end %v, want %d", highest, sessions, most)
	}
	refused := p.Metric("filter_blocked_total", "listener", "u", "filter", "max_udp")
	load.Go(t, (patience+1)*each*players) // takes long enough for all that is lost so far to be known
	during := load.Report()
	load.Go(t, (patience+1)*each*players)
	after := load.Stop()
	t.Logf("%d datagrams of %d sources, %v refused; players lost %d of %d; RSS has grown by %d KiB", f.sent.Load(), f.sources, refused, during.Lost, during.Sent, grown>>10)
	if during.Lost*100 > during.Sent {
		t.Errorf("players, while it lasted: %v", &during)
	}
	if after.Lost > during.Lost || after.Duplicated+after.Damaged+after.Reset+after.Resourced+after.Moved+after.Failed > 0 {
		t.Errorf("players, after it: %v", &after)
	}
	if refused < float64(goal)/2 {
		t.Errorf("%v of %d sessions too many are counted as refused", refused, f.sent.Load())
	}
	if grown > 150<<20 {
		t.Errorf("the process has grown by %d MiB", grown>>20)
	}
}
