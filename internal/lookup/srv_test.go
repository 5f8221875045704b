package lookup

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/miekg/dns"
)

// extra answers like zone, and with the addresses of targets of SRV records.
func extra(records ...string) dns.HandlerFunc {
	return func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg)
		m.SetReply(q)
		known := false
		for _, s := range records {
			rr, err := dns.NewRR(s)
			if err != nil {
				panic(err)
			}
			mine := strings.EqualFold(rr.Header().Name, q.Question[0].Name)
			known = known || mine
			switch t := rr.Header().Rrtype; {
			case t == q.Question[0].Qtype || t == dns.TypeCNAME:
				m.Answer = append(m.Answer, rr)
			case q.Question[0].Qtype == dns.TypeSRV:
				m.Extra = append(m.Extra, rr)
			}
		}
		if !known {
			m.Rcode, m.Answer = dns.RcodeNameError, nil
		}
		_ = w.WriteMsg(m)
	}
}

func described(s Services, err error) string {
	if err != nil {
		return "error: " + err.Error()
	}
	var list []string
	for _, v := range s.List {
		list = append(list, fmt.Sprintf("%s:%d p%d w%d %v", v.Host, v.Port, v.Priority, v.Weight, s.Addrs[v.Host].Addrs))
	}
	return fmt.Sprintf("%s none=%v ttl=%v", strings.Join(list, ", "), s.None, s.TTL)
}

func TestServices(t *testing.T) {
	for name, tc := range map[string]struct {
		records []string
		want    string
	}{
		"some": {[]string{"_g._udp.a.test. 60 SRV 1 2 7777 B.test.", "_g._udp.a.test. 30 SRV 0 0 7778 c.test."}, "b.test:7777 p1 w2 [], c.test:7778 p0 w0 [] none=false ttl=30s"},
		"with addresses": {[]string{"_g._udp.a.test. 60 SRV 1 2 7777 b.test.", "b.test. 60 A 10.0.0.1", "B.test. 60 AAAA 2001:db8::1", "x.test. 60 A 10.6.6.6"},
			"b.test:7777 p1 w2 [10.0.0.1 2001:db8::1] none=false ttl=1m0s"},
		"by an alias":        {[]string{"_g._udp.a.test. 9 CNAME _g._udp.b.test.", "_g._udp.b.test. 60 SRV 1 2 7777 b.test."}, "b.test:7777 p1 w2 [] none=false ttl=9s"},
		"of another":         {[]string{"_g._udp.a.test. 60 SRV 1 2 7777 b.test.", "_h._udp.a.test. 60 SRV 1 2 7777 c.test."}, "b.test:7777 p1 w2 [] none=false ttl=1m0s"},
		"not available":      {[]string{"_g._udp.a.test. 60 SRV 0 0 0 ."}, " none=true ttl=1m0s"},
		"not, and available": {[]string{"_g._udp.a.test. 60 SRV 0 0 0 .", "_g._udp.a.test. 60 SRV 1 2 7777 b.test."}, "b.test:7777 p1 w2 [] none=false ttl=1m0s"},
		"no port":            {[]string{"_g._udp.a.test. 60 SRV 1 2 0 b.test."}, " none=false ttl=1m0s"},
		"no host":            {[]string{`_g._udp.a.test. 60 SRV 1 2 7 10.0.0.1.`}, " none=false ttl=1m0s"},
		"no such record":     {[]string{"_g._udp.a.test. 60 TXT x"}, " none=false ttl=5m0s"},
		"no such name":       {[]string{"b.test. 60 A 10.0.0.1"}, "error: _g._udp.a.test: there is no such name"},
	} {
		t.Run(name, func(t *testing.T) {
			r := dnsServer(t, extra(tc.records...))
			if got := described(r.Services(t.Context(), "_g._udp.a.test")); got != tc.want {
				t.Errorf("got %s\nwant %s", got, tc.want)
			}
		})
	}
}

