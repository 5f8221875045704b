package yamlconfig

import (
	"encoding/hex"
	"net/netip"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"

	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

// noFleet ends the errors about fields that are of use in a fleet only.
const noFleet = "this build runs alone and takes no part in a fleet: leave it out"

// settings reads what is of the whole process: out is the config, app that of
// the app wayhouse and apps what other apps are needed.
func (d *document) settings(f *fields, out, app, apps object) {
	app.whole("workers", f.get("workers"), 0, 127)
	app.seconds("shutdown_grace", f.get("shutdown_grace_sec"), 0)
	d.admin(f.get("admin").fields(), out, apps)
	metrics := f.get("metrics").fields()
	if path := metrics.get("path"); path.given() && path.text() != "/metrics" {
		path.fail("the metrics are at /metrics of the admin address and nowhere else: leave it out")
	}
	metrics.end()
	d.log(f.get("log").fields(), out, app)

	limits, l := object{}, f.get("limits").fields()
	for _, key := range []string{"max_connections", "max_udp_sessions", "max_new_sessions_per_sec"} {
		v := l.get(key)
		if n, ok := v.number(-1<<62, 1<<62); ok && n < 1 {
			v.fail("%d would let nothing through: at least 1, or leave it out for no limit", n)
		} else if ok {
			limits[key] = n
		}
	}
	l.end()
	app.set("limits", limits)

	geo := f.get("geo_db").plain()
	d.geo = geo != ""
	app.set("geo_db", geo)
	d.wasm(f.get("sniffers"), app)

	domain, gossip := f.get("failure_domain"), f.get("gossip")
	if domain.given() != gossip.given() {
		f.fail("failure_domain and gossip are given both or neither")
	}
	for _, v := range []value{f.get("group"), domain, gossip} {
		if v.given() {
			v.fail("%s", noFleet)
		}
	}
	f.end()
}

// admin makes the admin address. Without a token and TLS it is Caddy's own
// endpoint; with them it is a site, and Caddy's endpoint, which knows neither, is
// off.
func (d *document) admin(f *fields, out, apps object) {
	if !f.given() {
		return
	}
	listen := f.need("listen", "the address of the admin API, such as 127.0.0.1:9900")
	addr := listen.plain()
	at, err := netip.ParseAddrPort(addr)
	if addr != "" && (err != nil || at.Port() == 0) {
		listen.fail("%q is not an address and a port, such as 127.0.0.1:9900", addr)
	}
	token := d.token(f)
	tls := f.get("tls").fields()
	cert := tls.need("cert", "a file with the chain in PEM").plain()
	key := tls.need("key", "a file with the key in PEM").plain()
	for _, name := range []string{"max_pending", "max_pending_per_source", "new_per_source_per_sec", "new_per_source_burst"} {
		if v := tls.get(name); v.given() {
			v.fail("this build does not bound handshakes of the admin API: leave it out, and let only trusted networks reach the address")
		}
	}
	tls.end()
	f.end()
	if token == "" && !tls.given() && at.Addr().IsLoopback() {
		out["admin"] = object{"listen": addr}
		return
	}
	out["admin"] = object{"disabled": true}
	handler := object{"handler": "wayhouse_admin"}
	if token != "" {
		handler["tokens"] = []object{{"token": token}}
	} else if !at.Addr().IsLoopback() {
		handler["insecure_no_auth"] = true
		d.warn(listen, "other hosts may reach the admin API, and no auth_token guards it")
	}
	server := object{
		"listen":          []string{addr},
		"routes":          []object{{"handle": []object{handler}}},
		"automatic_https": object{"disable": true},
	}
	if tls.given() {
		server["tls_connection_policies"] = []object{{}}
		apps["tls"] = object{"certificates": object{"load_files": []object{{"certificate": cert, "key": key}}}}
	}
	apps["http"] = object{"servers": object{"wayhouse_admin": server}}
}

// token is the secret of the admin API, as the handler takes it. A variable is
// left for the handler to read, so that the JSON does not have the secret.
func (d *document) token(f *fields) string {
	v := f.get("auth_token")
	if auth := f.get("auth"); auth.given() {
		a := auth.fields()
		mode := a.need("mode", "bearer")
		if s := mode.oneOf("bearer", "mtls"); s == "mtls" {
			mode.fail("this build's YAML has no client certificates for the admin API: use bearer, or a site of a Caddyfile with client_auth")
		}
		inner := a.need("token", "the secret, as in ${ADMIN_TOKEN}")
		a.end()
		if v.given() {
			auth.fail("auth_token is given too: leave one of the two out")
		}
		v = inner
	}
	s := v.some()
	if s == "" {
		return ""
	}
	if len(s) < 16 || len(s) > 1024 || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' }) {
		v.fail("the token is not of 16 to 1024 visible ASCII characters")
		return ""
	}
	if m := variableName.FindStringSubmatch(v.n.Value); m != nil {
		return "{env." + m[1] + "}"
	}
	return strings.ReplaceAll(strings.ReplaceAll(s, `\`, `\\`), "{", `\{`)
}

func (d *document) warn(v value, text string) {
	w := caddyconfig.Warning{File: d.file, Directive: v.where(), Message: text}
	if v.n != nil {
		w.Line = v.n.Line
	}
	d.warnings = append(d.warnings, w)
}

func (d *document) log(f *fields, out, app object) {
	log := object{}
	switch f.get("format").oneOf("json", "text") {
	case "json":
		log["encoder"] = object{"format": "json"}
	case "text":
		log["encoder"] = object{"format": "console"}
	}
	if level := f.get("level").oneOf("debug", "info", "warn", "error"); level != "" {
		log["level"] = strings.ToUpper(level)
	}
	if v := f.get("connection_log"); v.given() {
		c := v.fields()
		enabled := c.need("enabled", "true or false").truth()
		share := c.get("sample")
		sample, given := share.decimal()
		switch {
		case given && !(sample >= 0 && sample <= 1):
			share.fail("%v is not from 0 to 1", sample)
		case given && sample == 0 && enabled:
			share.fail("0 logs nothing: say enabled: false")
		}
		c.end()
		if enabled {
			sessions := object{}
			if given {
				sessions["sample"] = sample
			}
			app["connection_log"] = sessions
		}
	}
	f.end()
	if len(log) > 0 {
		out["logging"] = object{"logs": object{caddy.DefaultLoggerName: log}}
	}
}

// wasm reads settings.sniffers.
func (d *document) wasm(v value, app object) {
	if !v.given() {
		return
	}
	d.sniffers = true
	f, host := v.fields(), object{}
	host.set("dir", f.need("dir", "the directory of the modules").some())
	host.millis("call_timeout", f.get("call_timeout_ms"))
	host.whole("max_memory", f.get("max_memory_bytes"), 1, 4<<30)
	pins := d.named(f.get("modules"), func(name string, m *fields) object {
		pin := object{}
		if err := sniff.CheckName(name); name != "" && err != nil {
			m.get("name").fail("%s", err)
		}
		sum := m.need("sha256", "the hash of the file")
		s := sum.some()
		if b, err := hex.DecodeString(s); s != "" && (err != nil || len(b) != 32) {
			sum.fail("%q is not 64 hexadecimal digits", s)
		}
		pin["sha256"] = s
		pin.set("config", m.get("config").some())
		return pin
	})
	if len(pins) > 0 {
		host["modules"] = pins
	}
	f.end()
	app["sniffers"] = object{"wasm": host}
}
