package ticket

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/mholt/caddy-l4/layer4"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/ticket"
)

const hexKey = "hex:3031323334353637383961626364656630313233343536373839616263646566"

var (
	keyBytes, _ = ticket.ParseKey(hexKey)
	client      = netip.MustParseAddrPort("203.0.113.7:40000")
)

func load(t *testing.T, config string) (*Matcher, error) {
	t.Helper()
	ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
	t.Cleanup(cancel)
	m, err := ctx.LoadModuleByID("layer4.matchers.ticket", json.RawMessage(config))
	if err != nil {
		return nil, err
	}
	return m.(*Matcher), nil
}

func mustLoad(t *testing.T, config string) *Matcher {
	t.Helper()
	m, err := load(t, config)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func newTicket(t *testing.T, pool string, ttl time.Duration, ip netip.Addr) []byte {
	t.Helper()
	b, err := ticket.Mint(keyBytes, pool, time.Now().Add(ttl), ip)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// conn is a connection of which only the addresses are asked.
type conn struct {
	net.Conn
	udp bool
}

func (c conn) addr(a netip.AddrPort) net.Addr {
	if c.udp {
		return net.UDPAddrFromAddrPort(a)
	}
	return net.TCPAddrFromAddrPort(a)
}

func (c conn) RemoteAddr() net.Addr { return c.addr(client) }
func (c conn) LocalAddr() net.Addr  { return c.addr(netip.MustParseAddrPort("192.0.2.1:7777")) }

func match(m *Matcher, udp bool, first []byte) string {
	ok, err := m.Match(layer4.WrapConnection(conn{udp: udp}, first, zap.NewNop()))
	switch {
	case errors.Is(err, layer4.ErrConsumedAllPrefetchedBytes):
		return "more"
	case err != nil:
		return err.Error()
	case ok:
		return "yes"
	}
	return "no"
}

func TestMatch(t *testing.T) {
	plain := mustLoad(t, `{"keys": ["hex:00000000000000000000000000000000", "`+hexKey+`"], "pool": "survival"}`)
	later := mustLoad(t, `{"keys": ["`+hexKey+`"], "pool": "survival", "offset": 4, "bind_ip": true}`)
	good := newTicket(t, "survival", time.Hour, netip.Addr{})
	mine := newTicket(t, "survival", time.Hour, client.Addr())
	at4 := append([]byte("HDR:"), mine...)
	for name, tc := range map[string]struct {
		m     *Matcher
		first []byte
		want  string
	}{
		"good":               {plain, append(bytes.Clone(good), "data"...), "yes"},
		"for this client":    {plain, mine, "yes"},
		"for another client": {plain, newTicket(t, "survival", time.Hour, netip.MustParseAddr("203.0.113.8")), "no"},
		"expired":            {plain, newTicket(t, "survival", -time.Second, netip.Addr{}), "no"},
		"of another pool":    {plain, newTicket(t, "creative", time.Hour, netip.Addr{}), "no"},
		"at its offset":      {later, at4, "yes"},
		"not at its offset":  {later, mine, "no"},
		"not bound":          {later, append([]byte("HDR:"), good...), "no"},
		"something else":     {plain, []byte("GET / HTTP/1.1\r\nHost: example.com\r\n\r\n"), "no"},
	} {
		for _, udp := range []bool{false, true} {
			if got := match(tc.m, udp, tc.first); got != tc.want {
				t.Errorf("%s, udp %v: %s, want %s", name, udp, got, tc.want)
			}
		}
	}
	// Cut anywhere, a stream with a good ticket is undecided, and a datagram is
	// none.
	for n := range len(at4) {
		if got := match(later, false, at4[:n]); got != "more" {
			t.Errorf("%d bytes of a stream: %s", n, got)
		}
		if got := match(later, true, at4[:n]); n > 0 && got != "no" {
			t.Errorf("a datagram of %d bytes: %s", n, got)
		}
	}
	if got := match(plain, false, []byte("GE")); got != "no" {
		t.Errorf("what can be no ticket: %s", got)
	}
}

func TestConfig(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(file, []byte(hexKey+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TICKET_KEY", hexKey)
	for config, want := range map[string]string{
		`{"keys": ["{env.TICKET_KEY}", "{file.` + file + `}"], "pool": "a"}`: "",
		`{"keys": ["` + hexKey + `"], "pool": "a", "offset": 4096}`:          "",
		`{"pool": "a"}`:                                                 "keys: none; give at least one",
		`{"keys": ["` + hexKey + `"]}`:                                  "pool: missing",
		`{"keys": ["{env.NO_SUCH_KEY}"], "pool": "a"}`:                  "keys[0]: ",
		`{"keys": ["` + hexKey + `", "secret!"], "pool": "a"}`:          "keys[1]: a key is hex: or base64: and",
		`{"keys": ["hex:00"], "pool": "a"}`:                             "keys[0]: the key has 1 bytes, not 16 to 1024",
		`{"keys": ["` + hexKey + `"], "pool": "a", "offset": -1}`:       "offset: -1 is not from 0 to 4096",
		`{"keys": ["` + hexKey + `"], "pool": "a", "bindip": true}`:     "bindip: unknown key; did you mean bind_ip?",
		`{"keys": [` + strings.Repeat(`"x",`, 8) + `"x"], "pool": "a"}`: "keys: 9 are more than 8",
	} {
		_, err := load(t, config)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %s", config, err, want)
		}
	}
}

func TestCaddyfile(t *testing.T) {
	for in, want := range map[string]string{
		"ticket {\n key a {env.B}\n key c\n pool p\n offset 4\n bind_ip\n}": `{"keys":["a","{env.B}","c"],"pool":"p","offset":4,"bind_ip":true}`,
		"ticket x":                  `unexpected argument "x" of ticket`,
		"ticket {\n pol p\n}":       `unrecognized option "pol" of ticket; did you mean pool?`,
		"ticket {\n offset four\n}": `offset: "four" is not a whole number`,
	} {
		var m Matcher
		var got string
		if err := m.UnmarshalCaddyfile(caddyfile.NewTestDispenser(in)); err != nil {
			got = err.Error()
		} else {
			b, _ := json.Marshal(&m)
			got = string(b)
		}
		if !strings.HasPrefix(got, want) {
			t.Errorf("%s: got %s, want %s", in, got, want)
		}
	}
}

func TestMint(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(file, []byte(hexKey+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	m := mustLoad(t, `{"keys": ["`+hexKey+`"], "pool": "survival"}`)
	for format, decode := range map[string]func(string) ([]byte, error){
		"hex":    func(s string) ([]byte, error) { return hex.DecodeString(strings.TrimSuffix(s, "\n")) },
		"base64": func(s string) ([]byte, error) { return base64.StdEncoding.DecodeString(strings.TrimSuffix(s, "\n")) },
		"raw":    func(s string) ([]byte, error) { return []byte(s), nil },
	} {
		for _, ip := range []string{"", "203.0.113.7"} {
			var out bytes.Buffer
			if err := (&mint{file, "survival", "5m", ip, format}).run(&out, time.Now()); err != nil {
				t.Fatal(err)
			}
			b, err := decode(out.String())
			if err != nil || match(m, true, b) != "yes" {
				t.Errorf("%s for %q: %q, %v: %s", format, ip, out.String(), err, match(m, true, b))
			}
		}
	}
	for want, c := range map[string]mint{
		"--key-file: missing":         {"", "a", "5m", "", "hex"},
		"--pool: missing":             {file, "", "5m", "", "hex"},
		"--key-file: open ":           {file + "x", "a", "5m", "", "hex"},
		`--ttl: "x" is not`:           {file, "a", "x", "", "hex"},
		`--ttl: "1ms" is not`:         {file, "a", "1ms", "", "hex"},
		`--ip: "lo" is not`:           {file, "a", "5m", "lo", "hex"},
		`--format: "json" is none of`: {file, "a", "5m", "", "json"},
	} {
		if err := c.run(io.Discard, time.Now()); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}
