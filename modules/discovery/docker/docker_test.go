package docker

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/discovery"
)

// load provisions a source with options.
func load(t testing.TB, options kit.M) (*Source, error) {
	t.Helper()
	raw, err := json.Marshal(options)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
	t.Cleanup(cancel)
	m, err := ctx.LoadModuleByID("wayhouse.sources.docker", raw)
	if err != nil {
		return nil, err
	}
	d := m.(*Source)
	t.Cleanup(func() { d.Close() })
	return d, nil
}

func mustLoad(t testing.TB, options kit.M) *Source {
	t.Helper()
	d, err := load(t, options)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func lobby(endpoint string, more kit.M) kit.M {
	return kit.With(kit.M{"endpoint": endpoint, "labels": kit.A{"wayhouse.pool=lobby"}}, more)
}

// game is a container of the pool lobby in the network games.
func game(name, ip string) running {
	return running{
		name: name, labels: map[string]string{"wayhouse.pool": "lobby"}, mode: "games",
		networks: map[string]attachment{"games": {IPAddress: ip}},
		ports:    []exposed{{PrivatePort: 7777, Type: "udp"}},
	}
}

// addrs are the addresses that the source lists, those left out as "-".
func addrs(t testing.TB, d *Source) string {
	t.Helper()
	set, err := d.List(t.Context())
	if err != nil {
		return err.Error()
	}
	return text(set)
}

func text(set discovery.Set) string {
	var s []string
	for _, e := range set.Endpoints {
		if e.Addr.IsValid() {
			s = append(s, e.Addr.String())
		} else {
			s = append(s, "-")
		}
	}
	slices.Sort(s)
	return strings.Join(s, " ")
}

func TestList(t *testing.T) {
	f, endpoint := newFake(t)
	f.run(game("one", "172.18.0.2"))
	other := game("other", "172.18.0.3")
	other.labels = map[string]string{"wayhouse.pool": "arena"}
	f.run(other)
	for name, c := range map[string]running{
		"starting": {health: "starting"}, "unhealthy": {health: "unhealthy"}, "paused": {state: "paused"}, "exited": {state: "exited"},
	} {
		g := game(name, "172.18.0.4")
		g.health, g.state = c.health, c.state
		f.run(g)
	}
	well := game("well", "172.18.0.9")
	well.health = "healthy"
	f.run(well)
	bad := game("bad", "172.18.0.10")
	bad.labels["wayhouse.weight"] = "x"
	f.run(bad)

	if got, want := addrs(t, mustLoad(t, lobby(endpoint, nil))), "- 172.18.0.2:7777 172.18.0.9:7777"; got != want {
		t.Errorf("listed %s, want %s", got, want)
	}
	if got, want := addrs(t, mustLoad(t, lobby(endpoint, kit.M{"any_health": true}))), "- 172.18.0.2:7777 172.18.0.4:7777 172.18.0.4:7777 172.18.0.9:7777"; got != want {
		t.Errorf("with any_health: %s, want %s", got, want)
	}
	if got, want := addrs(t, mustLoad(t, kit.M{"endpoint": endpoint, "labels": kit.A{"wayhouse.pool"}})), "- 172.18.0.2:7777 172.18.0.3:7777 172.18.0.9:7777"; got != want {
		t.Errorf("with any value: %s, want %s", got, want)
	}
	if got := addrs(t, mustLoad(t, lobby(endpoint, kit.M{"labels": kit.A{"wayhouse.pool=lobby", "region=eu"}}))); got != "" {
		t.Errorf("with a label that none has: %s", got)
	}
}

// What is left out is told once for each reason.
func TestLeftOut(t *testing.T) {
	f, endpoint := newFake(t)
	d := mustLoad(t, lobby(endpoint, nil))
	bad := game("bad", "172.18.0.10")
	bad.labels["wayhouse.port"] = "x"
	f.run(bad)
	f.run(game("good", "172.18.0.2"))
	told := d.watchTold(t)
	for range 3 {
		addrs(t, d)
	}
	if n := len(*told); n != 1 || !strings.HasPrefix((*told)[0], `bad: the label wayhouse.port: "x" is neither`) {
		t.Fatalf("told %q", *told)
	}
	f.change("bad", "update", func(c *running) { c.labels = map[string]string{"wayhouse.pool": "lobby", "wayhouse.weight": "0"} })
	addrs(t, d)
	f.change("bad", "update", func(c *running) { delete(c.labels, "wayhouse.weight") })
	addrs(t, d)
	f.change("bad", "update", func(c *running) { c.labels["wayhouse.weight"] = "0" })
	addrs(t, d)
	if n := len(*told); n != 3 {
		t.Errorf("told %d times, want 3: %q", n, *told)
	}
}

// watchTold collects what is told instead of logging it.
func (d *Source) watchTold(t *testing.T) *[]string {
	told := new([]string)
	d.log = func(container, why string) { *told = append(*told, container+": "+why) }
	return told
}

func TestListSharedNetwork(t *testing.T) {
	f, endpoint := newFake(t)
	d := mustLoad(t, lobby(endpoint, nil))
	f.run(running{name: "vpn", networks: map[string]attachment{"games": {IPAddress: "172.18.0.5"}}, ports: []exposed{{PrivatePort: 7000, Type: "udp"}}})
	f.run(running{name: "game", labels: map[string]string{"wayhouse.pool": "lobby"}, mode: joined + fullID("vpn")})
	f.run(running{name: "lost", labels: map[string]string{"wayhouse.pool": "lobby"}, mode: joined + fullID("gone")})
	if got, want := addrs(t, d), "- 172.18.0.5:7000"; got != want {
		t.Errorf("listed %s, want %s", got, want)
	}
	if n := f.listed(); n != 2 {
		t.Errorf("asked for containers %d times, want 2", n)
	}
}

func TestEmpty(t *testing.T) {
	f, endpoint := newFake(t)
	for onEmpty, want := range map[string]bool{"": false, "keep": false, "withdraw": true} {
		d := mustLoad(t, lobby(endpoint, kit.M{"on_empty": onEmpty}))
		set, err := d.List(t.Context())
		if err != nil || len(set.Endpoints) != 0 || set.Withdrawn != want {
			t.Errorf("on_empty %q: %+v, %v", onEmpty, set, err)
		}
	}
	f.run(running{name: "lost", labels: map[string]string{"wayhouse.pool": "lobby"}})
	d := mustLoad(t, lobby(endpoint, kit.M{"on_empty": "withdraw"}))
	if set, err := d.List(t.Context()); err != nil || set.Withdrawn {
		t.Errorf("with a container that is left out: %+v, %v", set, err)
	}
}

// The paths have the newest version that both speak.
func TestVersion(t *testing.T) {
	for name, tc := range map[string]struct {
		api, least int
		noPing     bool
		want       string // of the path, or the error
	}{
		"Docker 20.10":      {api: 41, least: 12, want: "/v1.41/containers/json"},
		"Docker 28":         {api: 47, least: 24, want: "/v1.47/containers/json"},
		"one to come":       {api: 60, least: 44, want: "/v1.52/containers/json"},
		"too old":           {api: 40, least: 12, want: "GET /_ping: the daemon's API has the version 1.40; 1.41 is needed"},
		"too new":           {api: 90, least: 80, want: "GET /containers/json: status 400: client version 1.52 is too old. Minimum supported API version is 1.80"},
		"ping is forbidden": {api: 90, least: 80, noPing: true, want: "/containers/json"},
	} {
		t.Run(name, func(t *testing.T) {
			f, endpoint := newFake(t)
			f.set(func() { f.api, f.least, f.noPing = tc.api, tc.least, tc.noPing })
			d := mustLoad(t, lobby(endpoint, nil))
			_, err := d.List(t.Context())
			if err != nil {
				if !strings.HasPrefix(err.Error(), tc.want) {
					t.Errorf("error %v, want %s", err, tc.want)
				}
				return
			}
			if want := []string{"GET /_ping", "GET " + tc.want}; !slices.Equal(f.requests(), want) {
				t.Errorf("asked %q, want %q", f.requests(), want)
			}
			if _, err := d.List(t.Context()); err != nil || len(f.requests()) != 3 {
				t.Errorf("asked %q, %v: the version is known", f.requests(), err)
			}
		})
	}
}

// A daemon that has been replaced by another is asked anew.
func TestOtherDaemon(t *testing.T) {
	f, endpoint := newFake(t)
	d := mustLoad(t, lobby(endpoint, nil))
	f.run(game("one", "172.18.0.2"))
	addrs(t, d)
	f.set(func() { f.api = 43 })
	if got := addrs(t, d); !strings.Contains(got, "client version 1.47 is too new") {
		t.Errorf("listed %s", got)
	}
	if got := addrs(t, d); got != "172.18.0.2:7777" {
		t.Errorf("listed %s", got)
	}
}

func TestVersionPrefix(t *testing.T) {
	for in, want := range map[string]string{
		"1.41": "/v1.41", "1.52": "/v1.52", "1.53": "/v1.52",
		"1.24": "", "2.0": "", "1.": "", "1.-1": "", "1.47/../x": "", "1.99999999": "", "47": "",
	} {
		if got, err := versionPrefix(in); got != want || (err == nil) != (want != "") {
			t.Errorf("versionPrefix(%q) = %q, %v, want %q", in, got, err, want)
		}
	}
}

func TestBadConfig(t *testing.T) {
	labels := kit.A{"wayhouse.pool=lobby"}
	for want, options := range map[string]kit.M{
		"labels: none; every container":                                   {},
		`labels[1]: "=x" is neither`:                                      {"labels": kit.A{"a", "=x"}},
		`labels[0]: " a" is neither`:                                      {"labels": kit.A{" a"}},
		`endpoint: "unix://docker.sock" has no absolute path`:             {"labels": labels, "endpoint": "unix://docker.sock"},
		"endpoint: it begins with none of":                                {"labels": labels, "endpoint": "/var/run/docker.sock"},
		"endpoint: it begins with none of unix":                           {"labels": labels, "endpoint": "ssh://me@host"},
		"endpoint: a user in the URL":                                     {"labels": labels, "endpoint": "tcp://me:secret@host:2375"},
		`endpoint: "http://" names no host`:                               {"labels": labels, "endpoint": "tcp://"},
		`endpoint: "tcp://host:2375/v1.41" has more than a host`:          {"labels": labels, "endpoint": "tcp://host:2375/v1.41"},
		`endpoint: evaluated placeholder {env.WAYHOUSE_NO_SUCH} is empty`: {"labels": labels, "endpoint": "{env.WAYHOUSE_NO_SUCH}"},
		"ca_file: the endpoint":                                           {"labels": labels, "ca_file": "/etc/ca.pem"},
		"key_file: the endpoint":                                          {"labels": labels, "endpoint": "http://host", "key_file": "/etc/key.pem"},
		"cert_file: a certificate and its key":                            {"labels": labels, "endpoint": "https://host", "key_file": "/etc/key.pem"},
		"ca_file: open /nonexistent":                                      {"labels": labels, "endpoint": "tcp://host", "ca_file": "/nonexistent"},
		"cert_file: open /nonexistent":                                    {"labels": labels, "endpoint": "tcp://host", "cert_file": "/nonexistent", "key_file": "/nonexistent"},
		`port: "x" is neither a port`:                                     {"labels": labels, "port": "x"},
		`port: "7777/sctp" is no port`:                                    {"labels": labels, "port": "7777/sctp"},
		`host_address: "here" is not the IP address`:                      {"labels": labels, "host_address": "here"},
		`host_address: "0.0.0.0" is not the IP address`:                   {"labels": labels, "host_address": "0.0.0.0"},
		"host_address: missing":                                           {"labels": labels, "published": true, "endpoint": "tcp://docker:2375"},
		"host_address: 192.0.2.1 is not ipv6":                             {"labels": labels, "published": true, "host_address": "192.0.2.1", "family": "ipv6"},
		`family: "4" is neither`:                                          {"labels": labels, "family": "4"},
		`on_empty: "drop" is neither`:                                     {"labels": labels, "on_empty": "drop"},
		"network: ports that are published":                               {"labels": labels, "network": "games", "published": true},
		`prefix: "wayhouse." cannot`:                                      {"labels": labels, "prefix": "wayhouse."},
		"refresh_interval: 1ms is less than 1s":                           {"labels": labels, "refresh_interval": "1ms"},
	} {
		_, err := load(t, options)
		if err == nil || !strings.Contains(err.Error(), ": "+want) {
			t.Errorf("%v: error %v, want %s", options, err, want)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("%v: the error %v has a secret", options, err)
		}
	}
}

func TestEndpoints(t *testing.T) {
	t.Setenv("WAYHOUSE_DOCKER", "tcp://10.0.0.5:2375")
	for endpoint, want := range map[string]string{
		"":                               "unix /var/run/docker.sock 127.0.0.1",
		"unix:///run/podman/podman.sock": "unix /run/podman/podman.sock 127.0.0.1",
		"{env.WAYHOUSE_DOCKER}":          "http://10.0.0.5:2375 10.0.0.5",
		"tcp://10.0.0.5":                 "http://10.0.0.5:2375 10.0.0.5",
		"tcp://docker/":                  "http://docker:2375/ invalid IP",
		"https://[fd00::1]":              "https://[fd00::1]:2376 fd00::1",
		"http://localhost:1":             "http://localhost:1 127.0.0.1",
	} {
		d := mustLoad(t, lobby(endpoint, nil))
		got := d.url.String()
		if d.socket != "" {
			got = "unix " + d.socket
		}
		if got += " " + d.wants.host.String(); got != want {
			t.Errorf("%q is %s, want %s", endpoint, got, want)
		}
	}
}

// use runs a source in the host, as a pool does.
func use(t *testing.T, options kit.M) *discovery.Use {
	t.Helper()
	raw, err := json.Marshal(kit.With(options, kit.M{"source": "docker"}))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	t.Cleanup(cancel)
	u, err := discovery.Load(ctx, raw)
	if err != nil {
		t.Fatal(err)
	}
	u.Start(t.Name(), zap.NewNop())
	t.Cleanup(func() {
		u.Stop()
		u.Close()
	})
	return u
}

func known(u *discovery.Use) string {
	list, _ := u.Known()
	return text(discovery.Set{Endpoints: list})
}

// Changes arrive long before the source is asked again by itself.
func TestFollow(t *testing.T) {
	f, endpoint := newFake(t)
	f.run(game("one", "172.18.0.2"))
	u := use(t, lobby(endpoint, kit.M{"refresh_interval": "1h"}))
	kit.Settles(t, "the set", "172.18.0.2:7777", func() string { return known(u) })
	kit.Settles(t, "streams of events", 1, f.listening)

	g := game("two", "172.18.0.3")
	g.health = "starting"
	f.run(g)
	f.change("two", "health_status: healthy", func(c *running) { c.health = "healthy" })
	kit.Settles(t, "after a start", "172.18.0.2:7777 172.18.0.3:7777", func() string { return known(u) })
	f.change("two", "health_status: unhealthy", func(c *running) { c.health = "unhealthy" })
	kit.Settles(t, "after a check that failed", "172.18.0.2:7777", func() string { return known(u) })
	f.change("two", "health_status: healthy", func(c *running) { c.health = "healthy" })
	kit.Settles(t, "after a check", "172.18.0.2:7777 172.18.0.3:7777", func() string { return known(u) })
	f.change("one", "pause", func(c *running) { c.state = "paused" })
	kit.Settles(t, "after a pause", "172.18.0.3:7777", func() string { return known(u) })
	f.change("one", "unpause", func(c *running) { c.state = "running" })
	kit.Settles(t, "after it", "172.18.0.2:7777 172.18.0.3:7777", func() string { return known(u) })
	f.change("one", "die", func(c *running) { c.state = "exited" })
	kit.Settles(t, "after a stop", "172.18.0.3:7777", func() string { return known(u) })
	f.set(func() { f.containers[fullID("two")].networks["games"] = attachment{IPAddress: "172.18.0.7"} })
	f.tell("network", "connect", "two")
	kit.Settles(t, "in another network", "172.18.0.7:7777", func() string { return known(u) })
	// The daemon has none left. When it is asked the second time after that, its
	// first answer has been taken in.
	for range 2 {
		n := f.listed()
		f.change("two", "die", func(c *running) { c.state = "exited" })
		kit.Eventually(t, "the daemon is asked", func() bool { return f.listed() > n })
	}
	if got := known(u); got != "172.18.0.7:7777" {
		t.Errorf("the last one is gone: %s, want it kept", got)
	}
}

// Events of what is none of ours cause no question.
func TestConcerns(t *testing.T) {
	d := mustLoad(t, lobby("", kit.M{"labels": kit.A{"wayhouse.pool=lobby", "game"}}))
	for text, want := range map[string]bool{
		`{"Type": "container", "Actor": {"Attributes": {"wayhouse.pool": "lobby", "game": ""}}}`: true,
		`{"Type": "container", "Actor": {"Attributes": {"wayhouse.pool": "arena", "game": ""}}}`: false,
		`{"Type": "container", "Actor": {"Attributes": {"wayhouse.pool": "lobby"}}}`:             false,
		`{"Type": "container"}`: false,
		`{"Type": "network"}`:   true,
	} {
		var e event
		if err := json.Unmarshal([]byte(text), &e); err != nil {
			t.Fatal(err)
		}
		if got := d.concerns(e); got != want {
			t.Errorf("%s: %v, want %v", text, got, want)
		}
	}
}

// A thousand starts cost a few questions.
func TestStorm(t *testing.T) {
	f, endpoint := newFake(t)
	f.run(game("one", "172.18.0.2"))
	u := use(t, lobby(endpoint, kit.M{"refresh_interval": "1h"}))
	kit.Settles(t, "the set", "172.18.0.2:7777", func() string { return known(u) })
	kit.Settles(t, "streams of events", 1, f.listening)
	const starts = 1000
	for i := range starts {
		f.run(game(string(rune('a'+i%26))+strings.Repeat("x", i/26), "10.0."+strconv.Itoa(i/250)+"."+strconv.Itoa(1+i%250)))
	}
	kit.Settles(t, "backends", starts+1, func() int { list, _ := u.Known(); return len(list) })
	// The first answer, one for the stream that has begun, and the storm: one at
	// its end, and where it takes longer than that one each five seconds.
	if n := f.listed(); n > 20 {
		t.Errorf("asked %d times about %d starts", n, starts)
	}
}

// The daemon goes away and comes back; meanwhile everything stays.
func TestRestart(t *testing.T) {
	f, endpoint := newFake(t)
	f.run(game("one", "172.18.0.2"))
	u := use(t, lobby(endpoint, kit.M{"refresh_interval": "1s"}))
	kit.Settles(t, "the set", "172.18.0.2:7777", func() string { return known(u) })
	kit.Settles(t, "streams of events", 1, f.listening)
	f.stop()
	d := mustLoad(t, lobby(endpoint, nil))
	if got := addrs(t, d); !strings.HasPrefix(got, "GET /_ping: dial unix ") {
		t.Errorf("without a daemon: %s", got)
	}
	if got := known(u); got != "172.18.0.2:7777" {
		t.Errorf("kept %s", got)
	}
	f.start()
	f.run(game("two", "172.18.0.3"))
	kit.Settles(t, "after the restart", "172.18.0.2:7777 172.18.0.3:7777", func() string { return known(u) })
	kit.Settles(t, "streams of events after it", 1, f.listening)
}

// A stream that ends early is an error, for the host to wait; the end of the
// context is none.
func TestWatchEnds(t *testing.T) {
	f, endpoint := newFake(t)
	d := mustLoad(t, lobby(endpoint, nil))
	ctx, cancel := context.WithCancel(t.Context())
	done, changes := make(chan error, 1), make(chan struct{}, 100)
	watch := func() { // returns when the stream has begun
		go func() { done <- d.Watch(ctx, func() { changes <- struct{}{} }) }()
		select {
		case <-changes:
		case err := <-done:
			t.Fatal(err)
		case <-time.After(kit.Long):
			t.Fatal("nothing was told of what had happened before")
		}
	}
	watch()
	f.server.CloseClientConnections()
	if err := <-done; err == nil || !strings.HasPrefix(err.Error(), "GET /events: ") {
		t.Errorf("a stream cut off: %v", err)
	}
	f.set(func() { f.answer = func(w http.ResponseWriter, _ *http.Request) {} })
	watch()
	if err := <-done; err == nil || err.Error() != "the daemon has ended the stream of events" {
		t.Errorf("a stream that ends: %v", err)
	}
	f.set(func() { f.answer = nil })
	watch()
	cancel()
	if err := <-done; err != nil {
		t.Errorf("at the end: %v", err)
	}
}
