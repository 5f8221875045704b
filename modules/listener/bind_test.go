package listener

import (
	"strings"
	"testing"
)

func TestParseBind(t *testing.T) {
	for name, tc := range map[string]struct {
		in   string
		want []string // first and last
		n    int
		err  string
	}{
		"one port":               {in: "udp/0.0.0.0:7777", n: 1, want: []string{"udp/0.0.0.0:7777", "udp/0.0.0.0:7777"}},
		"IPv6":                   {in: "tcp/[2001:db8::1]:443", n: 1, want: []string{"tcp/[2001:db8::1]:443", "tcp/[2001:db8::1]:443"}},
		"every address":          {in: "tcp/:443", n: 1, want: []string{"tcp/[::]:443", "tcp/[::]:443"}},
		"IPv4-mapped is IPv4":    {in: "tcp/[::ffff:192.0.2.1]:443", n: 1, want: []string{"tcp/192.0.2.1:443", "tcp/192.0.2.1:443"}},
		"kernel's port":          {in: "udp/127.0.0.1:0", n: 1, want: []string{"udp/127.0.0.1:0", "udp/127.0.0.1:0"}},
		"range":                  {in: "udp/0.0.0.0:30000-30099", n: 100, want: []string{"udp/0.0.0.0:30000", "udp/0.0.0.0:30099"}},
		"range of one":           {in: "udp/0.0.0.0:30000-30000", n: 1, want: []string{"udp/0.0.0.0:30000", "udp/0.0.0.0:30000"}},
		"largest range":          {in: "udp/0.0.0.0:64512-65535", n: 1024, want: []string{"udp/0.0.0.0:64512", "udp/0.0.0.0:65535"}},
		"range too large":        {in: "udp/0.0.0.0:1-1025", err: "1025 ports are more than 1024"},
		"range backwards":        {in: "udp/0.0.0.0:300-200", err: "write 200-300"},
		"range from zero":        {in: "udp/0.0.0.0:0-5", err: "begins at port 1"},
		"no network":             {in: "0.0.0.0:7777", err: "does not begin with tcp/ or udp/"},
		"other network":          {in: "unix//run/x.sock", err: "does not begin with tcp/ or udp/"},
		"no port":                {in: "udp/0.0.0.0", err: "has no port"},
		"empty port":             {in: "udp/0.0.0.0:", err: `port ""`},
		"port too large":         {in: "udp/0.0.0.0:65536", err: `port "65536"`},
		"name":                   {in: "udp/game.example.com:7777", err: "is not an IP address"},
		"IPv6 without brackets":  {in: "udp/2001:db8::1:7777", err: "stands in brackets"},
		"IPv4 in brackets":       {in: "udp/[192.0.2.1]:7777", err: "only an IPv6 address"},
		"end of a range missing": {in: "udp/0.0.0.0:7-", err: `port ""`},
		"nothing":                {in: "", err: "does not begin with"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ParseBind(tc.in)
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) {
					t.Fatalf("ParseBind(%q) = %v, %v; want an error with %q", tc.in, got, err, tc.err)
				}
				return
			}
			if err != nil || len(got) != tc.n {
				t.Fatalf("ParseBind(%q) = %d addresses, %v; want %d", tc.in, len(got), err, tc.n)
			}
			if first, last := got[0].String(), got[len(got)-1].String(); first != tc.want[0] || last != tc.want[1] {
				t.Errorf("ParseBind(%q) = %s … %s, want %s … %s", tc.in, first, last, tc.want[0], tc.want[1])
			}
		})
	}
}

func FuzzParseBind(f *testing.F) {
	for _, s := range []string{"udp/0.0.0.0:7777", "tcp/[::]:30000-30099", "tcp/:443", "udp/[fe80::1%eth0]:1", "tcp/[]:1", "x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		binds, err := ParseBind(s)
		if err != nil {
			return
		}
		if len(binds) < 1 || len(binds) > maxPorts {
			t.Fatalf("%q: %d addresses", s, len(binds))
		}
		again, err := ParseBind(binds[0].String())
		if err != nil || len(again) != 1 || again[0] != binds[0] {
			t.Fatalf("%q gives %s, which reads as %v, %v", s, binds[0], again, err)
		}
	})
}

func TestBindsOverlap(t *testing.T) {
	all := make(Binds)
	add := func(path string, list ...string) error {
		for _, s := range list {
			binds, err := ParseBind(s)
			if err != nil {
				t.Fatal(err)
			}
			if err := all.Add(binds, path); err != nil {
				return err
			}
		}
		return nil
	}
	if err := add("listeners.a.bind[0]", "udp/0.0.0.0:7000-7010", "tcp/0.0.0.0:7005", "udp/127.0.0.1:7005", "udp/127.0.0.1:0", "udp/127.0.0.1:0"); err != nil {
		t.Fatalf("addresses that differ: %v", err)
	}
	err := add("listeners.b.bind[1]", "udp/0.0.0.0:7010-7011")
	if want := "listeners.b.bind[1]: udp/0.0.0.0:7010 is bound by listeners.a.bind[0] already"; err == nil || err.Error() != want {
		t.Errorf("overlapping ranges: %v, want %s", err, want)
	}
}
