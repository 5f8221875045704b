package yamlconfig

import (
	"encoding/json"
	"net/url"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/modules/resolver"
)

// resolverOf is what the rest of a document has to know of a resolver.
type resolverOf struct {
	header   value
	proxy    string
	tcp, udp bool // listeners whose routes ask it
}

// resolver reads an element of resolvers.
func (d *document) resolver(name string, f *fields) object {
	if d.resolvers == nil {
		d.resolvers = make(map[string]*resolverOf)
	}
	r, o := &resolverOf{}, object{}
	d.resolvers[name] = r
	kind := f.need("type", "http or grpc").oneOf("http", "grpc")
	endpoint := f.need("endpoint", "the URL of the service")
	at := endpoint.plain()
	if at != "" {
		u, err := url.Parse(at)
		switch {
		case err != nil:
			endpoint.fail("this is not a URL, such as https://matchmaker.example.com:8443") // it may have a password in it
		case u.User != nil:
			endpoint.fail("a user in the URL would be shown in logs: leave it out")
		case u.Scheme != "http" && u.Scheme != "https":
			endpoint.fail("%q begins with neither http:// nor https://", at)
		case u.Hostname() == "":
			endpoint.fail("%q names no host", at)
		case u.Fragment != "":
			endpoint.fail("%q has a fragment, which is never sent", at)
		case kind == "grpc" && (u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.ForceQuery):
			endpoint.fail("%q: gRPC has no path: give scheme, host and port alone", at)
		}
	}
	o.millis("timeout", f.get("timeout_ms"))
	onError := f.get("on_error").oneOf("reject", "fallback_route", "fallback", "stale_ok")
	if onError == "fallback" {
		onError = "fallback_route"
	}
	o.set("on_error", onError)
	r.header = f.get("proxy_protocol")
	r.proxy = r.header.oneOf("none", "v1", "v2", "v2-udp")
	o.set("proxy_protocol", r.proxy)
	o.millis("target_connect_timeout", f.get("target_connect_timeout_ms"))
	o.seconds("target_idle_timeout", f.get("target_idle_timeout_sec"), 1)
	if c := f.get("cache").fields(); c.given() {
		cache := object{}
		cache.set("key", c.need("key", "what the answer depends on, as in src_ip or first_bytes:0:16").texts())
		cache.seconds("positive_ttl", c.get("positive_ttl_sec"), 0)
		cache.seconds("negative_ttl", c.get("negative_ttl_sec"), 0)
		cache.whole("max_entries", c.get("max_entries"), 1, 1000000)
		c.end()
		o["cache"] = cache
	}
	if len(f.r.problems) == 0 && f.given() {
		if err := commonOptions(o); err != nil {
			f.blame(err, map[string]string{"timeout": "timeout_ms"})
		}
	}
	o["resolver"], o["endpoint"] = kind, at
	return o
}

// commonOptions has the options that all kinds share looked at as a load would.
func commonOptions(o object) error {
	raw, err := json.Marshal(o)
	if err != nil {
		return err
	}
	var s resolver.Settings
	if err := json.Unmarshal(raw, &s); err != nil {
		return err
	}
	if err := s.Provision(caddy.Context{}); err != nil {
		return err
	}
	return s.Validate()
}
