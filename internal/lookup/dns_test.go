package lookup

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// dnsServer serves a zone on a port of its own, over UDP and TCP, and returns a
// resolver that asks it.
func dnsServer(t *testing.T, handle dns.HandlerFunc) *DNS {
	t.Helper()
	pc, l := samePort(t)
	for _, s := range []*dns.Server{{PacketConn: pc, Handler: handle}, {Listener: l, Handler: handle}} {
		ready, done := make(chan struct{}), make(chan struct{})
		s.NotifyStartedFunc = func() { close(ready) }
		go func() { defer close(done); _ = s.ActivateAndServe() }()
		<-ready
		t.Cleanup(func() { _ = s.Shutdown(); <-done })
	}
	return &DNS{ResolvConf: resolvConf(t), port: fmt.Sprint(pc.LocalAddr().(*net.UDPAddr).Port)}
}

// samePort finds a port that is free for both; which ones are is another matter
// for UDP than for TCP.
func samePort(t *testing.T) (net.PacketConn, net.Listener) {
	t.Helper()
	for range 100 {
		pc, err := net.ListenPacket("udp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		l, err := net.Listen("tcp", pc.LocalAddr().String())
		if err == nil {
			return pc, l
		}
		pc.Close()
	}
	t.Fatal("no port is free for both UDP and TCP")
	return nil, nil
}

func resolvConf(t *testing.T) string {
	path := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(path, []byte("nameserver 127.0.0.1\nsearch example.test\noptions timeout:2 attempts:2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// zone answers from records in the form of a zone file.
func zone(records ...string) dns.HandlerFunc {
	return func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg)
		m.SetReply(q)
		known := false
		for _, s := range records {
			rr, err := dns.NewRR(s)
			if err != nil {
				panic(err)
			}
			known = known || strings.EqualFold(rr.Header().Name, q.Question[0].Name)
			if t := rr.Header().Rrtype; t == q.Question[0].Qtype || t == dns.TypeCNAME {
				m.Answer = append(m.Answer, rr)
			}
		}
		if !known {
			m.Rcode, m.Answer = dns.RcodeNameError, nil
		}
		_ = w.WriteMsg(m)
	}
}

func TestLookup(t *testing.T) {
	for name, tc := range map[string]struct {
		records []string
		host    string
		want    string
		ttl     time.Duration
		err     bool
	}{
		"both families":        {[]string{"a.test. 60 A 10.0.0.1", "a.test. 60 A 10.0.0.2", "a.test. 30 AAAA 2001:db8::1"}, "a.test", "[10.0.0.1 10.0.0.2 2001:db8::1]", 30 * time.Second, false},
		"one family":           {[]string{"a.test. 7 A 10.0.0.1"}, "a.test", "[10.0.0.1]", 7 * time.Second, false},
		"only IPv6":            {[]string{"a.test. 9 AAAA 2001:db8::1"}, "a.test", "[2001:db8::1]", 9 * time.Second, false},
		"an alias":             {[]string{"a.test. 5 CNAME b.test.", "b.test. 60 A 10.0.0.1"}, "a.test", "[10.0.0.1]", 5 * time.Second, false},
		"aliases in disorder":  {[]string{"b.test. 60 CNAME c.test.", "a.test. 60 CNAME B.test.", "c.test. 8 A 10.0.0.1"}, "a.test", "[10.0.0.1]", 8 * time.Second, false},
		"aliases in a circle":  {[]string{"a.test. 60 CNAME b.test.", "b.test. 60 CNAME a.test."}, "a.test", "[]", 0, true},
		"records of another":   {[]string{"a.test. 60 A 10.0.0.1", "b.test. 60 A 10.6.6.6"}, "a.test", "[10.0.0.1]", time.Minute, false},
		"another case":         {[]string{"A.Test. 60 A 10.0.0.1"}, "a.test", "[10.0.0.1]", time.Minute, false},
		"no such name":         {nil, "a.test", "[]", 0, true},
		"the search list":      {[]string{"game.example.test. 60 A 10.0.0.1"}, "game", "[10.0.0.1]", time.Minute, false},
		"IPv4-mapped":          {[]string{"a.test. 60 AAAA ::ffff:10.0.0.1"}, "a.test", "[10.0.0.1]", time.Minute, false},
		"a TTL of more than 5": {[]string{"a.test. 86400 A 10.0.0.1"}, "a.test", "[10.0.0.1]", MaxTTL, false},
	} {
		t.Run(name, func(t *testing.T) {
			r := dnsServer(t, zone(tc.records...))
			addrs, ttl, err := r.Lookup(t.Context(), tc.host)
			if fmt.Sprint(addrs) != tc.want || (err != nil) != tc.err || err == nil && ttl != tc.ttl {
				t.Errorf("Lookup = %v, %v, %v, want %v, %v", addrs, ttl, err, tc.want, tc.ttl)
			}
		})
	}
}

// An answer of one family beside a failure of the other is all of that one.
func TestLookupHalf(t *testing.T) {
	good := zone("a.test. 60 A 10.0.0.1")
	r := dnsServer(t, func(w dns.ResponseWriter, q *dns.Msg) {
		if q.Question[0].Qtype == dns.TypeAAAA {
			m := new(dns.Msg)
			_ = w.WriteMsg(m.SetRcode(q, dns.RcodeServerFailure))
			return
		}
		good(w, q)
	})
	addrs, ttl, err := r.Lookup(t.Context(), "a.test")
	if fmt.Sprint(addrs) != "[10.0.0.1]" || ttl != time.Minute || err == nil || !strings.Contains(err.Error(), "SERVFAIL") {
		t.Errorf("Lookup = %v, %v, %v", addrs, ttl, err)
	}
	if half, ok := err.(*HalfError); !ok || !half.Six {
		t.Errorf("the error is %#v, want a HalfError of AAAA", err)
	}
}

func TestLookupTriesAgain(t *testing.T) {
	var asked atomic.Int32
	good := zone("a.test. 60 A 10.0.0.1")
	r := dnsServer(t, func(w dns.ResponseWriter, q *dns.Msg) {
		if q.Question[0].Qtype == dns.TypeA && asked.Add(1) == 1 {
			m := new(dns.Msg)
			_ = w.WriteMsg(m.SetRcode(q, dns.RcodeRefused))
			return
		}
		good(w, q)
	})
	if addrs, _, err := r.Lookup(t.Context(), "a.test"); fmt.Sprint(addrs) != "[10.0.0.1]" || err != nil {
		t.Errorf("Lookup = %v, %v", addrs, err)
	}
}

func TestLookupOverTCP(t *testing.T) {
	var records []string
	for i := range 300 {
		records = append(records, fmt.Sprintf("a.test. 60 A 10.0.%d.%d", i/256, i%256))
	}
	good := zone(records...)
	r := dnsServer(t, func(w dns.ResponseWriter, q *dns.Msg) {
		if w.RemoteAddr().Network() == "udp" && q.Question[0].Qtype == dns.TypeA {
			m := new(dns.Msg)
			m.SetReply(q)
			m.Truncated = true
			_ = w.WriteMsg(m)
			return
		}
		good(w, q)
	})
	if addrs, _, err := r.Lookup(t.Context(), "a.test"); len(addrs) != 300 || err != nil {
		t.Errorf("Lookup = %d addresses, %v, want 300", len(addrs), err)
	}
}

func TestLookupPrefersHostsFile(t *testing.T) {
	r := &DNS{ResolvConf: "/dev/null"}
	addrs, ttl, err := r.Lookup(t.Context(), "localhost")
	if err != nil || len(addrs) == 0 || !addrs[0].IsLoopback() || ttl != fileTTL {
		t.Errorf("Lookup = %v, %v, %v", addrs, ttl, err)
	}
}

func TestLookupWithoutServer(t *testing.T) {
	r := dnsServer(t, func(dns.ResponseWriter, *dns.Msg) {}) // answers nothing
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if addrs, _, err := r.Lookup(ctx, "a.test"); err == nil || len(addrs) != 0 {
		t.Errorf("Lookup = %v, %v", addrs, err)
	}
	if _, _, err := (&DNS{ResolvConf: "/no/such/file"}).Lookup(t.Context(), "a.test"); err == nil {
		t.Error("no error without a configuration")
	}
}

// FuzzRead reads answers of a server that may send anything.
func FuzzRead(f *testing.F) {
	m := new(dns.Msg)
	m.SetQuestion("a.test.", dns.TypeA)
	for _, s := range []string{"a.test. 5 CNAME b.test.", "b.test. 60 A 10.0.0.1", "b.test. 60 AAAA 2001:db8::1"} {
		rr, err := dns.NewRR(s)
		if err != nil {
			f.Fatal(err)
		}
		m.Answer = append(m.Answer, rr)
	}
	b, err := m.Pack()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		m := new(dns.Msg)
		if m.Unpack(b) != nil {
			return
		}
		for _, qtype := range []uint16{dns.TypeA, dns.TypeAAAA} {
			got := read(m, "a.test.", qtype)
			if len(got.addrs) > len(m.Answer) || got.ttl > MaxTTL {
				t.Errorf("%d addresses of %d records, for %v", len(got.addrs), len(m.Answer), got.ttl)
			}
			for _, a := range got.addrs {
				if a == (netip.Addr{}) || a.Is4In6() {
					t.Errorf("address %v", a)
				}
			}
		}
	})
}
