package recipes

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os/exec"
	"regexp"
	"strings"
	"sync/atomic"

	"github.com/maxmind/mmdbwriter"
	"github.com/maxmind/mmdbwriter/mmdbtype"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func regions(s *site) {
	const near1, near2, far, staging = "10.1.0.11:7777", "10.1.0.12:7777", "10.2.0.11:7777", "10.9.0.11:7777"
	s.tcp(near1, near2, far, staging)
	europe := s.page.file(s.T, "- addr")
	s.file("etc/wayhouse/europe.yaml", europe)
	s.file("etc/wayhouse/america.yaml", "- 10.2.0.11:7777\n- {addr: 10.1.0.11:7777, priority: 1}\n- {addr: 10.1.0.12:7777, priority: 1}\n")
	s.start()
	hello := []byte("hello")
	s.goes("a tester", "tcp", "192.0.2.7", ":7777", staging, hello)
	s.goes("a player of America", "tcp", "203.0.113.200", ":7777", far, hello)
	a, b := s.join("tcp", "203.0.113.7", ":7777", hello), s.join("tcp", "203.0.113.8", ":7777", hello)
	if got := a.server + " " + b.server; got != near1+" "+near2 && got != near2+" "+near1 {
		s.Errorf("two players of Europe are at %s", got)
	}
	for range 4 {
		if p := s.join("tcp", "203.0.113.9", ":7777", hello); p.server != near1 && p.server != near2 {
			s.Errorf("a player of Europe is at %q", p.server)
		}
	}
	s.prints(s.command("wayhouse explain"), far)
	s.at("tcp", near1).stop()
	s.at("tcp", near2).stop()
	kit.Settles(s.T, "servers down in Europe", 2, func() float64 {
		return s.proc.Metric("pool_backends", "pool", "europe", "state", "unhealthy")
	})
	s.goes("a player of Europe, where all is down", "tcp", "203.0.113.7", ":7777", far, hello)
}

func countries(s *site) {
	const europe = "10.1.0.11:7777"
	s.tcp(europe)
	db, err := mmdbwriter.New(mmdbwriter.Options{DatabaseType: "Test", IncludeReservedNetworks: true})
	if err != nil {
		s.Fatal(err)
	}
	for prefix, country := range map[string]string{"192.0.2.0/24": "AT", "203.0.113.0/24": "US"} {
		_, n, _ := net.ParseCIDR(prefix)
		if err := db.Insert(n, mmdbtype.Map{"country": mmdbtype.Map{"iso_code": mmdbtype.String(country)}}); err != nil {
			s.Fatal(err)
		}
	}
	var b bytes.Buffer
	if _, err := db.WriteTo(&b); err != nil {
		s.Fatal(err)
	}
	s.file("etc/wayhouse/countries.mmdb", b.String())
	s.start()
	s.goes("a player of Austria", "tcp", "192.0.2.7", ":7777", europe, []byte("hello"))
	s.blocked("a player of the States", "tcp", "game", "geo", "203.0.113.7", ":7777", []byte("hello"))
}

