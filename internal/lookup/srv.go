package lookup

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/wayhouse-proxy/wayhouse/internal/hostport"
)

// Services is what SRV records say.
type Services struct {
	List []Service
	TTL  time.Duration

	// The only record says that the service is decidedly not available.
	None bool

	// The addresses of hosts of the list that came with the answer.
	Addrs map[string]Told
}

// Service is one place of a service.
type Service struct {
	Host             string // lower case, without the final dot
	Port             uint16
	Priority, Weight uint16
}

// Told is what an answer says of a name that it was not asked for.
type Told struct {
	Addrs []netip.Addr
	TTL   time.Duration
}

// Services asks for the SRV records of a full name, within Timeout. That there
// is no such name is an error; that it has no such record is not.
func (r *DNS) Services(ctx context.Context, record string) (Services, error) {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	conf, err := r.config()
	if err != nil {
		return Services{}, err
	}
	fqdn := dns.Fqdn(record)
	m, err := conf.ask(ctx, fqdn, dns.TypeSRV)
	if err != nil {
		return Services{}, err
	}
	if m.Rcode == dns.RcodeNameError {
		return Services{}, fmt.Errorf("%s: there is no such name", record)
	}
	return readServices(m, fqdn), nil
}

// readServices takes the services of a name from an answer. Places without a
// port or a host that could be one are passed over.
func readServices(m *dns.Msg, fqdn string) Services {
	names, ttl := aliases(m, fqdn)
	s := Services{Addrs: make(map[string]Told)}
	wanted := make(map[string]bool)
	for _, rr := range m.Answer {
		srv, ok := rr.(*dns.SRV)
		if !ok || !slices.Contains(names, dns.CanonicalName(srv.Hdr.Name)) {
			continue
		}
		ttl = min(ttl, srv.Hdr.Ttl)
		host := strings.TrimSuffix(dns.CanonicalName(srv.Target), ".")
		if host == "" {
			s.None = true
			continue
		}
		if srv.Port != 0 && hostport.ValidHost(host) {
			s.List = append(s.List, Service{Host: host, Port: srv.Port, Priority: srv.Priority, Weight: srv.Weight})
			wanted[host] = true
		}
	}
	s.None = s.None && len(s.List) == 0
	s.TTL = time.Duration(ttl) * time.Second
	if !complete(m) {
		return s
	}
	for _, rr := range m.Extra {
		host := strings.TrimSuffix(dns.CanonicalName(rr.Header().Name), ".")
		a, ok := address(rr)
		if !ok || !wanted[host] {
			continue
		}
		told := s.Addrs[host]
		if ttl := time.Duration(rr.Header().Ttl) * time.Second; len(told.Addrs) == 0 || ttl < told.TTL {
			told.TTL = ttl
		}
		told.Addrs = append(told.Addrs, a)
		s.Addrs[host] = told
	}
	return s
}

// complete reports whether a server had the room to add all the addresses it
// has: it leaves out what does not fit, and does not say so.
func complete(m *dns.Msg) bool {
	m.Compress = true
	n := m.Len()
	return n < ednsSize-ednsSize/4 || n > ednsSize // which came over TCP
}
