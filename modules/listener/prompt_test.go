package listener_test

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/relay/tcprelay"
	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
	_ "github.com/wayhouse-proxy/wayhouse/matchers/clientcidr"
	_ "github.com/wayhouse-proxy/wayhouse/matchers/dst"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	wl "github.com/wayhouse-proxy/wayhouse/modules/listener"
	_ "github.com/wayhouse-proxy/wayhouse/modules/sniff/wasm"
)

// guestDir is a directory with one WASM sniffer, named game.
func guestDir(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("../sniff/wasm/testdata/guests/ok-host.wasm")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "game.wasm"), b, 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestPrompt has every kind of matcher as the first that a connection meets:
// those that cannot block are asked by the worker that has accepted it, and any
// of which that is not known, or which runs code of others, in a goroutine.
func TestPrompt(t *testing.T) {
	t.Setenv("PROMPT_TEST", "a.example.com")
	dir := guestDir(t)
	for match, worker := range map[string]bool{
		`{}`: true,
		`{"first_bytes": {"prefix": "ascii:hello"}}`:                                   true,
		`{"client_cidr": {"cidrs": ["10.0.0.0/8"]}}`:                                   true,
		`{"dst": {"cidrs": ["10.0.0.0/8"]}, "first_bytes": {"prefix": "ascii:hello"}}`: true,
		`{"port": {"ports": ["1-65535"]}}`:                                             true,
		`{"sni": {"host": ["a.example.com"]}}`:                                         true,
		`{"sniffer": {"name": "minecraft"}}`:                                           true,
		`{"test_panics_flow": {}}`:                                                     true, // one of others that promises it
		`{"test_from": {"ip": "10.0.0.1"}}`:                                            true, // likewise
		`{"regexp": {"pattern": "^hello", "count": 5}}`:                                true,
		`{"ssh": {}}`:            true,
		`{"xmpp": {}}`:           true,
		`{"postgres": {}}`:       true,
		`{"socks4": {}}`:         true,
		`{"socks5": {}}`:         true,
		`{"proxy_protocol": {}}`: true,
		`{"remote_ip": {"ranges": ["10.0.0.0/8"]}}`: true,
		`{"local_ip": {"ranges": ["10.0.0.0/8"]}}`:  true,
		`{"tls": {}}`: true,
		`{"tls": {"sni": ["a.example.com"], "alpn": ["h2"]}}`:                              true,
		`{"tls": {"sni_regexp": {"pattern": "^a{1,2}[.]"}}}`:                               true,
		`{"not": [{"first_bytes": {"prefix": "ascii:hello"}, "ssh": {}}]}`:                 true,
		`{"first_bytes": {"prefix": "ascii:hello"}}, {"sni": {"host": ["a.example.com"]}}`: true,

		`{"sniffer": {"name": "game"}}`:                                     false,
		`{"sniffer": {"name": "minecraft"}}, {"sniffer": {"name": "game"}}`: false,
		`{"not": [{"sniffer": {"name": "game"}}]}`:                          false,
		`{"test_panics": {}}`:                                               false,
		`{"tls": {"sni": ["{env.PROMPT_TEST}"]}}`:                           false,
		`{"http": [{"host": ["a.example.com"]}]}`:                           false,
		`{"rdp": {}}`:    false,
		`{"winbox": {}}`: false,
		`{"clock": {"after": "00:00:00", "before": "23:59:59"}}`:                 false,
		`{"not": [{"http": [{"host": ["a.example.com"]}]}]}`:                     false,
		`{"first_bytes": {"prefix": "ascii:hello"}, "rdp": {}}`:                  false,
		`{"first_bytes": {"prefix": "ascii:hello"}}, {"winbox": {}}`:             false,
		`{"not": [{"not": [{"tls": {"alpn": ["{file./dev/null}"]}}]}]}`:          false,
		`{"remote_ip": {"ranges": ["10.0.0.0/8"]}, "sniffer": {"name": "game"}}`: false,
	} {
		t.Run(match, func(t *testing.T) {
			load(t, fmt.Sprintf(`{"sniffers": {"wasm": {"dir": %q}}, "listeners": {"l": %s}}`, dir,
				listener("tcp/127.0.0.1:0", ``, `"routes": [`+pooled(match, "127.0.0.1:9")+`]`)))
			defer testkit.Settles(t, "the number of flows", 0, func() int64 { return flow.ListenerOf("l").Conns.Load() })
			o := meet(t)
			if d := accept(o); (d != tcprelay.Take) != worker {
				t.Errorf("on the worker: %v, want %v", d != tcprelay.Take, worker)
			}
		})
	}
}

// meet is a connection to the listener l of which nothing will come.
func meet(t *testing.T) *tcprelay.Opening {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(fds[1])
	return &tcprelay.Opening{FD: fds[0], Client: netip.MustParseAddrPort("127.0.0.1:5"), Local: netip.MustParseAddrPort(addr(t, "l"))}
}

// accept is what the listener answers about a connection, which is then ended.
func accept(o *tcprelay.Opening) tcprelay.Decision {
	d := wl.AcceptorAt(o.Local).Accept(o)
	last := d
	if d == tcprelay.Peek {
		last = o.Looker.Look(o, nil, true)
	}
	if last == tcprelay.Forward {
		gaveUp.Client = o.Client
		o.Dialer.GaveUp(&gaveUp, 0)
	}
	if last != tcprelay.Take { // else it is the goroutine's
		unix.Close(o.FD)
	}
	return d
}

// TestPromptBesideForeign holds that a WASM sniffer of one route takes every
// flow of the listener along, for it may want any of them dropped.
func TestPromptBesideForeign(t *testing.T) {
	hello := pooled(`{"first_bytes": {"prefix": "ascii:hello"}}`, "127.0.0.1:9")
	minecraft := pooled(`{"sniffer": {"name": "minecraft"}}`, "127.0.0.1:9")
	game := pooled(`{"sniffer": {"name": "game"}}`, "127.0.0.1:9")
	for name, tc := range map[string]struct {
		routes string
		worker bool
	}{
		"bytes, native":          {hello + "," + minecraft, true},
		"native, bytes, foreign": {minecraft + "," + hello + "," + game, false},
		"foreign, bytes":         {game + "," + hello, false},
	} {
		t.Run(name, func(t *testing.T) {
			load(t, fmt.Sprintf(`{"sniffers": {"wasm": {"dir": %q}}, "listeners": {"l": %s}}`, guestDir(t),
				listener("tcp/127.0.0.1:0", ``, `"routes": [`+tc.routes+`]`)))
			defer testkit.Settles(t, "the number of flows", 0, func() int64 { return flow.ListenerOf("l").Conns.Load() })
			if d := accept(meet(t)); (d != tcprelay.Take) != tc.worker {
				t.Errorf("on the worker: %v, want %v", d != tcprelay.Take, tc.worker)
			}
		})
	}
}
