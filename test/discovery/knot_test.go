package discovery

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/miekg/dns"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// knot is a DNS server that is primary for the zone game.test.
type knot struct {
	t    *testing.T
	addr string
	dir  string
	cmd  *exec.Cmd
}

const knotConf = `
server:
    rundir: "%[1]s"
    listen: %[2]s
    background-workers: 1
    udp-workers: 1
    tcp-workers: 1
database:
    storage: "%[1]s/db"
log:
  - target: stderr
    any: warning
acl:
  - id: local
    address: 127.0.0.1
    action: update
zone:
  - domain: game.test
    storage: "%[1]s"
    file: game.test.zone
    zonefile-sync: -1
    acl: local
`

const knotZone = `$ORIGIN game.test.
$TTL 1
@ 3600 SOA ns.game.test. hostmaster.game.test. 1 3600 600 86400 1
@ 3600 NS ns
ns 3600 A 127.0.0.1
`

func startKnot(t *testing.T) *knot {
	t.Helper()
	path, err := exec.LookPath("knotd")
	kit.Require(t, err, "knotd, of the Debian package knot")
	k := &knot{t: t, dir: t.TempDir(), addr: kit.Local(kit.Port(t))}
	host, port, _ := net.SplitHostPort(k.addr)
	for name, text := range map[string]string{"knot.conf": fmt.Sprintf(knotConf, k.dir, host+"@"+port), "game.test.zone": knotZone} {
		if err := os.WriteFile(filepath.Join(k.dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(k.dir, "db"), 0o700); err != nil {
		t.Fatal(err)
	}
	k.start(path)
	t.Cleanup(k.stop)
	return k
}

func (k *knot) start(path string) {
	k.t.Helper()
	k.cmd = exec.Command(path, "-c", filepath.Join(k.dir, "knot.conf"))
	k.cmd.Stderr = os.Stderr
	if err := k.cmd.Start(); err != nil {
		k.t.Fatal(err)
	}
	kit.Eventually(k.t, "knot answers", func() bool {
		q := new(dns.Msg).SetQuestion("game.test.", dns.TypeSOA)
		a, err := dns.Exchange(q, k.addr)
		return err == nil && len(a.Answer) == 1
	})
}

func (k *knot) stop() {
	if k.cmd == nil {
		return
	}
	_ = k.cmd.Process.Kill()
	_ = k.cmd.Wait()
	k.cmd = nil
}

// set makes these all the records of the names that they and gone have, in one
// step.
func (k *knot) set(gone []string, records ...string) {
	k.t.Helper()
	m := new(dns.Msg).SetUpdate("game.test.")
	var list []dns.RR
	for _, s := range records {
		rr, err := dns.NewRR("$ORIGIN game.test.\n" + s)
		if err != nil {
			k.t.Fatal(err)
		}
		list = append(list, rr)
	}
	for _, name := range gone {
		m.RemoveName([]dns.RR{&dns.ANY{Hdr: dns.RR_Header{Name: name + ".game.test."}}})
	}
	m.RemoveName(list)
	m.Insert(list)
	client := dns.Client{Net: "tcp"}
	a, _, err := client.Exchange(m, k.addr)
	if err != nil || a.Rcode != dns.RcodeSuccess {
		k.t.Fatalf("updating the zone: %v, %v", a, err)
	}
}

type poolView struct {
	Source   string `json:"source"`
	Backends []struct {
		Addr   string `json:"addr"`
		Weight int    `json:"weight"`
		Origin string `json:"origin"`
	} `json:"backends"`
}

// backends are those of the pool, with their weights.
func backends(p *kit.Process) string {
	var v poolView
	p.JSON("/pools/match", &v)
	s := ""
	for _, b := range v.Backends {
		s += fmt.Sprintf("%s/%d ", b.Addr, b.Weight)
	}
	return s
}

func portOf(addr string) string {
	_, port, _ := net.SplitHostPort(addr)
	return port
}

// TestSRVRecordsChange changes the records of a real server while sessions run:
// those that are there stay where they are, new ones go where the records say.
func TestSRVRecordsChange(t *testing.T) {
	k := startKnot(t)
	a, b := kit.NewUDPBackend(t, 1, "127.0.0.1:0"), kit.NewUDPBackend(t, 2, "127.0.0.1:0")
	k.set(nil, "_g._udp 1 SRV 0 5 "+portOf(a.Addr)+" host", "host 1 A 127.0.0.1")

	listen := kit.Local(kit.Port(t))
	config := func(more kit.M) kit.M {
		return kit.App(kit.M{"game": kit.ToPool("match", "udp/"+listen)}, kit.M{"match": kit.With(kit.M{
			"source": "records", "health": kit.M{"check": "none"}, "balancer": kit.M{"policy": "weighted"}, "idle_timeout": "10m",
		}, more)}, kit.M{"sources": kit.M{"records": kit.M{"source": "dns_srv", "record": "_g._udp.game.test", "resolvers": kit.A{k.addr}}}})
	}
	p := kit.Start(t, config(nil), kit.Options{})
	settles := func(what, want string) {
		t.Helper()
		kit.Settles(t, "the pool after "+what, want, func() string { return backends(p) })
	}
	settles("the start", a.Addr+"/5 ")
	var v poolView
	p.JSON("/pools/match", &v)
	if v.Source != "records" || v.Backends[0].Origin != "source" {
		t.Errorf("the pool's source is %s, its backends are from %s", v.Source, v.Backends[0].Origin)
	}
	// Each round begins sessions, and all those of earlier ones go on.
	var rounds []*kit.Load
	play := func(what string, fresh *kit.UDPBackend) {
		t.Helper()
		before := fresh.Flows()
		rounds = append(rounds, kit.StartLoad(t, kit.LoadOptions{UDP: listen, Flows: 4, Rate: 100}))
		for _, l := range rounds {
			l.Round(t)
		}
		if n := fresh.Flows() - before; n != 4 {
			t.Errorf("%s: %d of 4 new sessions are where they should be", what, n)
		}
	}
	play("first", a)

	k.set(nil, "_g._udp 1 SRV 0 7 "+portOf(b.Addr)+" host")
	settles("a change", b.Addr+"/7 ")
	play("after a change", b)

	p.MustLoad(config(kit.M{"max_tries": 3}))
	if got := backends(p); got != b.Addr+"/7 " {
		t.Errorf("after a reload: %s", got)
	}
	play("after a reload", b)

	// The name is gone: nothing changes.
	failed := func() float64 {
		return p.Metric("discovery_refresh_total", "pool", "match", "kind", "dns_srv", "result", "error")
	}
	fails := func(what string) {
		t.Helper()
		before := failed()
		kit.Eventually(t, what+" is noticed", func() bool { return failed() > before })
		if got := backends(p); got != b.Addr+"/7 " {
			t.Errorf("%s: %s", what, got)
		}
		play(what, b)
	}
	k.set([]string{"_g._udp"})
	fails("no such name")

	k.stop()
	fails("no server")
	path, _ := exec.LookPath("knotd")
	k.start(path)

	// The best that is there, and what is less than it.
	k.set(nil, "_g._udp 1 SRV 1 0 "+portOf(a.Addr)+" host", "_g._udp 1 SRV 2 9 "+portOf(b.Addr)+" host", "host 1 A 127.0.0.1")
	want := a.Addr + "/1 " + b.Addr + "/9 "
	if a.Addr > b.Addr && len(a.Addr) == len(b.Addr) || len(a.Addr) > len(b.Addr) {
		want = b.Addr + "/9 " + a.Addr + "/1 "
	}
	settles("two priorities", want)
	play("two priorities", a)

	// An answer of many records comes over TCP.
	records := []string{"host 1 A 127.0.0.1"}
	for i := range 150 {
		records = append(records, fmt.Sprintf("_g._udp 1 SRV 0 1 %d host", 20000+i))
	}
	k.set(nil, records...)
	kit.Settles(t, "the number of backends", 150, func() int { return int(p.Metric("discovery_backends", "pool", "match")) })

	k.set(nil, "_g._udp 1 SRV 0 0 0 .")
	settles("a target of .", "")
	if n := p.Metric("discovery_refresh_total", "pool", "match", "result", "withdrawn"); n == 0 {
		t.Error("it is not counted as withdrawn")
	}
	c, err := net.Dial("udp", listen)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	dropped := func() float64 { return p.Metric("datagrams_dropped_total", "listener", "game", "reason", "no_backend") }
	before := dropped()
	if _, err := c.Write([]byte("anybody")); err != nil {
		t.Fatal(err)
	}
	kit.Eventually(t, "a new session is refused", func() bool { return dropped() > before })

	for _, l := range rounds {
		l.Round(t)
		if r := l.Stop(); !r.Perfect() {
			t.Errorf("a session noticed: %v", &r)
		}
	}
	if at := p.Metric("discovery_last_success_timestamp_seconds", "pool", "match"); time.Since(time.UnixMilli(int64(at*1000))) > time.Hour {
		t.Errorf("the last success was at %v", at)
	}
}

// TestAddressesChange is of the source dns, and of two families.
func TestAddressesChange(t *testing.T) {
	k := startKnot(t)
	k.set(nil, "all 1 A 127.0.0.2", "all 1 A 127.0.0.3")
	p := kit.Start(t, kit.App(kit.M{}, kit.M{"match": kit.M{
		"source": kit.M{"source": "dns", "name": "all.game.test", "port": 7777, "resolvers": kit.A{k.addr}}, "health": kit.M{"check": "none"},
	}}), kit.Options{})
	settles := func(what, want string) {
		t.Helper()
		kit.Settles(t, "the pool after "+what, want, func() string { return backends(p) })
	}
	settles("the start", "127.0.0.2:7777/1 127.0.0.3:7777/1 ")
	k.set(nil, "all 1 AAAA ::1", "all 1 A 127.0.0.3", "all 1 A 0.0.0.0")
	settles("a change", "127.0.0.3:7777/1 [::1]:7777/1 ")
	k.set([]string{"all"}, "other 1 CNAME third", "third 1 A 127.0.0.9")
	failed := func() float64 {
		return p.Metric("discovery_refresh_total", "pool", "match", "kind", "dns", "result", "error")
	}
	before := failed()
	kit.Eventually(t, "that the name is gone is noticed", func() bool { return failed() > before })
	settles("the name is gone", "127.0.0.3:7777/1 [::1]:7777/1 ")
	k.set(nil, "all 1 CNAME third", "third 1 A 127.0.0.9")
	settles("an alias", "127.0.0.9:7777/1 ")
}
