package hostport

import (
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for in, want := range map[string]string{
		"10.0.0.1:7777":         "10.0.0.1:7777",
		"[::ffff:10.0.0.1]:7":   "10.0.0.1:7",
		"[2001:db8::1]:7":       "[2001:db8::1]:7",
		"Game.Example.com.:7":   "game.example.com:7",
		"_a.game-1.example:080": "_a.game-1.example:80",

		"[fe80::1%eth0.100]:7": "[fe80::1%eth0.100]:7",
		"[fe80::1%2]:7":        "[fe80::1%2]:7",

		"[fe80::1%a\x00b]:7":             "error: not the name of a network interface",
		"[fe80::1%a\nb]:7":               "error: not the name of a network interface",
		"[fe80::1%a b]:7":                "error: not the name of a network interface",
		"[fe80::1%ä]:7":                  "error: not the name of a network interface",
		"[fe80::1%a/b]:7":                "error: not the name of a network interface",
		"[fe80::1%sixteen-letters0]:7":   "error: not the name of a network interface",
		"10.0.0.1":                       "error: neither ip:port nor host:port",
		"10.0.0.1:0":                     "error: the port is not a number",
		"10.0.0.1:65536":                 "error: the port is not a number",
		"0.0.0.0:7":                      "error: not the address of one host",
		"[::ffff:0.0.0.0]:7":             "error: not the address of one host",
		"[ff02::1]:7":                    "error: not the address of one host",
		"255.255.255.255:7":              "error: not the address of one host",
		"10.0.0:7":                       "error: neither an IP address nor a host name",
		"a..b:7":                         "error: neither an IP address nor a host name",
		"-a.b:7":                         "error: neither an IP address nor a host name",
		":7":                             "error: neither an IP address nor a host name",
		strings.Repeat("a", 64) + ".b:7": "error: neither an IP address nor a host name",
	} {
		got, err := Parse(in)
		if text, bad := strings.CutPrefix(want, "error: "); bad {
			if err == nil || !strings.Contains(err.Error(), text) {
				t.Errorf("Parse(%q) = %v, %v, want %s", in, got, err, want)
			}
			continue
		}
		if err != nil || got.String() != want {
			t.Errorf("Parse(%q) = %v, %v, want %s", in, got, err, want)
		}
	}
}

func TestParseList(t *testing.T) {
	for want, list := range map[string][]string{
		"none":            nil,
		"is listed twice": {"10.0.0.1:1", "[::ffff:10.0.0.1]:1"},
		"listed twice":    {"a.test:1", "A.test.:1"},
	} {
		if _, err := ParseList(list); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", list, err, want)
		}
	}
}

func TestLoopback(t *testing.T) {
	for host, want := range map[string]bool{
		"localhost": true, "LocalHost": true, "127.0.0.1": true, "127.9.8.7": true, "::1": true, "::ffff:127.0.0.1": true,
		"": false, "localhost.example.com": false, "0.0.0.0": false, "::": false, "10.0.0.1": false, "127.0.0.1.example.com": false,
	} {
		if got := Loopback(host); got != want {
			t.Errorf("%q: %v, want %v", host, got, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"10.0.0.1:1", "[::1]:2", "a.example:3", "a.example.:3", ":1", "x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		a, err := Parse(s)
		if err != nil {
			return
		}
		b, err := Parse(a.String())
		if err != nil || a != b {
			t.Errorf("%q is %v, which reads as %v, %v", s, a, b, err)
		}
	})
}
