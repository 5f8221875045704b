package agones

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/kube/kubetest"
	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/discovery"
)

// The API server of these tests is kubetest's. Its objects here are shaped as
// the reference of agones.dev/v1 says: metadata.labels has agones.dev/fleet,
// status.state is one of the states of the life cycle, status.ports has the
// ports of the node by name, status.address the node's address, and
// status.counters and status.lists their capacities by name. Agones changes a
// GameServer by updates of the whole object, each of which is an event.
const (
	canary      = "canary-91d2-token"
	gameservers = "/apis/agones.dev/v1/namespaces/games/gameservers"
)

// server is a GameServer of the fleet arena.
type server struct {
	state    string
	address  string
	port     int
	capacity int
	count    int
}

func put(api *kubetest.API, name string, s server) {
	api.Put(gameservers, name, map[string]string{fleetLabel: "arena"}, map[string]any{
		"apiVersion": "agones.dev/v1", "kind": "GameServer",
		"spec": kit.M{"ports": kit.A{kit.M{"name": "default", "portPolicy": "Dynamic", "containerPort": 7654, "hostPort": s.port, "protocol": "UDP"}}},
		"status": kit.M{
			"state": s.state, "address": s.address, "nodeName": "node-1", "ports": kit.A{kit.M{"name": "default", "port": s.port}},
			"counters": kit.M{"players": kit.M{"count": s.count, "capacity": s.capacity}},
		},
	})
}

func options(api *kubetest.API, more kit.M) kit.M {
	return kit.With(kit.M{"fleet": "arena", "namespace": "games", "api": api.URL}, more)
}

func load(t testing.TB, options kit.M) (*Source, error) {
	t.Helper()
	raw, err := json.Marshal(options)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
	t.Cleanup(cancel)
	m, err := ctx.LoadModuleByID("wayhouse.sources.agones", raw)
	if err != nil {
		return nil, err
	}
	a := m.(*Source)
	t.Cleanup(func() { a.Close() })
	return a, nil
}

