package kubernetes

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/kube"
	"github.com/wayhouse-proxy/wayhouse/internal/kube/kubetest"
	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/discovery"
)

const (
	canary = "canary-3c0e-token"
	slices = "/apis/discovery.k8s.io/v1/namespaces/games/endpointslices"
)

func file(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func provision(t *testing.T, s *Source) (*Source, error) {
	t.Helper()
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	t.Cleanup(cancel)
	t.Cleanup(func() { s.Close() })
	err := s.Provision(ctx)
	if err == nil {
		err = s.Validate()
	}
	return s, err
}

func source(t *testing.T, api *kubetest.API, s options) *Source {
	t.Helper()
	got, err := provision(t, &Source{
		Service: "game", PortName: s.PortName, Family: s.Family,
		Access: kube.Access{API: api.URL, Namespace: "games"},
	})
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// options are those of a source that tests change.
type options struct {
	PortName string
	Family   Family
}

func list(t *testing.T, s *Source) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), kit.Long)
	defer cancel()
	set, err := s.List(ctx)
	if err != nil {
		return "error: " + err.Error()
	}
	var all []string
	for _, e := range set.Endpoints {
		all = append(all, e.Addr.String())
	}
	return strings.Join(all, " ")
}

// putSlice makes a slice of the service game, from JSON.
func putSlice(t *testing.T, api *kubetest.API, name, body string) {
	t.Helper()
	var m map[string]any
	if err := json.Unmarshal([]byte(body), &m); err != nil {
		t.Fatalf("%s: %v", body, err)
	}
	m["kind"], m["apiVersion"] = "EndpointSlice", "discovery.k8s.io/v1"
	api.Put(slices, name, map[string]string{serviceLabel: "game"}, m)
}

