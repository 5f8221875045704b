package recipes

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strings"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func source(s *site) {
	const game1, game2, cache = "10.0.0.11:27015", "10.0.0.12:27015", "10.0.0.31:27015"
	info := s.packet("a2s-info-real")
	// A game server answers the probe with a challenge.
	s.serve("udp", func(b []byte) []byte {
		if bytes.Equal(b, info) {
			return []byte("\xff\xff\xff\xffA1234")
		}
		return nil
	}, game1, game2)
	s.udp(cache)
	s.tcp(game1)
	s.start()
	for _, id := range []string{"a2s-info-real", "a2s-info-challenge", "a2s-player", "a2s-rules", "a2s-getchallenge"} {
		s.goes(id, "udp", "203.0.113.7", ":27015", cache, s.packet(id))
	}
	first := s.join("udp", "203.0.113.7", ":27015", s.packet("srccon-challenge"))
	if first.server != game1 && first.server != game2 {
		s.Errorf("a player is at %q", first.server)
	}
	s.goes("the same player again", "udp", "203.0.113.7", ":27015", first.server, s.packet("srccon-goldsrc-connect"))
	kit.Eventually(s.T, "the probe is answered", func() bool {
		return s.proc.Metric("healthcheck_total", "pool", "game", "backend", game1, "result", "ok") > 0 &&
			s.proc.Metric("healthcheck_total", "pool", "game", "backend", game2, "result", "ok") > 0
	})
	s.goes("rcon from the office", "tcp", "192.0.2.5", ":27015", game1, []byte("rcon"))
	s.blocked("rcon from elsewhere", "tcp", "rcon", "acl", "203.0.113.7", ":27015", []byte("rcon"))
	s.prints(s.command("wayhouse explain"), cache)
}

func fivem(s *site) {
	const one, two = "10.0.0.11:30120", "10.0.0.12:30120"
	s.web(one, two)
	s.udp(one, two)
	s.start()
	at := make(map[string]int)
	for i := range 8 {
		from := fmt.Sprintf("203.0.113.%d", 10+i)
		tcp := s.join("tcp", from, ":30120", []byte("GET /whoami HTTP/1.0\r\n\r\n"))
		udp := s.join("udp", from, ":30120", s.packet("q3-getinfo"))
		if tcp.server != udp.server || tcp.server == "" {
			s.Errorf("%s has HTTP at %q and the game at %q", from, tcp.server, udp.server)
		}
		at[tcp.server]++
	}
	if len(at) != 2 {
		s.Errorf("eight players are at %v", at)
	}
	s.at("tcp", one).stop() // its HTTP is gone, its UDP is not
	kit.Settles(s.T, "unhealthy servers", 1, func() float64 {
		return s.proc.Metric("pool_backends", "pool", "city", "state", "unhealthy")
	})
	for i := range 8 {
		s.goes("a player after that", "udp", fmt.Sprintf("203.0.113.%d", 40+i), ":30120", two, s.packet("q3-getinfo"))
	}
	s.prints(s.command("wayhouse show sessions"), two)
	if out, err := s.try(s.page.command(s.T, "wayhouse drain")); err == nil {
		s.Errorf("no flow is left: %s", out)
	}
	if status, _ := s.proc.Get("/readyz"); status != 503 {
		s.Errorf("readyz says %d", status)
	}
}

func bedrock(s *site) {
	const one, two = "10.0.0.11:19132", "10.0.0.12:19132"
	probe, err := hex.DecodeString("01000000000000000000ffff00fefefefefdfdfdfd123456780000000000000000")
	if err != nil {
		s.Fatal(err)
	}
	pong := append([]byte{0x1c}, probe[1:]...)
	s.serve("udp", func(b []byte) []byte {
		if bytes.Equal(b, probe) {
			return pong
		}
		return nil
	}, one, two)
	s.start()
	at := make(map[string]string)
	for i := range 8 {
		from := fmt.Sprintf("203.0.113.%d", 10+i)
		ping := s.join("udp", from, ":19132", s.packet("rak-ping"))
		s.goes("a player who has pinged", "udp", from, ":19132", ping.server, s.packet("rak-ocr1-real"), s.packet("rak-ocr2-v4"))
		at[ping.server] = from
	}
	if len(at) != 2 {
		s.Errorf("eight players are at %v", at)
	}
	for _, id := range []string{"rak-neg-random", "rak-neg-frameset", "rak-neg-magic-flip"} {
		s.dropped(id, "bedrock", "first_packet_gate", "203.0.113.66", ":19132", s.packet(id))
	}
	kit.Eventually(s.T, "the probe is answered", func() bool {
		return s.proc.Metric("healthcheck_total", "pool", "bedrock", "backend", one, "result", "ok") > 0
	})
	s.prints(s.command("wayhouse explain"), "bedrock")
	s.at("udp", one).stop()
	kit.Settles(s.T, "unhealthy servers", 1, func() float64 {
		return s.proc.Metric("pool_backends", "pool", "bedrock", "state", "unhealthy")
	})
	s.goes("its player later", "udp", at[one], ":19132", two, s.packet("rak-ping-open"))
}

