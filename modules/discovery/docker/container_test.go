package docker

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	"github.com/wayhouse-proxy/wayhouse/modules/discovery"
)

// summary is a container of the daemon's list.
func summary(t testing.TB, text string) *container {
	t.Helper()
	c := new(container)
	if err := json.Unmarshal([]byte(text), c); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	c.ID = fullID("c")
	return c
}

func TestEndpoint(t *testing.T) {
	const (
		bridge = `"NetworkSettings": {"Networks": {"bridge": {"IPAddress": "172.17.0.2"}}}`
		two    = `"NetworkSettings": {"Networks": {"b": {"IPAddress": "172.18.0.2"}, "a": {"IPAddress": "172.19.0.2", "GlobalIPv6Address": "fd00::2"}}}`
		dual   = `"NetworkSettings": {"Networks": {"a": {"IPAddress": "172.19.0.2", "GlobalIPv6Address": "fd00::2"}}}`
		six    = `"NetworkSettings": {"Networks": {"a": {"IPAddress": "", "GlobalIPv6Address": "fd00::2"}}}`
		host   = `"HostConfig": {"NetworkMode": "host"}, "NetworkSettings": {"Networks": {"host": {"IPAddress": ""}}}`
		game   = `"Ports": [{"PrivatePort": 7777, "Type": "udp"}]`
		public = `"Ports": [{"IP": "0.0.0.0", "PrivatePort": 7777, "PublicPort": 49153, "Type": "udp"},
			{"IP": "::", "PrivatePort": 7777, "PublicPort": 49153, "Type": "udp"},
			{"IP": "192.0.2.1", "PrivatePort": 7777, "PublicPort": 7000, "Type": "tcp"}, {"PrivatePort": 8080, "Type": "tcp"}]`
	)
	published := func(w *wants) { w.published = true }
	for name, tc := range map[string]struct {
		text string
		how  func(*wants)
		want string // the address, or the reason to leave it out
	}{
		"the only port":      {text: bridge + "," + game, want: "172.17.0.2:7777"},
		"tcp and udp":        {text: bridge + `, "Ports": [{"PrivatePort": 7777, "Type": "udp"}, {"PrivatePort": 7777, "Type": "tcp"}]`, want: "172.17.0.2:7777"},
		"label":              {text: bridge + "," + game + `, "Labels": {"wayhouse.port": "9000"}`, want: "172.17.0.2:9000"},
		"label and option":   {text: bridge + `, "Labels": {"wayhouse.port": "9000/udp"}`, how: port1(8000, 8000), want: "172.17.0.2:9000"},
		"option":             {text: bridge, how: port1(8000, 8000), want: "172.17.0.2:8000"},
		"another prefix":     {text: bridge + `, "Labels": {"wayhouse.port": "9000", "query.port": "9001"}`, how: func(w *wants) { w.prefix = "query" }, want: "172.17.0.2:9001"},
		"range":              {text: bridge + `, "Ports": [{"PrivatePort": 7000, "Type": "udp"}, {"PrivatePort": 9000, "Type": "udp"}]`, how: port1(7000, 7999), want: "172.17.0.2:7000"},
		"ports of a range":   {text: bridge + `, "Ports": [{"PrivatePort": 7001, "Type": "udp"}, {"PrivatePort": 7000, "Type": "udp"}]`, how: port1(7000, 7999), want: "it has the ports 7000, 7001; say which in the label wayhouse.port"},
		"protocol":           {text: bridge + `, "Ports": [{"PrivatePort": 7001, "Type": "tcp"}, {"PrivatePort": 7000, "Type": "udp"}]`, how: func(w *wants) { w.port.proto = "tcp" }, want: "172.17.0.2:7001"},
		"sctp":               {text: bridge + `, "Ports": [{"PrivatePort": 7001, "Type": "sctp"}]`, want: "it has no such port; say which"},
		"no port":            {text: bridge, want: "it has no such port; say which"},
		"bad port":           {text: bridge + `, "Labels": {"wayhouse.port": "game"}`, want: `the label wayhouse.port: "game" is neither a port`},
		"port 0":             {text: bridge + `, "Labels": {"wayhouse.port": "0"}`, want: `the label wayhouse.port: "0" is neither a port`},
		"bad protocol":       {text: bridge + `, "Labels": {"wayhouse.port": "7777/sctp"}`, want: `the label wayhouse.port: "7777/sctp" is no port: behind the slash stands tcp or udp`},
		"no network":         {text: game + `, "HostConfig": {"NetworkMode": "none"}, "NetworkSettings": {"Networks": {"none": {"IPAddress": ""}}}`, want: "it has no address in any network"},
		"null":               {text: game + `, "NetworkSettings": {"Networks": {"a": null}}`, want: "it has no address in any network"},
		"no settings":        {text: game, want: "it has no address in any network"},
		"no IP address":      {text: game + `, "NetworkSettings": {"Networks": {"a": {"IPAddress": "x"}}}`, want: "it has no address in any network"},
		"two networks":       {text: game + "," + two, want: "it is in the networks a, b; say which in the option network or the label wayhouse.network"},
		"option network":     {text: game + "," + two, how: func(w *wants) { w.network = "b" }, want: "172.18.0.2:7777"},
		"label network":      {text: game + "," + two + `, "Labels": {"wayhouse.network": "a"}`, how: func(w *wants) { w.network = "b" }, want: "172.19.0.2:7777"},
		"empty label":        {text: game + "," + two + `, "Labels": {"wayhouse.network": ""}`, want: "the label wayhouse.network: it names none"},
		"not in it":          {text: game + "," + bridge, how: func(w *wants) { w.network = "games" }, want: `it has no address in the network "games", only in bridge`},
		"in none":            {text: game, how: func(w *wants) { w.network = "games" }, want: `it has no address in the network "games", or in another`},
		"Compose":            {text: game + `, "Labels": {"com.docker.compose.project": "arena"}, "NetworkSettings": {"Networks": {"arena_games": {"IPAddress": "172.20.0.9"}, "arena_web": {"IPAddress": "172.21.0.9"}}}`, how: func(w *wants) { w.network = "games" }, want: "172.20.0.9:7777"},
		"IPv6 only":          {text: game + "," + six, want: "[fd00::2]:7777"},
		"IPv4 first":         {text: game + "," + dual, want: "172.19.0.2:7777"},
		"family ipv6":        {text: game + "," + dual, how: func(w *wants) { w.family = ipv6 }, want: "[fd00::2]:7777"},
		"family ipv4":        {text: game + "," + six, how: func(w *wants) { w.family = ipv4 }, want: "it has no address in any network"},
		"one of the family":  {text: game + "," + two, how: func(w *wants) { w.family = ipv6 }, want: "[fd00::2]:7777"},
		"host":               {text: host + `, "Labels": {"wayhouse.port": "7000"}`, want: "127.0.0.1:7000"},
		"host without port":  {text: host, want: "it has no such port; say which"},
		"host, which?":       {text: host + `, "Labels": {"wayhouse.port": "7000"}`, how: func(w *wants) { w.host = netip.Addr{} }, want: "it is on the host's network, and host_address does not say where"},
		"published":          {text: bridge + "," + public, how: func(w *wants) { w.published, w.port.proto = true, "udp" }, want: "127.0.0.1:49153"},
		"published, one IP":  {text: bridge + "," + public, how: func(w *wants) { w.published, w.port.proto = true, "tcp" }, want: "192.0.2.1:7000"},
		"published, which?":  {text: bridge + "," + public, how: published, want: "it has the ports 7000, 49153; say which"},
		"not published":      {text: bridge + "," + game, how: published, want: "no such port of it is published"},
		"published, host":    {text: host + `, "Labels": {"wayhouse.port": "7000"}`, how: published, want: "127.0.0.1:7000"},
		"published, bad":     {text: `"Ports": [{"IP": "x", "PrivatePort": 7777, "PublicPort": 49153, "Type": "udp"}]`, how: published, want: `it is published at "x", which is no address`},
		"published, both":    {text: `"Ports": [{"IP": "2001:db8::1", "PrivatePort": 7, "PublicPort": 7, "Type": "udp"}, {"IP": "192.0.2.1", "PrivatePort": 7, "PublicPort": 7, "Type": "udp"}]`, how: published, want: "192.0.2.1:7"},
		"published, six":     {text: `"Ports": [{"IP": "2001:db8::1", "PrivatePort": 7, "PublicPort": 7, "Type": "udp"}, {"IP": "192.0.2.1", "PrivatePort": 7, "PublicPort": 7, "Type": "udp"}]`, how: func(w *wants) { w.published, w.family = true, ipv6 }, want: "[2001:db8::1]:7"},
		"published, no six":  {text: `"Ports": [{"IP": "192.0.2.1", "PrivatePort": 7, "PublicPort": 7, "Type": "udp"}]`, how: func(w *wants) { w.published, w.family = true, ipv6 }, want: "it is published at no ipv6 address"},
		"published, where?":  {text: `"Ports": [{"IP": "0.0.0.0", "PrivatePort": 7, "PublicPort": 7, "Type": "udp"}]`, how: func(w *wants) { w.published, w.host = true, netip.Addr{} }, want: "it is published on every address, and host_address does not say"},
		"bad weight":         {text: bridge + "," + game + `, "Labels": {"wayhouse.weight": "heavy"}`, want: `the label wayhouse.weight: "heavy" is not a whole number from 1 to 4294967295`},
		"weight 0":           {text: bridge + "," + game + `, "Labels": {"wayhouse.weight": "0"}`, want: `the label wayhouse.weight: "0" is not`},
		"bad priority":       {text: bridge + "," + game + `, "Labels": {"wayhouse.priority": "65536"}`, want: `the label wayhouse.priority: "65536" is not a whole number from 0 to 65535`},
		"bad max_sessions":   {text: bridge + "," + game + `, "Labels": {"wayhouse.max_sessions": ""}`, want: `the label wayhouse.max_sessions: "" is not a whole number from 1`},
		"shared, not there":  {text: game + `, "HostConfig": {"NetworkMode": "container:f00"}`, how: func(w *wants) { w.prefix = "gone" }, want: "the container whose network it shares is not there"},
		"v4-mapped":          {text: game + `, "NetworkSettings": {"Networks": {"a": {"IPAddress": "::ffff:172.17.0.2"}}}`, want: "172.17.0.2:7777"},
		"address with zone":  {text: game + `, "NetworkSettings": {"Networks": {"a": {"GlobalIPv6Address": "fe80::1%eth0"}}}`, want: "it has no address in any network"},
		"unspecified":        {text: game + `, "NetworkSettings": {"Networks": {"a": {"IPAddress": "0.0.0.0"}}}`, want: "it has no address in any network"},
		"another one's port": {text: bridge + `, "Ports": [{"PrivatePort": 0, "Type": "udp"}]`, want: "it has no such port"},
	} {
		t.Run(name, func(t *testing.T) {
			w := wants{prefix: "wayhouse", port: anyPort, host: loopback}
			if tc.how != nil {
				tc.how(&w)
			}
			c := summary(t, "{"+tc.text+"}")
			net := c
			if w.prefix == "gone" {
				net = nil
			}
			e, err := w.endpoint(c, net)
			got := e.Addr.String()
			if err != nil {
				got = err.Error()
			}
			if err == nil && got != tc.want || err != nil && !strings.HasPrefix(got, tc.want) {
				t.Errorf("got %s, want %s", got, tc.want)
			}
		})
	}
}