func TestSlices(t *testing.T) {
	const ports = `"ports":[{"name":"query","port":27015,"protocol":"UDP"},{"name":"game","port":7777,"protocol":"UDP"}]`
	for name, tc := range map[string]struct {
		slices []string
		o      options
		want   string
	}{
		"none":        {want: ""},
		"the first":   {[]string{`{"addressType":"IPv4",` + ports + `,"endpoints":[{"addresses":["10.0.0.1"]}]}`}, options{}, "10.0.0.1:27015"},
		"by name":     {[]string{`{"addressType":"IPv4",` + ports + `,"endpoints":[{"addresses":["10.0.0.1"]}]}`}, options{PortName: "game"}, "10.0.0.1:7777"},
		"no such":     {[]string{`{"addressType":"IPv4",` + ports + `,"endpoints":[{"addresses":["10.0.0.1"]}]}`}, options{PortName: "rcon"}, ""},
		"no ports":    {[]string{`{"addressType":"IPv4","ports":null,"endpoints":[{"addresses":["10.0.0.1"]}]}`}, options{}, ""},
		"any port":    {[]string{`{"addressType":"IPv4","ports":[{"name":"","protocol":"UDP"}],"endpoints":[{"addresses":["10.0.0.1"]}]}`}, options{}, ""},
		"unnamed":     {[]string{`{"addressType":"IPv4","ports":[{"name":"","port":7}],"endpoints":[{"addresses":["10.0.0.1"]}]}`}, options{}, "10.0.0.1:7"},
		"no endpoint": {[]string{`{"addressType":"IPv4",` + ports + `,"endpoints":null}`}, options{}, ""},
		"ready": {[]string{`{"addressType":"IPv4",` + ports + `,"endpoints":[
			{"addresses":["10.0.0.1"],"conditions":{"ready":true}},
			{"addresses":["10.0.0.2"],"conditions":{"ready":false}},
			{"addresses":["10.0.0.3"],"conditions":{}},
			{"addresses":["10.0.0.4"],"conditions":{"ready":null}},
			{"addresses":["10.0.0.5"],"conditions":{"ready":false,"serving":true,"terminating":true}},
			{"addresses":["10.0.0.6"],"conditions":{"ready":true,"serving":true,"terminating":false}}]}`}, options{PortName: "game"},
			"10.0.0.1:7777 10.0.0.3:7777 10.0.0.4:7777 10.0.0.6:7777"},
		"first address": {[]string{`{"addressType":"IPv4",` + ports + `,"endpoints":[{"addresses":["10.0.0.1","10.0.0.2"]},{"addresses":[]}]}`}, options{}, "10.0.0.1:27015"},
		"FQDN": {[]string{
			`{"addressType":"FQDN",` + ports + `,"endpoints":[{"addresses":["a.example.com"]},{"addresses":["10.0.0.9"]}]}`,
			`{"addressType":"IPv4",` + ports + `,"endpoints":[{"addresses":["10.0.0.1"]}]}`}, options{}, "10.0.0.1:27015"},
		"some without the port": {[]string{
			`{"addressType":"IPv4","ports":[{"name":"web","port":80}],"endpoints":[{"addresses":["10.0.0.1"]}]}`,
			`{"addressType":"IPv4",` + ports + `,"endpoints":[{"addresses":["10.0.0.2"]}]}`}, options{PortName: "game"}, "10.0.0.2:7777"},
		"each has its first": {[]string{
			`{"addressType":"IPv4","ports":[{"name":"x","port":80}],"endpoints":[{"addresses":["10.0.0.1"]}]}`,
			`{"addressType":"IPv4","ports":[{"name":"x","port":81}],"endpoints":[{"addresses":["10.0.0.2"]}]}`}, options{}, "10.0.0.1:80 10.0.0.2:81"},
		"both families": {[]string{
			`{"addressType":"IPv4",` + ports + `,"endpoints":[{"addresses":["10.0.0.1"]}]}`,
			`{"addressType":"IPv6",` + ports + `,"endpoints":[{"addresses":["fd00::1"]}]}`}, options{}, "10.0.0.1:27015 [fd00::1]:27015"},
		"IPv4": {[]string{
			`{"addressType":"IPv4",` + ports + `,"endpoints":[{"addresses":["10.0.0.1"]}]}`,
			`{"addressType":"IPv6",` + ports + `,"endpoints":[{"addresses":["fd00::1"]}]}`}, options{Family: IPv4}, "10.0.0.1:27015"},
		"IPv6": {[]string{
			`{"addressType":"IPv4",` + ports + `,"endpoints":[{"addresses":["10.0.0.1"]}]}`,
			`{"addressType":"IPv6",` + ports + `,"endpoints":[{"addresses":["fd00::1"]}]}`}, options{Family: IPv6}, "[fd00::1]:27015"},
		"no address": {[]string{`{"addressType":"IPv4",` + ports + `,"endpoints":[{"addresses":["x"]}]}`}, options{}, "invalid AddrPort"},
	} {
		t.Run(name, func(t *testing.T) {
			api := kubetest.New(t)
			for i, body := range tc.slices {
				putSlice(t, api, fmt.Sprintf("game-%d", i), body)
			}
			api.Put(slices, "other", map[string]string{serviceLabel: "other"}, map[string]any{"addressType": "IPv4"})
			if got := list(t, source(t, api, tc.o)); got != tc.want {
				t.Errorf("listed %q, want %q", got, tc.want)
			}
		})
	}
}

// TestService has a service come, change and go, while the source watches.
func TestService(t *testing.T) {
	api := kubetest.New(t)
	s := source(t, api, options{})
	ctx, cancel := context.WithCancel(context.Background())
	changed, done := make(chan struct{}, 16), make(chan error)
	go func() { done <- s.Watch(ctx, func() { changed <- struct{}{} }) }()
	expect := func(want string) {
		t.Helper()
		if got := list(t, s); got != want {
			t.Fatalf("listed %q, want %q", got, want)
		}
	}
	wait := func() {
		t.Helper()
		select {
		case <-changed:
		case <-time.After(kit.Long):
			t.Fatal("no change is told")
		}
	}
	expect("")
	putSlice(t, api, "game-1", `{"addressType":"IPv4","ports":[{"port":7}],"endpoints":[{"addresses":["10.0.0.1"]}]}`)
	wait()
	expect("10.0.0.1:7")
	putSlice(t, api, "game-1", `{"addressType":"IPv4","ports":[{"port":7}],"endpoints":[{"addresses":["10.0.0.2"]}]}`)
	wait()
	expect("10.0.0.2:7")
	api.Delete(slices, "game-1")
	wait()
	expect("")
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestAccount asks as a service account, over TLS.
func TestAccount(t *testing.T) {
	api := kubetest.NewTLS(t)
	api.Require(canary)
	ca := file(t, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: api.Certificate().Raw})))
	for name, tc := range map[string]struct{ token, ca, want string }{
		"right":           {canary, ca, ""},
		"wrong token":     {canary + "-old", ca, "error: listing endpointslices in namespace games: status 401: Unauthorized"},
		"wrong authority": {canary, "", "error: listing endpointslices in namespace games: tls: failed to verify certificate"},
	} {
		s, err := provision(t, &Source{Service: "game", Access: kube.Access{
			API: api.URL, Namespace: "games", TokenFile: file(t, tc.token), CAFile: tc.ca,
		}})
		if err != nil {
			t.Fatal(err)
		}
		if got := list(t, s); tc.want == "" && got != "" || !strings.HasPrefix(got, tc.want) || strings.Contains(got, canary) {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
	}
}

func TestProvisionRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		s    *Source
		want string
	}{
		"no service": {&Source{}, "service: none"},
		"service":    {&Source{Service: "a,b"}, `service: "a,b" is not made of`},
		"long":       {&Source{Service: strings.Repeat("a", 64)}, "service: "},
		"port":       {&Source{Service: "a", PortName: "A B"}, `port_name: "A B" is not made of`},
		"family":     {&Source{Service: "a", Family: "ipv5"}, `family: "ipv5" is neither ipv4 nor ipv6`},
		"api":        {&Source{Service: "a", Access: kube.Access{API: "http://192.0.2.1"}}, "api: "},
		"interval": {&Source{Service: "a", Access: kube.Access{API: "https://192.0.2.1"},
			Settings: discovery.Settings{RefreshInterval: new(caddy.Duration)}}, "refresh_interval: 0s is less than 1s"},
	} {
		if _, err := provision(t, tc.s); err == nil || !strings.HasPrefix(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %s…", name, err, tc.want)
		}
	}
}

func TestCaddyfile(t *testing.T) {
	var s Source
	d := caddyfile.NewTestDispenser("kubernetes game {\n namespace games\n port_name query\n family ipv6\n api https://a\n token_file /t\n ca_file /c\n refresh_interval 1m\n}")
	if err := s.UnmarshalCaddyfile(d); err != nil {
		t.Fatal(err)
	}
	got, _ := json.Marshal(&s)
	want := `{"refresh_interval":60000000000,"namespace":"games","api":"https://a","token_file":"/t","ca_file":"/c","service":"game","port_name":"query","family":"ipv6"}`
	if string(got) != want {
		t.Errorf("read %s, want %s", got, want)
	}
	for text, want := range map[string]string{
		"kubernetes":                           "the service is missing",
		"kubernetes a b":                       `unexpected argument "b" of the source kubernetes`,
		"kubernetes a {\n family v4\n}":        `family: "v4" is none of ipv4, ipv6`,
		"kubernetes a {\n kubeconfig\n}":       "kubeconfig: the path is missing",
		"kubernetes a {\n kubeconfig a b c\n}": `kubeconfig: unexpected argument "c"`,
		"kubernetes a {\n port game\n}":        `unrecognized option "port" of the source kubernetes; did you mean port_name?`,
	} {
		if err := new(Source).UnmarshalCaddyfile(caddyfile.NewTestDispenser(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

func FuzzSlice(f *testing.F) {
	for _, s := range []string{
		`{"addressType":"IPv4","ports":[{"name":"game","port":7777}],"endpoints":[{"addresses":["10.0.0.1"],"conditions":{"ready":true}}]}`,
		`{"addressType":"IPv6","ports":[{"port":1}],"endpoints":[{"addresses":["fe80::1%eth0"]},{}]}`,
		`{"addressType":"FQDN"}`, `{"ports":[{"port":70000}]}`, `null`,
	} {
		f.Add([]byte(s), "game")
	}
	f.Fuzz(func(t *testing.T, b []byte, port string) {
		var sl slice
		if json.Unmarshal(b, &sl) != nil {
			return
		}
		found := (&Source{PortName: port}).add(nil, &sl)
		if len(found) > len(sl.Endpoints) {
			t.Errorf("%d were found among %d", len(found), len(sl.Endpoints))
		}
		for _, e := range found {
			if e.Addr.Port() == 0 {
				t.Errorf("found %+v", e)
			}
		}
	})
}
