package sniff

import (
	"fmt"
	"strings"
	"testing"

	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestHosts(t *testing.T) {
	patterns := []string{"Exact.Example.com.", "*.below.example.com", ".both.example.com", "localhost", "203.0.113.5", "my_host.example", "2001:db8::1"}
	want := map[string]bool{
		"exact.example.com": true, "x.exact.example.com": false, "example.com": false, "": false, ".": false,
		"below.example.com": false, "a.below.example.com": true, "b.a.below.example.com": true, ".below.example.com": false, "xbelow.example.com": false,
		"both.example.com": true, "a.both.example.com": true, "aboth.example.com": false,
		"localhost": true, "203.0.113.5": true, "my_host.example": true, "2001:db8::1": true,
		"exact.example.com.evil.example": false, strings.Repeat("a.", 200) + "both.example.com": false,
	}
	// Many other patterns change nothing.
	for _, more := range []int{0, 10, 10_000} {
		list := append([]string(nil), patterns...)
		for i := range more {
			list = append(list, fmt.Sprintf("h%d.other.example", i), fmt.Sprintf("*.s%d.other.example", i))
		}
		h, err := ParseHosts(list)
		if err != nil {
			t.Fatal(err)
		}
		for host, want := range want {
			if got := h.Match([]byte(host)); got != want {
				t.Errorf("with %d more patterns, %q: %v", more, host, got)
			}
		}
		name := []byte("b.a.below.example.com")
		if n := testing.AllocsPerRun(100, func() { h.Match(name) }); n > 0 && !testkit.Race {
			t.Errorf("%v allocations", n)
		}
	}
}

func TestHostErrors(t *testing.T) {
	for pattern, want := range map[string]string{
		"": "0 characters", ".": "0 characters", "*.": "0 characters", "a..b": "a label is empty", "*": "a star is for all labels",
		"a.*.b": "a star is for all labels", "*.*.b": "a star is for all labels", "bücher.example": "with xn--", "a b": "' ' does not belong",
		"a/b": "'/' does not belong", strings.Repeat("a", 254): "254 characters",
	} {
		_, err := ParseHosts([]string{"ok.example", pattern})
		if err == nil || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), "host[1]: ") {
			t.Errorf("%q: %v, want %s", pattern, err, want)
		}
	}
}

// A host that a sniffer reports is compared as the patterns are, however it is
// written.
func FuzzHosts(f *testing.F) {
	f.Add("Example.com", "example.com.")
	f.Add("*.example.com", "a.EXAMPLE.com")
	f.Add(".example.com", "example.com")
	f.Fuzz(func(t *testing.T, pattern, host string) {
		h, err := ParseHosts([]string{pattern})
		if err != nil {
			return
		}
		var hint Hint
		hint.SetHost([]byte(host))
		name := strings.TrimSuffix(lower(host), ".")
		suffix := strings.TrimSuffix(lower(pattern), ".")
		var want bool
		switch {
		case strings.HasPrefix(pattern, "*."):
			want = strings.HasSuffix(name, suffix[1:]) && len(name) > len(suffix[1:])
		case strings.HasPrefix(pattern, "."):
			want = name == suffix[1:] || strings.HasSuffix(name, suffix) && len(name) > len(suffix)
		default:
			want = name == suffix
		}
		if strings.HasPrefix(name, ".") || strings.Contains(name, "..") {
			return // no name, and not one that a pattern has to tell from others
		}
		if len(name) > maxHost {
			want = false
		}
		if got := h.Match(hint.Host); got != want {
			t.Errorf("%q, %q: %v", pattern, host, got)
		}
	})
}

func lower(s string) string {
	return strings.Map(func(r rune) rune {
		if 'A' <= r && r <= 'Z' {
			return r + 'a' - 'A'
		}
		return r
	}, s)
}