func worlds(s *site) {
	const factory, moved, world, copied = "10.0.0.11:34197", "10.0.0.14:34197", "10.0.0.12:7777", "10.0.0.13:7777"
	s.udp(factory, moved)
	s.tcp(world)
	s.start()
	hello := func(release string) []byte {
		b := append([]byte{0, 0, 1, byte(len(release))}, release...)
		binary.LittleEndian.PutUint16(b, uint16(len(b)))
		return b
	}
	// The bytes of the page are those of a client.
	escaped := s.page.command(s.T, "printf")
	escaped = escaped[strings.Index(escaped, "'") : strings.LastIndex(escaped, "'")+1]
	if got := s.shell("printf " + escaped); got != string(hello("Terraria279")) {
		s.Errorf("the page prints %q, a client sends %q", got, hello("Terraria279"))
	}
	s.goes("a player", "tcp", "203.0.113.7", ":7777", world, hello("Terraria279"))
	s.goes("a player in two pieces", "tcp", "203.0.113.7", ":7777", world, hello("Terraria194")[:5], hello("Terraria194")[5:])
	s.goes("a scanner", "tcp", "203.0.113.9", ":7777", "", s.packet("mc-neg-http"))
	s.at("tcp", world).stop()
	s.tcp(copied)
	s.goes("a player after the move", "tcp", "203.0.113.7", ":7777", copied, hello("Terraria279"))

	s.goes("a player", "udp", "203.0.113.7", ":34197", factory, []byte{2, 1, 0, 0})
	s.command("wayhouse add backend factory")
	s.command("wayhouse del backend factory")
	s.goes("a player after the move", "udp", "203.0.113.8", ":34197", moved, []byte{2, 1, 0, 0})
	s.prints(s.command("wayhouse overlay promote"), moved)
}

// shards are two hosts that three ports lead to.
func shards(s *site) {
	hosts := []string{"10.0.0.11", "10.0.0.12"}
	for _, h := range hosts {
		s.udp(h+":7777", h+":9987")
		s.tcp(h + ":30033")
	}
	s.start()
	seen := make(map[string]bool)
	for i := range 8 {
		from := fmt.Sprintf("203.0.113.%d", 10+i)
		host, port, _ := strings.Cut(s.join("udp", from, ":7777", []byte("move")).server, ":")
		if port != "7777" {
			s.Errorf("a game is on port %q", port)
		}
		s.goes("voice of "+host, "udp", from, ":9987", host+":9987", s.packet("ts3-init0-real"))
		s.goes("files of "+host, "tcp", from, ":30033", host+":30033", []byte("file"))
		seen[host] = true
	}
	if len(seen) != len(hosts) {
		s.Errorf("eight players are at %v", seen)
	}
}

// follow is voice that goes where the game is.
func follow(s *site) {
	for _, h := range []string{"10.0.0.11", "10.0.0.12"} {
		s.tcp(h + ":25565")
		s.udp(h + ":24454")
	}
	s.start()
	for i := range 6 {
		from := fmt.Sprintf("203.0.113.%d", 10+i)
		host, _, _ := strings.Cut(s.join("tcp", from, ":25565", s.packet("mc-1.19.2-login")).server, ":")
		for range 2 { // a balancer would take turns
			s.goes("voice of "+host, "udp", from, ":24454", host+":24454", []byte("talk"))
		}
	}
	s.prints(s.shell(strings.Replace(s.page.command(s.T, "wayhouse show sessions"), "203.0.113.7", "203.0.113.11", 1)), ":24454")
}