func blueGreen(s *site) {
	blue, green := []string{"10.0.0.11:7777", "10.0.0.12:7777"}, []string{"10.0.0.21:7777", "10.0.0.22:7777"}
	s.udp(blue...)
	s.udp(green...)
	s.start()
	var playing []*player
	for i := range 8 {
		p := s.join("udp", fmt.Sprintf("203.0.113.%d", 10+i), ":7777", []byte("move"))
		if p.server != blue[0] && p.server != blue[1] {
			s.Errorf("a player is at %q", p.server)
		}
		playing = append(playing, p)
	}
	for _, addr := range green {
		s.command("wayhouse add backend arena " + addr)
	}
	for _, addr := range blue {
		s.command("wayhouse set backend arena " + addr)
	}
	s.prints(s.command("wayhouse show pools"), "draining")
	seen := make(map[string]bool)
	for i := range 16 {
		p := s.join("udp", fmt.Sprintf("203.0.113.%d", 40+i), ":7777", []byte("move"))
		if p.server != green[0] && p.server != green[1] {
			s.Errorf("a new player is at %q", p.server)
		}
		seen[p.server] = true
	}
	if len(seen) != 2 {
		s.Errorf("new players are at %v", seen)
	}
	for _, p := range playing {
		s.stays(p)
	}
	for _, addr := range blue {
		s.command("wayhouse del backend arena " + addr)
	}
	for _, p := range playing {
		s.stays(p)
	}
	s.command("wayhouse overlay promote")
	promoted := s.shell("cat promoted.caddyfile")
	for _, addr := range green {
		s.prints(promoted, addr)
	}
	if strings.Contains(promoted, blue[0]) {
		s.Errorf("blue is still there:\n%s", promoted)
	}
	s.command("wayhouse overlay drop")
}

// stays wants a player to go on where they are.
func (s *site) stays(p *player) {
	s.Helper()
	b := make([]byte, 2048)
	if _, err := p.Write([]byte("on")); err != nil {
		s.Errorf("a player of %s cannot go on: %v", p.server, err)
		return
	}
	n, err := p.Read(b)
	if err != nil {
		s.Errorf("a player of %s cannot go on: %v", p.server, err)
	} else if now, _ := split(b[:n]); now != p.server {
		s.Errorf("a player of %s is at %s now", p.server, now)
	}
}

func canary(s *site) {
	const old, fresh = "10.0.0.11:7777", "10.0.0.21:7777"
	s.udp(old, fresh)
	s.start()
	at := make(map[string]int)
	for range 40 {
		at[s.join("udp", "203.0.113.7", ":7777", []byte("move")).server]++
	}
	if at[old] != 36 || at[fresh] != 4 {
		s.Errorf("of 40 players %v", at)
	}
}

func scrubber(s *site) {
	const lobby, arena1, arena2, front = "10.0.0.21:25565", "10.0.0.31:7777", "10.0.0.32:7777", "192.0.2.5"
	s.tcp(lobby)
	s.udp(arena1, arena2)
	s.start()
	login := s.packet("mc-1.19.2-login")
	through := func(network, client string, packet []byte) []byte {
		dst := public + ":25565"
		if network == "udp" {
			dst = public + ":7777"
		}
		return append(header(network, client, dst), packet...)
	}
	told := func(p *player, want string) {
		s.Helper()
		if client, _ := p.told(); client.String() != want {
			s.Errorf("%s knows %v, want %s", p.server, client, want)
		}
	}
	for i := range 4 {
		client := fmt.Sprintf("203.0.113.7:%d", 50000+i)
		told(s.goes("a player", "tcp", front, ":25565", lobby, through("tcp", client, login)), client)
	}
	// They are four now, and more than that nobody may be.
	s.blocked("a fifth connection", "tcp", "lobby", "src_conn_ip", front, ":25565", through("tcp", "203.0.113.7:50009", login))
	told(s.goes("another player", "tcp", front, ":25565", lobby, through("tcp", "203.0.113.8:50000", login)), "203.0.113.8:50000")
	s.blocked("a player who is banned", "tcp", "lobby", "acl", front, ":25565", through("tcp", "203.0.113.70:50000", login))
	s.blocked("one past the scrubber", "tcp", "lobby", "proxy_header", "203.0.113.9", ":25565", login)
	s.blocked("one past the scrubber with a header", "tcp", "lobby", "proxy_header", "203.0.113.9", ":25565", through("tcp", "203.0.113.10:50000", login))

	at := make(map[string]bool)
	for i := range 8 {
		client := fmt.Sprintf("203.0.113.%d:50000", 10+i)
		p := s.join("udp", front, ":7777", through("udp", client, []byte("move")))
		told(p, client)
		at[p.server] = true
	}
	if len(at) != 2 {
		s.Errorf("eight players of one scrubber are at %v", at)
	}
	s.blocked("a player who is banned", "udp", "arena", "acl", front, ":7777", through("udp", "203.0.113.70:50000", []byte("move")))
	s.dropped("one past the scrubber", "arena", "proxy_header", "203.0.113.9", ":7777", []byte("move"))
	var explained []string
	for line := range strings.Lines(s.page.text) {
		if strings.HasPrefix(line, "    wayhouse explain") {
			explained = append(explained, s.bash(strings.TrimSpace(line)))
		}
	}
	if len(explained) != 2 || !strings.Contains(explained[0], "acl") || !strings.Contains(explained[1], "header") {
		s.Errorf("explained as %q", explained)
	}
}

