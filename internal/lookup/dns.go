package lookup

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

// Host resolves as the host does: /etc/hosts, then the servers of
// /etc/resolv.conf, read anew each time. Go's own resolver gives no TTL.
var Host = &DNS{ResolvConf: "/etc/resolv.conf"}

// DNS asks servers of DNS.
type DNS struct {
	// The servers. Names are asked for as they are, and /etc/hosts is not looked
	// at. Default: those of ResolvConf.
	Servers []netip.AddrPort

	// The file with the servers and the search list, read anew each time.
	ResolvConf string

	port string // of the servers in ResolvConf, where it is not 53
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
func (r *DNS) Lookup(ctx context.Context, host string) ([]netip.Addr, time.Duration, error) {
	if r.Servers == nil {
		if addrs, err := hosts.LookupNetIP(ctx, "ip", host); err == nil && len(addrs) > 0 {
			return addrs, fileTTL, nil
		}
	}
	conf, err := r.config()
	if err != nil {
		return nil, 0, err
	}
	for _, fqdn := range conf.names(host) {
		addrs, ttl, err := conf.both(ctx, fqdn)
		if len(addrs) > 0 || err != nil {
			return addrs, ttl, err
		}
	}
	return nil, 0, ErrNoAddress
}

// config is how questions are asked.
type config struct {
	servers  []string
	names    func(host string) []string // that a name may stand for
	attempts int
	timeout  time.Duration // of one question to one server
}

func (r *DNS) config() (*config, error) {
	if r.Servers != nil {
		c := &config{names: func(host string) []string { return []string{dns.Fqdn(host)} }, attempts: 2, timeout: Timeout / 2}
		for _, s := range r.Servers {
			c.servers = append(c.servers, s.String())
		}
		return c, nil
	}
	conf, err := dns.ClientConfigFromFile(r.ResolvConf)
	if err != nil {
		return nil, fmt.Errorf("reading the addresses of DNS servers: %w", err)
	}
	if r.port != "" {
		conf.Port = r.port
	}
	if len(conf.Servers) == 0 {
		return nil, errors.New("no DNS server is configured")
	}
	timeout := max(time.Duration(conf.Timeout)*time.Second/2, time.Second)
	c := &config{names: conf.NameList, attempts: max(conf.Attempts, 1), timeout: min(timeout, Timeout/2)}
	for _, s := range conf.Servers {
		c.servers = append(c.servers, net.JoinHostPort(s, conf.Port))
	}
	return c, nil
}

type found struct {
	addrs []netip.Addr
	ttl   time.Duration
	err   error
}

// both asks for A and AAAA at once.
func (c *config) both(ctx context.Context, fqdn string) ([]netip.Addr, time.Duration, error) {
	six := make(chan found, 1)
	go func() { six <- c.addresses(ctx, fqdn, dns.TypeAAAA) }()
	a := c.addresses(ctx, fqdn, dns.TypeA)
	b := <-six
	ttl := a.ttl
	if len(a.addrs) == 0 || len(b.addrs) > 0 && b.ttl < ttl {
		ttl = b.ttl
	}
	addrs := append(a.addrs, b.addrs...)
	if (a.err == nil) != (b.err == nil) && len(addrs) > 0 {
		return addrs, ttl, &HalfError{Six: b.err != nil, Err: errors.Join(a.err, b.err)}
	}
	return addrs, ttl, errors.Join(a.err, b.err)
}

func (c *config) addresses(ctx context.Context, fqdn string, qtype uint16) found {
	m, err := c.ask(ctx, fqdn, qtype)
	if err != nil {
		return found{err: err}
	}
	return read(m, fqdn, qtype)
}

// ednsSize is what an answer over UDP may have.
const ednsSize = 1232

// ask asks the servers in turn until one answers. That there is no such name
// or record is an answer.
func (c *config) ask(ctx context.Context, fqdn string, qtype uint16) (*dns.Msg, error) {
	q := new(dns.Msg)
	q.SetQuestion(fqdn, qtype)
	q.SetEdns0(ednsSize, false)
	var errs error
	for range c.attempts {
		for _, server := range c.servers {
			answer, err := c.exchange(ctx, q.Copy(), server)
			if err == nil {
				return answer, nil
			}
			errs = errors.Join(errs, err)
			if ctx.Err() != nil {
				return nil, errs
			}
		}
	}
	return nil, errs
}

func (c *config) exchange(ctx context.Context, q *dns.Msg, server string) (*dns.Msg, error) {
	q.Id = dns.Id()
	client := dns.Client{Net: "udp", Timeout: c.timeout}
	answer, _, err := client.ExchangeContext(ctx, q, server)
	if err == nil && answer.Truncated {
		client.Net = "tcp"
		answer, _, err = client.ExchangeContext(ctx, q, server)
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
	names, ttl := aliases(m, fqdn)
	var addrs []netip.Addr
	for _, rr := range m.Answer {
		if rr.Header().Rrtype != qtype || !slices.Contains(names, dns.CanonicalName(rr.Header().Name)) {
			continue
		}
		if a, ok := address(rr); ok {
			addrs = append(addrs, a)
			ttl = min(ttl, rr.Header().Ttl)
		}
	}
	return found{addrs: addrs, ttl: time.Duration(ttl) * time.Second}
}

// aliases are the names that a name stands for, itself the first, and the
// shortest TTL on the way, which is MaxTTL at most.
func aliases(m *dns.Msg, fqdn string) (names []string, ttl uint32) {
	ttl = uint32(MaxTTL / time.Second)
	names = []string{dns.CanonicalName(fqdn)}
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
	return names, ttl
}

// address is that of an A or AAAA record.
func address(rr dns.RR) (netip.Addr, bool) {
	var ip net.IP
	switch rr := rr.(type) {
	case *dns.A:
		ip = rr.A
	case *dns.AAAA:
		ip = rr.AAAA
	}
	a, ok := netip.AddrFromSlice(ip)
	return a.Unmap(), ok
}

// maxAliases bounds a chain of aliases.
const maxAliases = 16
