package pool

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/miekg/dns"
)

// system resolves as the host does: /etc/hosts, then the servers of
// /etc/resolv.conf, read anew each time. Go's own resolver gives no TTL.
var system = &systemResolver{resolvConf: "/etc/resolv.conf"}

type systemResolver struct {
	resolvConf string
	port       string // of the servers, where it is not 53
}

// fileTTL is how long an answer of /etc/hosts holds.
const fileTTL = 5 * time.Second

// hosts is Go's resolver with no server to ask, which leaves it the files.
var hosts = net.Resolver{
	PreferGo: true,
	Dial: func(context.Context, string, string) (net.Conn, error) {
		return nil, errors.New("files only")
	},
}

// Lookup asks for both families; see Resolver.
func (r *systemResolver) Lookup(ctx context.Context, host string) ([]netip.Addr, time.Duration, error) {
	if addrs, err := hosts.LookupNetIP(ctx, "ip", host); err == nil && len(addrs) > 0 {
		return addrs, fileTTL, nil
	}
	conf, err := dns.ClientConfigFromFile(r.resolvConf)
	if err != nil {
		return nil, 0, fmt.Errorf("reading the addresses of DNS servers: %w", err)
	}
	if r.port != "" {
		conf.Port = r.port
	}
	if len(conf.Servers) == 0 {
		return nil, 0, errors.New("no DNS server is configured")
	}
	for _, fqdn := range conf.NameList(host) {
		addrs, ttl, err := both(ctx, conf, fqdn)
		if len(addrs) > 0 || err != nil {
			return addrs, ttl, err
		}
	}
	return nil, 0, errNoAddress
}

type found struct {
	addrs []netip.Addr
	ttl   time.Duration
	err   error
}

// halfError is the failure of one family beside an answer with addresses of the
// other, which is then all there is of that one.
type halfError struct {
	six bool // it is AAAA that has failed
	err error
}

func (e *halfError) Error() string { return e.err.Error() }

func (e *halfError) Unwrap() error { return e.err }

// failed reports whether it is the family of ip that has.
func (e *halfError) failed(ip netip.Addr) bool { return ip.Is6() == e.six }

// both asks for A and AAAA at once.
func both(ctx context.Context, conf *dns.ClientConfig, fqdn string) ([]netip.Addr, time.Duration, error) {
	six := make(chan found, 1)
	go func() { six <- ask(ctx, conf, fqdn, dns.TypeAAAA) }()
	a := ask(ctx, conf, fqdn, dns.TypeA)
	b := <-six
	ttl := a.ttl
	if len(a.addrs) == 0 || len(b.addrs) > 0 && b.ttl < ttl {
		ttl = b.ttl
	}
	addrs := append(a.addrs, b.addrs...)
	if (a.err == nil) != (b.err == nil) && len(addrs) > 0 {
		return addrs, ttl, &halfError{six: b.err != nil, err: errors.Join(a.err, b.err)}
	}
	return addrs, ttl, errors.Join(a.err, b.err)
}

// ask asks the servers in turn until one answers. That there is no such name
// or record is an answer.
func ask(ctx context.Context, conf *dns.ClientConfig, fqdn string, qtype uint16) found {
	q := new(dns.Msg)
	q.SetQuestion(fqdn, qtype)
	q.SetEdns0(1232, false)
	var errs error
	for range max(conf.Attempts, 1) {
		for _, server := range conf.Servers {
			answer, err := exchange(ctx, conf, q.Copy(), net.JoinHostPort(server, conf.Port))
			if err != nil {
				errs = errors.Join(errs, err)
				if ctx.Err() != nil {
					return found{err: errs}
				}
				continue
			}
			return read(answer, fqdn, qtype)
		}
	}
	return found{err: errs}
}

func exchange(ctx context.Context, conf *dns.ClientConfig, q *dns.Msg, server string) (*dns.Msg, error) {
	q.Id = dns.Id()
	timeout := max(time.Duration(conf.Timeout)*time.Second/2, time.Second)
	c := dns.Client{Net: "udp", Timeout: min(timeout, lookup/2)}
	answer, _, err := c.ExchangeContext(ctx, q, server)
	if err == nil && answer.Truncated {
		c.Net = "tcp"
		answer, _, err = c.ExchangeContext(ctx, q, server)
	}
	switch {
	case err != nil:
		return nil, err
	case answer.Rcode != dns.RcodeSuccess && answer.Rcode != dns.RcodeNameError:
		return nil, fmt.Errorf("server %s answered %s", server, dns.RcodeToString[answer.Rcode])
	}
	return answer, nil
}

// read takes the addresses of a name from an answer, along the aliases, with
// the shortest TTL on the way. Records of other names are passed over.
func read(m *dns.Msg, fqdn string, qtype uint16) found {
	ttl := uint32(maxTTL / time.Second)
	names := []string{dns.CanonicalName(fqdn)}
	for i := 0; i < len(names) && i < maxAliases; i++ {
		for _, rr := range m.Answer {
			c, ok := rr.(*dns.CNAME)
			if !ok || dns.CanonicalName(c.Hdr.Name) != names[i] {
				continue
			}
			if to := dns.CanonicalName(c.Target); !slices.Contains(names, to) {
				names = append(names, to)
				ttl = min(ttl, c.Hdr.Ttl)
			}
		}
	}
	var addrs []netip.Addr
	for _, rr := range m.Answer {
		if rr.Header().Rrtype != qtype || !slices.Contains(names, dns.CanonicalName(rr.Header().Name)) {
			continue
		}
		var ip net.IP
		switch rr := rr.(type) {
		case *dns.A:
			ip = rr.A
		case *dns.AAAA:
			ip = rr.AAAA
		}
		if a, ok := netip.AddrFromSlice(ip); ok {
			addrs = append(addrs, a.Unmap())
			ttl = min(ttl, rr.Header().Ttl)
		}
	}
	return found{addrs: addrs, ttl: time.Duration(ttl) * time.Second}
}

// maxAliases bounds a chain of aliases.
const maxAliases = 16