func pods(s *site) {
	const one, two, three = "10.244.0.11:7777", "10.244.1.12:7777", "10.244.2.13:7777"
	s.udp(one, two, three)
	api := s.inCluster()
	put := func(ready map[string]bool) {
		endpoints := kit.A{}
		for _, addr := range []string{one, two, three} {
			if ok, there := ready[addr]; there {
				endpoints = append(endpoints, kit.M{"addresses": kit.A{strings.TrimSuffix(addr, ":7777")},
					"conditions": kit.M{"ready": ok, "serving": true, "terminating": !ok}})
			}
		}
		api.Put("/apis/discovery.k8s.io/v1/namespaces/games/endpointslices", "match-server-1", map[string]string{"kubernetes.io/service-name": "match-server"}, kit.M{
			"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "addressType": "IPv4", "endpoints": endpoints,
			"ports": kit.A{kit.M{"name": "query", "port": 27015, "protocol": "UDP"}, kit.M{"name": "game", "port": 7777, "protocol": "UDP"}}})
	}
	put(map[string]bool{one: true, two: true})
	s.start()
	s.counts(2, "pool_backends", "pool", "match", "state", "healthy")
	at := make(map[string]*player)
	for i := range 12 {
		p := s.join("udp", fmt.Sprintf("203.0.113.%d", 10+i), ":7777", []byte("move"))
		at[p.server] = p
	}
	if at[one] == nil || at[two] == nil || len(at) != 2 {
		s.Fatalf("twelve players are at %v", at)
	}
	put(map[string]bool{one: false, two: false, three: true}) // a rollout
	s.counts(1, "pool_backends", "pool", "match", "state", "healthy")
	s.goes("a player during a rollout", "udp", "203.0.113.99", ":7777", three, []byte("move"))
	s.stays(at[one])
	s.stays(at[two])
}

func gameServers(s *site) {
	api := s.inCluster()
	put := func(name, addr, state string) {
		ap := netip.MustParseAddrPort(addr)
		api.Put("/apis/agones.dev/v1/namespaces/games/gameservers", name, map[string]string{"agones.dev/fleet": "arena"}, kit.M{
			"apiVersion": "agones.dev/v1", "kind": "GameServer",
			"spec": kit.M{"ports": kit.A{kit.M{"name": "default", "portPolicy": "Dynamic", "containerPort": 7654, "hostPort": ap.Port(), "protocol": "UDP"}}},
			"status": kit.M{"state": state, "address": "198.51.100.77", "nodeName": "node-1", "ports": kit.A{kit.M{"name": "default", "port": ap.Port()}},
				"addresses": kit.A{kit.M{"type": "ExternalIP", "address": "198.51.100.77"}, kit.M{"type": "InternalIP", "address": ap.Addr().String()}}},
		})
	}
	const one, two, three = "10.240.0.1:7001", "10.240.0.2:7002", "10.240.0.3:7003"
	s.udp(one, two, three)
	put("arena-1", one, "Ready")
	put("arena-2", two, "Allocated")
	put("arena-3", three, "Shutdown")
	s.start()
	s.counts(2, "pool_backends", "pool", "arena", "state", "healthy")
	a, b := s.join("udp", "203.0.113.7", ":7777", []byte("move")), s.join("udp", "203.0.113.8", ":7777", []byte("move"))
	if got := a.server + " " + b.server; got != one+" "+two && got != two+" "+one {
		s.Errorf("two players are at %s", got)
	}
	put("arena-1", one, "Shutdown")
	s.counts(1, "pool_backends", "pool", "arena", "state", "healthy")
	put("arena-3", three, "Ready")
	s.counts(2, "pool_backends", "pool", "arena", "state", "healthy")
	s.goes("a player of a new server", "udp", "203.0.113.99", ":7777", three, []byte("move"))
	s.stays(a)
	s.stays(b)
}

