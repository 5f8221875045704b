package recipes

import kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"

func minecraft(s *site) {
	const survival, lobby1, lobby2, status = "10.0.0.11:25565", "10.0.0.21:25565", "10.0.0.22:25565", "10.0.0.31:25565"
	s.tcp(survival, lobby1, lobby2, status)
	s.start()
	login := s.packet("mc-1.19.2-login") // to hub.example.org
	s.tells(s.goes("a login by name", "tcp", "203.0.113.7", ":25565", survival, s.packet("mc-upper-case")))
	s.tells(s.goes("a ping by name", "tcp", "203.0.113.7", ":25565", survival, s.packet("mc-1.12.2-status")))
	s.tells(s.goes("another ping", "tcp", "203.0.113.7", ":25565", status, s.packet("mc-1.20.4-status")))
	s.goes("an old ping", "tcp", "203.0.113.7", ":25565", status, s.packet("mc-legacy-1.6"))
	s.goes("a scanner", "tcp", "203.0.113.9", ":25565", "", s.packet("mc-neg-http"))
	s.counts(1, "listener_connections_total", "listener", "players", "result", "reject")
	a := s.join("tcp", "203.0.113.7", ":25565", login)
	b := s.join("tcp", "203.0.113.8", ":25565", login)
	if a.server == b.server || a.server != lobby1 && a.server != lobby2 {
		s.Errorf("two players are in the lobbies %q and %q", a.server, b.server)
	}
	s.tells(a)

	s.command("wayhouse set backend lobby 10.0.0.21:25565 draining")
	for range 4 {
		s.goes("a login while one drains", "tcp", "203.0.113.10", ":25565", lobby2, login)
	}
	for _, p := range []*player{a, b} {
		if _, err := p.Write([]byte{1}); err != nil {
			s.Errorf("a player of %s was cut off: %v", p.server, err)
		} else if _, err := p.Read(make([]byte, 1)); err != nil {
			s.Errorf("a player of %s was cut off: %v", p.server, err)
		}
	}
	s.command("wayhouse set backend lobby 10.0.0.21:25565 enabled")
	s.goes("a login afterwards", "tcp", "203.0.113.10", ":25565", lobby1, login)
	s.prints(s.command("wayhouse explain"), "survival")

	// More than 20 at once of one address are a flood.
	flood := func() float64 {
		return s.proc.Metric("filter_blocked_total", "listener", "players", "filter", "rate_ip")
	}
	kit.Eventually(s.T, "a flood is turned away", func() bool {
		s.dial("tcp", "203.0.113.66", ":25565").Close()
		return flood() > 0
	})
}
