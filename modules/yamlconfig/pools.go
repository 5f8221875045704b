package yamlconfig

import (
	"encoding/hex"
	"net/url"
	"slices"

	"github.com/wayhouse-proxy/wayhouse/internal/fetch"
	"github.com/wayhouse-proxy/wayhouse/internal/hostport"
	"github.com/wayhouse-proxy/wayhouse/internal/kube"
)

// source reads an element of backend_sources.
func (d *document) source(_ string, f *fields) object {
	kind := f.need("type", "static, dns_srv, consul or kubernetes").oneOf("static", "dns_srv", "consul", "kubernetes", "tunnel")
	o := object{"source": kind}
	o.seconds("refresh_interval", f.get("refresh_interval_sec"), 1)
	switch kind {
	case "static":
		o.set("targets", f.need("targets", "the backends, each ip:port or host:port").texts())
		f.ask("wayhouse.sources.static", without(o, "source"), nil)
	case "dns_srv":
		o.set("record", f.need("record", "the name of the records, as in _game._udp.example.com").some())
		f.ask("wayhouse.sources.dns_srv", without(o, "source"), nil)
	case "consul":
		d.consul(f, o)
	case "kubernetes":
		d.kubernetes(f, o)
	case "tunnel":
		f.get("pubkey")
		f.get("type").fail("this build has no tunnels to origins: use static, dns_srv, consul or kubernetes")
	default: // a mistake that is noted; its options are not mistakes too
		f.entries(func(string, value) bool { return true })
	}
	return o
}

func without(o object, key string) object {
	c := object{}
	for k, v := range o {
		if k != key {
			c[k] = v
		}
	}
	return c
}

func (d *document) consul(f *fields, o object) {
	name := f.need("service", "the name of a service")
	service := name.plain()
	if service == "." || service == ".." {
		name.fail("%q is a part of paths and not a name", service)
	}
	o.set("service", service)
	addr, file := f.get("consul_addr"), f.get("consul_token_file").plain()
	at := addr.plain()
	if at != "" {
		u, err := fetch.ParseURL(at)
		if err != nil {
			addr.fail("%s", err)
		} else if file != "" && !safe(u) {
			addr.fail("%q is http:// to another host, where the token would go over the network in the clear: use https://", at)
		}
	}
	o.set("addr", at)
	o.set("token_file", file)
	o.set("tag", f.get("tag").plain())
}

// safe reports whether a secret may be sent there.
func safe(u *url.URL) bool { return u.Scheme == "https" || fetch.Loopback(u) }

func (d *document) kubernetes(f *fields, o object) {
	for _, part := range []struct{ key, why string }{
		{"service", "the name of a service"}, {"namespace", ""}, {"port_name", ""},
	} {
		v := f.get(part.key)
		if part.key == "service" {
			v = f.need(part.key, part.why)
		}
		s := v.plain()
		if s != "" && !kube.IsName(s) {
			v.fail("%q is not made of up to 63 small letters, digits and hyphens", s)
		}
		o.set(part.key, s)
	}
	api := f.get("api")
	at := api.plain()
	if at != "" {
		u, err := fetch.ParseURL(at)
		if err != nil {
			api.fail("%s", err)
		} else if !safe(u) {
			api.fail("%q is http:// to another host, where the token would go over the network in the clear: use https://", at)
		}
	}
	o.set("api", at)
}

// pool is what the rest of a document has to know of a pool.
type pool struct {
	at          value
	header      value
	proxy       string
	healthNamed bool
	tcp, udp    bool // listeners whose routes lead to it
}

// pool reads an element of pools.
func (d *document) pool(name string, f *fields) object {
	if d.pools == nil {
		d.pools = make(map[string]*pool)
	}
	p, o := &pool{at: f.value}, object{}
	d.pools[name] = p
	targets, source := f.get("targets"), f.get("source")
	switch {
	case targets.given() && source.given():
		source.fail("targets is given too: a pool has one of the two")
	case source.given():
		s := source.some()
		known(source, "backend source", s, d.sources)
		o.set("source", s)
	case targets.given():
		o.set("targets", targets.texts())
	case f.given():
		f.fail("neither targets nor source is given: a pool needs one of the two")
	}
	listed, err := hostport.ParseList(asTexts(o["targets"]))
	if targets.given() && !source.given() && err != nil {
		targets.fail("%s", err)
	}
	o.set("balancer", d.balancer(f, listed, source.given()))
	o.set("health", d.health(f, p))
	per, limits := object{}, f.get("per_backend").fields()
	per.whole("max_sessions", limits.get("max_sessions"), 1, 1<<62)
	per.whole("max_new_per_sec", limits.get("max_new_per_sec"), 1, 1000000)
	limits.end()
	o.set("per_backend", per)
	p.header = f.get("proxy_protocol")
	p.proxy = p.header.oneOf("none", "v1", "v2", "v2-udp")
	o.set("proxy_protocol", p.proxy)
	o.millis("connect_timeout", f.get("connect_timeout_ms"))
	o.seconds("idle_timeout", f.get("idle_timeout_sec"), 1)
	if v := f.get("affinity"); v.given() {
		v.fail("there is no table of affinity: use balancer: consistent_hash, with hash_on")
	}
	return o
}