func compose(s *site) {
	d := &dockerd{containers: make(map[string]container), events: make(map[chan string]bool)}
	s.handle("172.18.0.3:2375", d)
	hosts := s.shell("cat /etc/hosts")
	s.file("etc/hosts", hosts+"\n172.18.0.3 docker-reads\n")
	// The labels are those of the page.
	labels := map[string]string{"com.docker.compose.project": "demo"}
	for _, m := range regexp.MustCompile(`(?m)^      (wayhouse\.[a-z_]+): (.*)$`).FindAllStringSubmatch(s.page.file(s.T, "services:"), -1) {
		labels[m[1]] = m[2]
	}
	arena := func(n int, health string) *container {
		return &container{addr: fmt.Sprintf("172.18.0.%d", 10+n), labels: labels, health: health}
	}
	s.udp("172.18.0.11:7777", "172.18.0.12:7777", "172.18.0.13:7777")
	d.set("demo-arena-1", "start", arena(1, "healthy"))
	d.set("demo-arena-2", "start", arena(2, "healthy"))
	d.set("demo-arena-3", "start", arena(3, "starting"))
	d.set("demo-db-1", "start", &container{addr: "172.18.0.20", health: "none"})
	s.start()
	s.counts(2, "pool_backends", "pool", "arena", "state", "healthy")
	a, b := s.join("udp", "203.0.113.7", ":7777", []byte("move")), s.join("udp", "203.0.113.8", ":7777", []byte("move"))
	if got := a.server + " " + b.server; got != "172.18.0.11:7777 172.18.0.12:7777" && got != "172.18.0.12:7777 172.18.0.11:7777" {
		s.Errorf("two players are at %s", got)
	}
	d.set("demo-arena-1", "die", nil)
	s.counts(1, "pool_backends", "pool", "arena", "state", "healthy")
	d.set("demo-arena-3", "health_status: healthy", arena(3, "healthy"))
	s.counts(2, "pool_backends", "pool", "arena", "state", "healthy")
	s.goes("a player of a new container", "udp", "203.0.113.99", ":7777", "172.18.0.13:7777", []byte("move"))
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.refused) > 0 {
		s.Errorf("the daemon was asked for %q", d.refused)
	}
}

func ports(s *site) {
	servers := []string{"10.1.0.11:30000", "10.1.0.11:30007", "10.1.0.11:30249", "10.1.0.12:30250", "10.1.0.12:30499"}
	s.udp(servers...)
	s.start()
	for _, addr := range servers {
		_, port, _ := strings.Cut(addr, ":")
		s.goes("a match", "udp", "203.0.113.7", ":"+port, addr, []byte("move"))
	}
}