func port1(first, last uint16) func(*wants) {
	return func(w *wants) { w.port.First, w.port.Last = first, last }
}

func TestEndpointNumbers(t *testing.T) {
	w := wants{prefix: "wayhouse", port: anyPort}
	c := summary(t, `{"Labels": {"wayhouse.port": "7777", "wayhouse.weight": "3", "wayhouse.priority": "2", "wayhouse.max_sessions": "64"},
		"NetworkSettings": {"Networks": {"a": {"IPAddress": "172.17.0.2"}}}}`)
	e, err := w.endpoint(c, c)
	if want := (discovery.Endpoint{Addr: netip.MustParseAddrPort("172.17.0.2:7777"), Weight: 3, Priority: 2, MaxSessions: 64}); err != nil || e != want {
		t.Errorf("got %+v, %v, want %+v", e, err, want)
	}
}

// A container that shares another's network is reached at that one's address and
// ports, and says itself which.
func TestSharedNetwork(t *testing.T) {
	w := wants{prefix: "wayhouse", port: anyPort, host: loopback}
	c := summary(t, `{"Labels": {"wayhouse.weight": "2"}, "HostConfig": {"NetworkMode": "container:abc"}}`)
	vpn := summary(t, `{"Labels": {"wayhouse.weight": "9"}, "Ports": [{"PrivatePort": 7777, "Type": "udp"}], "NetworkSettings": {"Networks": {"a": {"IPAddress": "172.17.0.3"}}}}`)
	if c.joins() != "abc" || vpn.joins() != "" {
		t.Errorf("they join %q and %q", c.joins(), vpn.joins())
	}
	e, err := w.endpoint(c, vpn)
	if err != nil || e.Addr.String() != "172.17.0.3:7777" || e.Weight != 2 {
		t.Errorf("got %+v, %v", e, err)
	}
	vpn.HostConfig.NetworkMode = hostNetwork
	c.Labels["wayhouse.port"] = "7000"
	if e, err = w.endpoint(c, vpn); err != nil || e.Addr.String() != "127.0.0.1:7000" {
		t.Errorf("on the host: %+v, %v", e, err)
	}
}

func TestName(t *testing.T) {
	for in, want := range map[string]string{
		`{"Names": ["/arena-1", "/web/arena"]}`: "arena-1",
		`{"Names": []}`:                         fullID("c")[:12],
	} {
		if got := summary(t, in).name(); got != want {
			t.Errorf("%s is called %s, want %s", in, got, want)
		}
	}
	if got := (&container{ID: "abc"}).name(); got != "abc" {
		t.Errorf("a short ID is %q", got)
	}
}

func FuzzParsePort(f *testing.F) {
	for _, s := range []string{"7777", "7777/udp", "7000-7099/tcp", "0", "/", "7777/", "1-2-3", "99999"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := parsePort(s)
		if err != nil {
			if len(err.Error()) > 400 {
				t.Errorf("an error of %d bytes", len(err.Error()))
			}
			return
		}
		if p.First == 0 || p.Last < p.First || p.proto != "" && p.proto != "tcp" && p.proto != "udp" {
			t.Errorf("parsePort(%q) = %+v", s, p)
		}
	})
}