// An answer that is cut short is asked for over TCP.
func TestServicesOverTCP(t *testing.T) {
	var records []string
	for i := range 300 {
		records = append(records, fmt.Sprintf("_g._udp.a.test. 60 SRV 0 1 7777 h%d.a.test.", i), fmt.Sprintf("h%d.a.test. 60 A 10.0.%d.%d", i, i/256, i%256))
	}
	good := extra(records...)
	r := dnsServer(t, func(w dns.ResponseWriter, q *dns.Msg) {
		if w.RemoteAddr().Network() == "udp" {
			m := new(dns.Msg)
			m.SetReply(q)
			m.Truncated = true
			_ = w.WriteMsg(m)
			return
		}
		good(w, q)
	})
	s, err := r.Services(t.Context(), "_g._udp.a.test")
	if err != nil || len(s.List) != 300 || len(s.Addrs) != 300 {
		t.Errorf("%d services, %d hosts with addresses, %v", len(s.List), len(s.Addrs), err)
	}
}

// What a nearly full datagram has of addresses may not be all.
func TestAddressesOfAFullAnswer(t *testing.T) {
	for hosts, want := range map[int]bool{10: true, 22: false} {
		m := new(dns.Msg)
		m.SetQuestion("_g._udp.a.test.", dns.TypeSRV)
		m.Response = true
		for i := range hosts {
			for _, s := range []string{"_g._udp.a.test. 60 SRV 0 1 7777 host-%d.a.test.", "host-%d.a.test. 60 A 10.0.0.1"} {
				rr, err := dns.NewRR(fmt.Sprintf(s, i))
				if err != nil {
					t.Fatal(err)
				}
				if rr.Header().Rrtype == dns.TypeSRV {
					m.Answer = append(m.Answer, rr)
				} else {
					m.Extra = append(m.Extra, rr)
				}
			}
		}
		if got := complete(m); got != want {
			t.Errorf("%d hosts in %d bytes: complete %v, want %v", hosts, m.Len(), got, want)
		}
	}
}

func TestServersOfChoice(t *testing.T) {
	at := dnsServer(t, zone("a.test. 60 A 10.0.0.1", "localhost. 60 A 10.0.0.9"))
	conf, err := at.config()
	if err != nil {
		t.Fatal(err)
	}
	r := &DNS{Servers: []netip.AddrPort{netip.MustParseAddrPort(conf.servers[0])}}
	for host, want := range map[string]string{"a.test": "[10.0.0.1]", "localhost": "[10.0.0.9]", "game": "[]"} {
		if addrs, _, _ := r.Lookup(t.Context(), host); fmt.Sprint(addrs) != want {
			t.Errorf("%s is %v, want %s", host, addrs, want)
		}
	}
}

func FuzzServices(f *testing.F) {
	m := new(dns.Msg)
	m.SetQuestion("_g._udp.a.test.", dns.TypeSRV)
	for _, s := range []string{"_g._udp.a.test. 5 CNAME b.test.", "b.test. 60 SRV 1 2 7777 c.test.", "b.test. 60 SRV 0 0 0 ."} {
		rr, _ := dns.NewRR(s)
		m.Answer = append(m.Answer, rr)
	}
	rr, _ := dns.NewRR("c.test. 60 A 10.0.0.1")
	m.Extra = append(m.Extra, rr)
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
		s := readServices(m, "_g._udp.a.test.")
		if len(s.List) > len(m.Answer) || s.TTL > MaxTTL || s.None && len(s.List) > 0 {
			t.Errorf("%d services of %d records, for %v", len(s.List), len(m.Answer), s.TTL)
		}
		for host, told := range s.Addrs {
			if len(told.Addrs) == 0 || len(told.Addrs) > len(m.Extra) {
				t.Errorf("%s has %d addresses of %d records", host, len(told.Addrs), len(m.Extra))
			}
		}
	})
}