func matchmaker(s *site) {
	const lobby, match = "10.1.0.5:7777", "10.2.3.4:31017"
	s.udp(lobby, match, "10.3.0.1:7777")
	var asked atomic.Int64
	s.handle("10.1.0.2:8080", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		var q struct {
			FirstBytes string `json:"first_bytes_b64"`
		}
		json.NewDecoder(r.Body).Decode(&q)
		first, _ := base64.StdEncoding.DecodeString(q.FirstBytes)
		switch {
		case r.URL.Path != "/resolve":
			w.WriteHeader(http.StatusNotFound)
		case bytes.HasPrefix(first, []byte("token-of-a-match")):
			fmt.Fprintf(w, `{"target": %q, "ttl_sec": 60}`, match)
		case bytes.HasPrefix(first, []byte("token-to-outside")):
			fmt.Fprint(w, `{"target": "10.3.0.1:7777", "ttl_sec": 60}`)
		default:
			w.WriteHeader(http.StatusNoContent)
		}
	}))
	s.start()
	s.goes("a player of a match", "udp", "203.0.113.7", ":7777", match, []byte("token-of-a-match and more"))
	before := asked.Load()
	s.goes("another of it", "udp", "203.0.113.8", ":7777", match, []byte("token-of-a-match and else"))
	if asked.Load() != before {
		s.Errorf("the matchmaker was asked again")
	}
	s.goes("a player of nothing", "udp", "203.0.113.9", ":7777", lobby, []byte("token-of-nothing"))
	s.goes("a target that is not allowed", "udp", "203.0.113.9", ":7777", lobby, []byte("token-to-outside"))
}

// ticketKey is the key that the launcher and the proxy share.
const ticketKey = "hex:3031323334353637383961626364656630313233343536373839616263646566"

func passes(s *site) {
	const ranked, open = "10.2.0.11:7777", "10.2.0.12:7777"
	s.udp(ranked, open)
	s.file("env", "export WAYHOUSE_TICKET_KEY="+ticketKey+"\n")
	s.file("ticket.key", ticketKey)
	s.start()
	mint := strings.Replace(s.page.command(s.T, "wayhouse ticket mint"), "/etc/wayhouse/", "", 1)
	ticket, err := s.try("wayhouse " + strings.TrimPrefix(mint, "wayhouse ") + " --format base64")
	if err != nil {
		s.Fatal(ticket, err)
	}
	raw, err := base64.StdEncoding.DecodeString(ticket)
	if err != nil {
		s.Fatal(err)
	}
	s.goes("a player with a ticket", "udp", "203.0.113.9", ":7777", ranked, append(raw, "move"...))
	raw[12]++
	s.goes("a player with a forged one", "udp", "203.0.113.9", ":7777", open, append(raw, "move"...))
	s.goes("a player", "udp", "203.0.113.7", ":7777", open, []byte("move"))
	s.command("wayhouse add hint")
	s.goes("a player with a hint", "udp", "203.0.113.7", ":7777", ranked, []byte("move"))
	s.goes("another player", "udp", "203.0.113.8", ":7777", open, []byte("move"))
}

func attack(s *site) {
	_, err := exec.LookPath("nft")
	kit.Require(s.T, err, "nft command (package nftables)")
	const one, two = "10.0.0.11:7777", "10.0.0.12:7777"
	s.udp(one, two)
	s.start()
	if up := s.proc.Metric("offload_up"); up != 1 {
		s.Fatalf("offload_up is %v", up)
	}
	player := s.join("udp", "203.0.113.7", ":7777", []byte("ARENA join"))
	for _, noise := range []string{"", "AREN", "\xff\xff\xff\xffgetstatus"} {
		s.dropped(fmt.Sprintf("%q", noise), "arena", "first_packet_gate", "203.0.113.8", ":7777", []byte(noise))
	}
	kit.Eventually(s.T, "the kernel drops who is denied", func() bool {
		c := s.dial("udp", "203.0.113.70", ":7777")
		c.Write([]byte("ARENA join"))
		c.Close()
		return s.proc.Metric("offload_dropped_total", "listener", "arena", "reason", "denied") > 0
	})
	// A flood that looks like players, from one address.
	kit.Eventually(s.T, "the kernel drops a flood", func() bool {
		for range 50 {
			c := s.dial("udp", "203.0.113.130", ":7777")
			c.Write([]byte("ARENA join"))
			c.Close()
		}
		return s.proc.Metric("offload_dropped_total", "listener", "arena", "reason", "limited") > 0
	})
	s.stays(player)
	fresh := s.join("udp", "203.0.113.9", ":7777", []byte("ARENA join"))
	if fresh.server != one && fresh.server != two {
		s.Errorf("a new player is at %q", fresh.server)
	}
	s.prints(s.command("wayhouse explain"), "acl")

	// By hand, with what the page sends.
	levels := regexp.MustCompile(`(?m)^    curl -X POST .* -d '(.*)' localhost:2019(/\S+)$`).FindAllStringSubmatch(s.page.text, -1)
	if len(levels) != 2 {
		s.Fatalf("the page sets the level by %q", levels)
	}
	set := func(i int) {
		if status, answer := s.proc.Do(http.MethodPost, levels[i][2], []byte(levels[i][1])); status != http.StatusOK {
			s.Fatalf("%s: %d %s", levels[i][0], status, answer)
		}
	}
	set(0)
	s.blocked("a stranger at level 2", "udp", "arena", "overload", "203.0.113.10", ":7777", []byte("ARENA join"))
	s.goes("who plays", "udp", "203.0.113.7", ":7777", player.server, []byte("ARENA join"))
	set(1)
	s.goes("a stranger afterwards", "udp", "203.0.113.10", ":7777", s.join("udp", "203.0.113.10", ":7777", []byte("ARENA join")).server, []byte("ARENA join"))
}