func mustLoad(t testing.TB, options kit.M) *Source {
	t.Helper()
	a, err := load(t, options)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func addrs(t testing.TB, a *Source) string {
	t.Helper()
	set, err := a.List(t.Context())
	if err != nil {
		return err.Error()
	}
	return text(set)
}

func text(set discovery.Set) string {
	var s []string
	for _, e := range set.Endpoints {
		if !e.Addr.IsValid() {
			s = append(s, "-")
			continue
		}
		s = append(s, e.Addr.String())
		if e.MaxSessions > 0 {
			s[len(s)-1] += fmt.Sprintf("/%d", e.MaxSessions)
		}
	}
	slices.Sort(s)
	return strings.Join(s, " ")
}

func TestList(t *testing.T) {
	api := kubetest.New(t)
	for i, state := range []string{"Creating", "Starting", "Scheduled", "RequestReady", "Ready", "Allocated", "Reserved", "Unhealthy", "Shutdown", "Error"} {
		put(api, strings.ToLower(state), server{state: state, address: "10.0.0.1", port: 7000 + i, capacity: 64})
	}
	put(api, "lost", server{state: "Ready", port: 7100})
	api.Put(gameservers, "other", map[string]string{fleetLabel: "lobby"}, kit.M{"status": kit.M{"state": "Ready", "address": "10.0.0.9", "ports": kit.A{kit.M{"port": 1}}}})
	t.Setenv("WAYHOUSE_FLEET", "lobby")
	for want, more := range map[string]kit.M{
		"10.0.0.9:1":                    {"fleet": "{env.WAYHOUSE_FLEET}"},
		"- 10.0.0.1:7004 10.0.0.1:7005": {},
		"10.0.0.1:7005":                 {"states": kit.A{"Allocated"}},
		"- 10.0.0.1:7002 10.0.0.1:7003 10.0.0.1:7004 10.0.0.1:7006": {"states": kit.A{"Scheduled", "RequestReady", "Ready", "Reserved"}},
		"- 10.0.0.1:7004/64 10.0.0.1:7005/64":                       {"counter": "players"},
		"":                                                          {"labels": kit.A{fleetLabel + "=none"}},
		"- 10.0.0.1:7004 10.0.0.1:7005 10.0.0.9:1": {"fleet": ""},
	} {
		if got := addrs(t, mustLoad(t, options(api, more))); got != want {
			t.Errorf("%v: %s, want %s", more, got, want)
		}
	}
}

// What is left out is told once for each reason.
func TestLeftOut(t *testing.T) {
	api := kubetest.New(t)
	a := mustLoad(t, options(api, nil))
	var told []string
	a.log = func(server, why string) { told = append(told, server+": "+why) }
	put(api, "bad", server{state: "Ready", address: "node-1", port: 7000})
	for range 3 {
		addrs(t, a)
	}
	put(api, "bad", server{state: "Ready", address: "10.0.0.1", port: 0})
	addrs(t, a)
	want := []string{`bad: its address "node-1" is not an IP address, and its node has none`, "bad: its port is 0"}
	if !slices.Equal(told, want) {
		t.Errorf("told %q, want %q", told, want)
	}
}

func TestEmpty(t *testing.T) {
	api := kubetest.New(t)
	put(api, "starting", server{state: "Starting"})
	for onEmpty, want := range map[string]bool{"": false, "keep": false, "withdraw": true} {
		set, err := mustLoad(t, options(api, kit.M{"on_empty": onEmpty})).List(t.Context())
		if err != nil || len(set.Endpoints) != 0 || set.Withdrawn != want {
			t.Errorf("on_empty %q: %+v, %v", onEmpty, set, err)
		}
	}
}

func TestBadConfig(t *testing.T) {
	api := kubetest.New(t)
	for want, more := range map[string]kit.M{
		`fleet: "Arena" is not made`:        {"fleet": "Arena"},
		`labels[1]: "a b" is none of`:       {"labels": kit.A{"a=b", "a b"}},
		`labels[0]: "a in (b,c)" is none`:   {"labels": kit.A{"a in (b,c)"}},
		`labels[0]: "a,b" is none of`:       {"labels": kit.A{"a,b"}},
		`states[0]: "ready" is none of`:     {"states": kit.A{"ready"}},
		`states[0]: "Shutdown" is none of`:  {"states": kit.A{"Shutdown"}},
		`address_type: "Hostname" is none`:  {"address_type": "Hostname"},
		"counter: only one of counter and":  {"counter": "a", "list": "b"},
		`on_empty: "drop" is neither`:       {"on_empty": "drop"},
		"refresh_interval: 1ms is less":     {"refresh_interval": "1ms"},
		`api: "http://example.com" is http`: {"api": "http://example.com"},
		`namespace: "a b" is not made`:      {"namespace": "a b"},
	} {
		if _, err := load(t, options(api, more)); err == nil || !strings.Contains(err.Error(), ": "+want) {
			t.Errorf("%v: error %v, want %s", more, err, want)
		}
	}
	for _, l := range []string{"a", "!a", "a=b", "a==b", "a!=b", "a=", "agones.dev/sdk-region=eu-1", "x.y/z!=1.2_3"} {
		if _, err := load(t, options(api, kit.M{"labels": kit.A{l}})); err != nil {
			t.Errorf("%s: %v", l, err)
		}
	}
	if n := api.Lists() + api.Watches(); n > 0 {
		t.Errorf("asked %d times", n)
	}
}

// use runs a source in the host, as a pool does.
func use(t *testing.T, o kit.M) *discovery.Use {
	t.Helper()
	raw, err := json.Marshal(kit.With(o, kit.M{"source": "agones", "refresh_interval": "1h"}))
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

func known(u *discovery.Use) func() string {
	return func() string {
		list, _ := u.Known()
		return text(discovery.Set{Endpoints: list})
	}
}

// Changes arrive long before the source is asked again by itself, also after the
// version that was watched from is gone.
func TestFollow(t *testing.T) {
	for name, byEvent := range map[string]bool{"410": false, "ERROR": true} {
		t.Run(name, func(t *testing.T) {
			api := kubetest.New(t)
			put(api, "one", server{state: "Ready", address: "10.0.0.1", port: 7001, capacity: 10})
			u := use(t, options(api, kit.M{"counter": "players"}))
			kit.Settles(t, "the set", "10.0.0.1:7001/10", known(u))
			kit.Settles(t, "watches", 1, api.Watches)
			put(api, "two", server{state: "Ready", address: "10.0.0.1", port: 7002, capacity: 10})
			kit.Settles(t, "after a start", "10.0.0.1:7001/10 10.0.0.1:7002/10", known(u))
			put(api, "one", server{state: "Allocated", address: "10.0.0.1", port: 7001, capacity: 20})
			kit.Settles(t, "with more room", "10.0.0.1:7001/20 10.0.0.1:7002/10", known(u))
			put(api, "two", server{state: "Shutdown", address: "10.0.0.1", port: 7002})
			kit.Settles(t, "after its end", "10.0.0.1:7001/20", known(u))
			api.Compact(byEvent)
			api.EndWatches()
			put(api, "three", server{state: "Ready", address: "10.0.0.1", port: 7003})
			kit.Settles(t, "after the compaction", "10.0.0.1:7001/20 10.0.0.1:7003", known(u))
			api.Delete(gameservers, "three")
			kit.Settles(t, "after a deletion", "10.0.0.1:7001/20", known(u))
		})
	}
}

// A thousand players who come and go, and servers that start and end, cost no
// list but those that the set needs.
func TestStorm(t *testing.T) {
	api := kubetest.New(t)
	put(api, "one", server{state: "Allocated", address: "10.0.0.1", port: 7001, capacity: 5000})
	u := use(t, options(api, kit.M{"counter": "players"}))
	kit.Settles(t, "the set", "10.0.0.1:7001/5000", known(u))
	kit.Settles(t, "watches", 1, api.Watches)
	before := api.Lists()
	for i := range 1000 {
		put(api, "one", server{state: "Allocated", address: "10.0.0.1", port: 7001, capacity: 5000, count: i})
		put(api, fmt.Sprint("starting-", i), server{state: "Starting"})
	}
	put(api, "two", server{state: "Ready", address: "10.0.0.1", port: 7002})
	kit.Settles(t, "after it", "10.0.0.1:7001/5000 10.0.0.1:7002", known(u))
	// Of three pages, as a page has 500; once more if a list had begun.
	if n := api.Lists() - before; n > 2*3 {
		t.Errorf("asked for %d pages", n)
	}
}

// Which events are news.
func TestConcerns(t *testing.T) {
	api := kubetest.New(t)
	put(api, "one", server{state: "Ready", address: "10.0.0.1", port: 7001, capacity: 10})
	put(api, "left", server{state: "Ready", address: "x", port: 7001})
	a := mustLoad(t, options(api, kit.M{"counter": "players"}))
	addrs(t, a)
	event := func(name, status string) json.RawMessage {
		return json.RawMessage(`{"metadata": {"name": "` + name + `"}, "status": ` + status + `}`)
	}
	const same = `{"state": "Allocated", "address": "10.0.0.1", "ports": [{"port": 7001}], "counters": {"players": {"capacity": 10, "count": 5}}}`
	for name, tc := range map[string]struct {
		object  json.RawMessage
		deleted bool
		want    bool
	}{
		"the same":            {object: event("one", same)},
		"another port":        {object: event("one", strings.Replace(same, "7001", "7002", 1)), want: true},
		"more room":           {object: event("one", strings.Replace(same, "10,", "11,", 1)), want: true},
		"another state":       {object: event("one", strings.Replace(same, "Allocated", "Shutdown", 1)), want: true},
		"gone":                {object: event("one", same), deleted: true, want: true},
		"a new one":           {object: event("two", same), want: true},
		"one that starts":     {object: event("two", `{"state": "Starting"}`)},
		"one that had not":    {object: event("two", `{"state": "Starting"}`), deleted: true},
		"still left out":      {object: event("left", `{"state": "Ready", "address": "y"}`)},
		"no longer":           {object: event("left", same), want: true},
		"not what it must be": {object: json.RawMessage(`[]`), want: true},
	} {
		if got := a.concerns(tc.deleted, tc.object); got != tc.want {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
	a.listing = true
	if !a.concerns(false, event("one", same)) {
		t.Error("while a list is made, nothing is known")
	}
}

// What goes wrong keeps the set, and tells no token.
func TestFaults(t *testing.T) {
	api := kubetest.New(t)
	token := filepath.Join(t.TempDir(), "token")
	write := func(s string) {
		if err := os.WriteFile(token, []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(canary)
	api.Require(canary)
	put(api, "one", server{state: "Ready", address: "10.0.0.1", port: 7001})
	a := mustLoad(t, options(api, kit.M{"token_file": token}))
	if got := addrs(t, a); got != "10.0.0.1:7001" {
		t.Fatalf("listed %s", got)
	}
	for want, answer := range map[string]func(http.ResponseWriter){
		"status 403: no right": func(w http.ResponseWriter) { kubetest.Refuse(w, 403, "Forbidden", "no right for "+canary) },
		"status 307":           func(w http.ResponseWriter) { w.Header().Set("Location", "http://127.0.0.1:1/"); w.WriteHeader(307) },
		"cut off":              func(w http.ResponseWriter) { fmt.Fprint(w, `{"items": [{"metadata":`) },
		"has more than 4 MiB": func(w http.ResponseWriter) {
			fmt.Fprintf(w, `{"items": [{"x": "%s"}]}`, strings.Repeat("x", 6<<20))
		},
		"has no items": func(w http.ResponseWriter) { fmt.Fprint(w, `{}`) },
	} {
		api.Look(func(w http.ResponseWriter, _ *http.Request) bool { answer(w); return true })
		if got := addrs(t, a); !strings.HasPrefix(got, "listing gameservers in namespace games: ") || !strings.Contains(got, want) || strings.Contains(got, canary) {
			t.Errorf("error %s, want %s", got, want)
		}
	}
	api.Look(nil)
	api.Require(canary + "-2")
	write(canary + "-2")
	if got := addrs(t, a); got != "10.0.0.1:7001" {
		t.Errorf("with another token: %s", got)
	}
}

func TestCaddyfile(t *testing.T) {
	for in, want := range map[string]string{
		"agones": `{}`,
		"agones arena {\n label region=eu !old\n states Ready Reserved\n port_name game\n}": `{"fleet":"arena","labels":["region=eu","!old"],"port_name":"game","states":["Ready","Reserved"]}`,
		"agones {\n address_type PodIP\n counter players\n on_empty withdraw\n}":            `{"address_type":"PodIP","counter":"players","on_empty":"withdraw"}`,
		"agones {\n list rooms\n namespace games\n api https://k\n refresh_interval 30s\n}": `{"api":"https://k","list":"rooms","namespace":"games","refresh_interval":30000000000}`,
		"agones {\n token_file /t\n ca_file /c\n}":                                          `{"ca_file":"/c","token_file":"/t"}`,
		"agones {\n kubeconfig /k staging\n}":                                               `{"context":"staging","kubeconfig":"/k"}`,
		"agones a b":                                                                        `unexpected argument "b" of the source agones`,
		"agones {\n address_type pod\n}":                                                    `address_type: "pod" is none of ExternalIP, InternalIP, PodIP`,
		"agones {\n fleet arena\n}":                                                         `unrecognized option "fleet" of the source agones`,
		"agones {\n counter a\n counter b\n}":                                               `counter: given twice`,
	} {
		a := new(Source)
		var got string
		if err := a.UnmarshalCaddyfile(caddyfile.NewTestDispenser(in)); err != nil {
			got = err.Error()
		} else {
			b, err := json.Marshal(a)
			if err != nil {
				t.Fatal(err)
			}
			var m kit.M
			if err := json.Unmarshal(b, &m); err != nil {
				t.Fatal(err)
			}
			b, _ = json.Marshal(m)
			got = string(b)
		}
		if !strings.HasPrefix(want, "{") && strings.Contains(got, want) {
			continue
		}
		if got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}
