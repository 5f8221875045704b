package adminsite

import (
	"strings"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// startAt starts a process whose admin endpoint is at a TCP address.
func startAt(t *testing.T, config kit.M, endpoint string) *kit.Process {
	t.Helper()
	config["admin"] = kit.M{"listen": endpoint, "config": kit.M{"persist": false}}
	p := kit.Prepare(t, config, kit.Options{})
	p.Begin()
	ready := newClient(t, "tcp", endpoint)
	ready.host = endpoint
	kit.Eventually(t, "the endpoint is there", func() bool {
		if ready.c == nil && ready.dial() != nil {
			return false
		}
		return ready.do("GET", "/readyz").status == 200
	})
	return p
}

// asked is what a browser, or something else, sends.
type asked struct {
	host    string // with PORT for the port that is asked
	headers []string
	// What must come for a call that is fine otherwise, at Caddy's endpoint and at
	// a site without a token.
	endpoint, site int
}

// browsers are requests as pages have browsers make them, and as programs do.
// Where Caddy looks at another header than the site does, the case is one that no
// browser sends.
var browsers = map[string]asked{
	"a program":                         {"localhost:PORT", nil, 200, 200},
	"a program, by address":             {"127.0.0.1:PORT", nil, 200, 200},
	"rebound name":                      {"evil.example:PORT", nil, 403, 403},
	"rebound name, no port":             {"evil.example", nil, 403, 403},
	"name that looks like":              {"localhost.evil.example:PORT", nil, 403, 403},
	"address that looks like":           {"127.0.0.1.evil.example:PORT", nil, 403, 403},
	"private address":                   {"192.168.1.1:PORT", nil, 403, 403},
	"own page":                          {"localhost:PORT", []string{"Origin", "http://localhost:PORT", "Sec-Fetch-Site", "same-origin", "Sec-Fetch-Mode", "cors"}, 200, 200},
	"own page, any case":                {"LocalHost:PORT", []string{"Origin", "http://localhost:PORT"}, 200, 200},
	"foreign page":                      {"localhost:PORT", []string{"Origin", "https://evil.example", "Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "cors"}, 403, 403},
	"foreign page, old browser":         {"localhost:PORT", []string{"Origin", "https://evil.example"}, 403, 403},
	"foreign page, rebound":             {"evil.example:PORT", []string{"Origin", "http://evil.example:PORT", "Sec-Fetch-Site", "same-origin", "Sec-Fetch-Mode", "cors"}, 403, 403},
	"sandboxed page":                    {"localhost:PORT", []string{"Origin", "null", "Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "cors"}, 400, 403},
	"sandboxed, old browser":            {"localhost:PORT", []string{"Origin", "null"}, 400, 403},
	"page of a sub-domain":              {"localhost:PORT", []string{"Origin", "http://app.localhost:PORT", "Sec-Fetch-Site", "same-site", "Sec-Fetch-Mode", "cors"}, 403, 403},
	"page of another port":              {"localhost:PORT", []string{"Origin", "http://localhost:1", "Sec-Fetch-Site", "same-site", "Sec-Fetch-Mode", "cors"}, 403, 403},
	"page of localhost for the address": {"127.0.0.1:PORT", []string{"Origin", "http://localhost:1", "Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "cors"}, 403, 403},
	"page without CORS":                 {"localhost:PORT", []string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "no-cors"}, 400, 403},
	"form":                              {"localhost:PORT", []string{"Origin", "https://evil.example", "Content-Type", "application/x-www-form-urlencoded", "Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate"}, 403, 403},
	"form of plain text":                {"localhost:PORT", []string{"Origin", "https://evil.example", "Content-Type", "text/plain"}, 403, 403},
	"form of files":                     {"localhost:PORT", []string{"Origin", "https://evil.example", "Content-Type", "multipart/form-data; boundary=x"}, 403, 403},
	"link":                              {"localhost:PORT", []string{"Referer", "https://evil.example/", "Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate"}, 403, 403},
	"extension":                         {"localhost:PORT", []string{"Origin", "chrome-extension://abcdef"}, 403, 403},
	"name as user":                      {"localhost:PORT", []string{"Origin", "http://localhost:PORT@evil.example"}, 403, 403},
	"websocket":                         {"localhost:PORT", []string{"Origin", "https://evil.example", "Connection", "Upgrade", "Upgrade", "websocket", "Sec-WebSocket-Version", "13", "Sec-WebSocket-Key", "AAAAAAAAAAAAAAAAAAAAAA=="}, 400, 403},
}

// ask sends a request as a case has it.
func (a asked) ask(c *client, method, target, body string) answer {
	port := c.addr[strings.LastIndexByte(c.addr, ':')+1:]
	c.host = strings.ReplaceAll(a.host, "PORT", port)
	var headers []string
	for _, h := range a.headers {
		headers = append(headers, strings.ReplaceAll(h, "PORT", port))
	}
	return c.send(method, target, body, headers...)
}

// TestBrowsers lets pages ask what a loopback address serves without a login:
// our calls at Caddy's admin endpoint, whose enforce_origin is off as it is by
// default, and a site without a token.
func TestBrowsers(t *testing.T) {
	config, addr := both(t, matrixConfig(t), kit.M{"handler": "wayhouse_admin"})
	endpoint := kit.Local(kit.Port(t))
	startAt(t, config, endpoint)
	level := func() string {
		c := newClient(t, "tcp", addr)
		defer c.close()
		return c.do("GET", "/admin/overload?format=text").body
	}
	before := level()
	for name, b := range browsers {
		t.Run(name, func(t *testing.T) {
			for _, door := range []struct {
				name, addr string
				want       int
			}{{"endpoint", endpoint, b.endpoint}, {"site", addr, b.site}} {
				c := newClient(t, "tcp", door.addr)
				// It is automatic already, so this changes nothing.
				if a := b.ask(c, "POST", "/admin/overload", `{"auto": true}`); a.status != door.want {
					t.Errorf("%s: POST: %d %s, want %d", door.name, a.status, a.body, door.want)
				}
				for pattern, r := range table {
					if r.calls["GET"].role != "read" {
						continue
					}
					want := r.calls["GET"].status
					if door.want != 200 {
						want = door.want
					}
					a := b.ask(c, "GET", r.path, "")
					if a.status != want {
						t.Errorf("%s: GET %s: %d %s, want %d", door.name, pattern, a.status, a.body, want)
					}
					for k := range a.header {
						if strings.HasPrefix(k, "Access-Control-") && (door.name == "site" || door.want != 200) {
							t.Errorf("%s: GET %s: the answer has %s: %s", door.name, pattern, k, a.header.Get(k))
						}
					}
				}
				if door.want != 200 {
					if a := b.ask(c, "POST", "/admin/overload", `{"level": 2}`); a.status != door.want {
						t.Errorf("%s: POST of another level: %d %s, want %d", door.name, a.status, a.body, door.want)
					}
					if now := level(); now != before {
						t.Fatalf("%s: the level has become %s", door.name, now)
					}
				}
				// A pre-flight tells the page nothing that lets it go on.
				if a := b.ask(c, "OPTIONS", "/admin/overload", ""); door.want != 200 && a.status < 400 {
					t.Errorf("%s: OPTIONS: %d", door.name, a.status)
				}
			}
		})
	}
}

// TestBrowsersWithToken has a site with tokens, where a page has nothing to
// send: a browser attaches no bearer token by itself.
func TestBrowsersWithToken(t *testing.T) {
	config, addr := both(t, matrixConfig(t), handler())
	kit.Start(t, config, kit.Options{})
	c := newClient(t, "tcp", addr)
	for name, b := range browsers {
		if a := b.ask(c, "POST", "/admin/overload", `{"level": 2}`); a.status != 401 {
			t.Errorf("%s: %d %s, want 401", name, a.status, a.body)
		}
		a := b.ask(c, "OPTIONS", "/admin/overload", "")
		if a.status != 401 || a.header.Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("%s: pre-flight: %d %v, want 401", name, a.status, a.header)
		}
	}
}

// TestEndpointOnEveryAddress has Caddy's endpoint where Caddy checks no Host:
// what a page is still refused there.
func TestEndpointOnEveryAddress(t *testing.T) {
	endpoint := kit.Local(kit.Port(t))
	port := endpoint[strings.LastIndexByte(endpoint, ':')+1:]
	config := matrixConfig(t)
	config["admin"] = kit.M{"listen": "0.0.0.0:" + port, "config": kit.M{"persist": false}}
	p := kit.Prepare(t, config, kit.Options{})
	p.Begin()
	c := newClient(t, "tcp", endpoint)
	kit.Eventually(t, "the endpoint is there", func() bool { return c.c != nil || c.dial() == nil })
	for name, b := range browsers {
		if len(b.headers) == 0 || b.endpoint == 200 {
			continue
		}
		if a := b.ask(c, "POST", "/admin/overload", `{"level": 2}`); a.status != b.endpoint {
			t.Errorf("%s: %d %s, want %d", name, a.status, a.body, b.endpoint)
		}
	}
}