func asTexts(v any) []string {
	s, _ := v.([]string)
	return s
}

func (d *document) balancer(f *fields, targets []hostport.Target, sourced bool) object {
	v, o := f.get("balancer"), object{}
	policy, hash := v, f.get("hash_on")
	if v.given() && v.n.Content != nil {
		b := v.fields()
		policy = b.need("strategy", "round_robin, least_conn, consistent_hash or weighted")
		if inner := b.get("hash_on"); inner.given() {
			if hash.given() {
				inner.fail("the pool has hash_on too: leave one of the two out")
			}
			hash = inner
		}
		b.end()
	}
	kind := policy.oneOf("round_robin", "least_conn", "consistent_hash", "weighted", "first_available")
	o.set("policy", kind)
	on := hash.oneOf("src_ip", "src_ip_port")
	if hash.given() && kind != "consistent_hash" {
		hash.fail("only balancer: consistent_hash has it")
	}
	o.set("hash_on", on)
	w := f.get("weights")
	if !w.given() {
		return o
	}
	if kind != "weighted" {
		w.fail("only balancer: weighted has them")
	}
	weights, seen := object{}, make(map[hostport.Target]bool)
	w.fields().entries(func(addr string, v value) bool {
		n, _ := v.number(1, 1000000)
		t, err := hostport.Parse(addr)
		switch {
		case err != nil:
			v.fail("%s", err)
		case sourced && t.Host != "":
			v.fail("%q is no address: backends of a source are named by ip:port", addr)
		case !sourced && !slices.Contains(targets, t):
			v.fail("%q is not one of the targets", addr)
		case seen[t]:
			v.fail("%q has a weight already", addr)
		}
		seen[t] = true
		weights[addr] = n
		return true
	})
	o.set("weights", weights)
	return o
}

func (d *document) health(f *fields, p *pool) object {
	h, o := f.get("health_check").fields(), object{}
	if !h.given() {
		return nil
	}
	named := h.get("type")
	kind := named.oneOf("tcp_connect", "udp_probe", "none", "http")
	p.healthNamed = named.given()
	if kind == "" {
		kind = "tcp_connect"
	}
	o["check"] = kind
	o.seconds("interval", h.get("interval_sec"), 1)
	o.millis("timeout", h.get("timeout_ms"))
	o.whole("rise", h.get("rise"), 1, 1<<31-1)
	o.whole("fall", h.get("fall"), 1, 1<<31-1)
	switch kind {
	case "udp_probe":
		o.set("send", hexLiteral(h.need("send_hex", "the datagram, in hexadecimal digits")))
		o.set("expect", hexLiteral(h.get("expect_hex_prefix")))
	case "http":
		o.set("path", h.get("path").some())
		o.whole("port", h.get("port"), 1, 65535)
		o.whole("status", h.get("status"), 100, 599)
		o.set("host", h.get("host").some())
	default:
		for _, key := range []string{"send_hex", "expect_hex_prefix"} {
			if v := h.get(key); v.given() {
				v.fail("only type: udp_probe has it")
			}
		}
	}
	h.end()
	h.ask("wayhouse.health_checks."+kind, without(o, "check"), map[string]string{
		"interval": "interval_sec", "timeout": "timeout_ms", "send": "send_hex", "expect": "expect_hex_prefix",
	})
	return o
}

// hexLiteral is bytes in hexadecimal digits, as modules take them.
func hexLiteral(v value) string {
	s := v.some()
	if s == "" {
		return ""
	}
	if _, err := hex.DecodeString(s); err != nil {
		v.fail("%.60q is not made of pairs of hexadecimal digits", s)
		return ""
	}
	return "hex:" + s
}