func haproxy(s *site) {
	bin, err := exec.LookPath("haproxy")
	kit.Require(s.T, err, "haproxy command (package haproxy)")
	s.file("haproxy.cfg", s.page.file(s.T, "defaults"))
	if out, err := exec.Command(bin, "-c", "-f", s.proc.Dir+"/haproxy.cfg").CombinedOutput(); err != nil {
		s.Errorf("HAProxy does not take its config: %v: %s", err, out)
	}
	const eu1, eu2, us = "10.1.0.11:7777", "10.1.0.12:7777", "10.2.0.11:7777"
	s.tcp(eu1, eu2, us)
	s.start()
	hello := s.clientHello("play.eu.example.com")
	a, b := s.join("tcp", "203.0.113.7", ":443", hello), s.join("tcp", "203.0.113.8", ":443", hello)
	if got := a.server + " " + b.server; got != eu1+" "+eu2 && got != eu2+" "+eu1 {
		s.Errorf("two players of Europe are at %s", got)
	}
	s.tells(a)
	s.goes("another name", "tcp", "203.0.113.7", ":443", us, s.packet("tls-curl"))
	const drain = "wayhouse set backend eu 10.1.0.11:7777 draining"
	if !strings.Contains(s.page.text, "`"+drain+"`") {
		s.Errorf("the page does not have %s", drain)
	}
	s.shell(drain)
	s.goes("while eu1 drains", "tcp", "203.0.113.9", ":443", eu2, hello)
}

func nginx(s *site) {
	servers := []string{"10.0.0.11:7777", "10.0.0.12:7777"}
	const backup = "10.0.0.13:7777"
	s.udp(servers...)
	s.udp(backup)
	s.file("etc/wayhouse/game.yaml", s.page.file(s.T, "- addr"))
	s.start()
	at := make(map[string]string)
	for i := range 8 {
		from := fmt.Sprintf("203.0.113.%d", 10+i)
		p := s.join("udp", from, ":7777", []byte("move"))
		s.goes("the same player", "udp", from, ":7777", p.server, []byte("move"))
		at[p.server] = from
	}
	if len(at) != 2 || at[backup] != "" {
		s.Errorf("eight players are at %v", at)
	}
	s.blocked("who is denied", "udp", "game", "acl", "203.0.113.70", ":7777", []byte("move"))
	for _, addr := range servers {
		s.at("udp", addr).stop()
	}
	kit.Settles(s.T, "servers down", 2, func() float64 {
		return s.proc.Metric("pool_backends", "pool", "game", "state", "unhealthy")
	})
	s.goes("a player then", "udp", "203.0.113.140", ":7777", backup, []byte("move"))
}
