package adminapi

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddytls"
)

const (
	readToken1    = "read-0123456789abcdef"
	operateToken1 = "operate-0123456789abc"
	adminToken1   = "admin-0123456789abcde"
)

// handler is a handler in the config of a server that listens on addresses.
func handler(t *testing.T, h *Handler, listen ...string) (*Handler, error) {
	t.Helper()
	ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
	t.Cleanup(cancel)
	if len(listen) > 0 {
		srv := &caddyhttp.Server{Listen: listen, TLSConnPolicies: caddytls.ConnectionPolicies{{}}}
		ctx.Context = context.WithValue(ctx.Context, caddyhttp.ServerCtxKey, srv)
	}
	return h, h.Provision(ctx)
}

// newHandler is one that must be accepted.
func newHandler(t *testing.T, h *Handler, listen ...string) *Handler {
	t.Helper()
	h, err := handler(t, h, listen...)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// do asks a handler, from an address of the test's own.
func do(t *testing.T, h *Handler, r *http.Request) *httptest.ResponseRecorder {
	t.Helper()
	w := httptest.NewRecorder()
	next := caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
		t.Error("the request was passed on")
		return nil
	})
	if err := h.ServeHTTP(w, r, next); err != nil {
		t.Errorf("%s %s: %v", r.Method, r.URL, err)
	}
	return w
}

// TestWhereNoTokenIsNeeded has the sites that are served without a token.
func TestWhereNoTokenIsNeeded(t *testing.T) {
	for _, listen := range [][]string{
		{"127.0.0.1:80"}, {"tcp/127.9.9.9:80"}, {"[::1]:443"}, {"localhost:8080"}, {"unix//run/x.sock"},
		{"LOCALHOST:1", "unix//x"}, {"[::ffff:127.0.0.1]:80"}, {"udp/127.0.0.1:443", "tcp4/127.0.0.1:443"}, {"127.0.0.1:8000-8010"},
	} {
		if _, err := handler(t, new(Handler), listen...); err != nil {
			t.Errorf("%v: %v", listen, err)
		}
	}
	for _, listen := range [][]string{
		nil, {":443"}, {"0.0.0.0:80"}, {"[::]:80"}, {"192.0.2.1:80"}, {"127.0.0.1:80", "192.0.2.1:80"}, {"example.com:80"},
		{"localhost.example.com:80"}, {"wayhouse/web"}, {"fd/3"}, {"127.0.0.1.example.com:80"}, {"unix//x", ":0"}, {"10.127.0.1:80"}, {"a:b:c"},
	} {
		_, err := handler(t, new(Handler), listen...)
		if err == nil || !strings.HasPrefix(err.Error(), "tokens: none, and the site listens on ") {
			t.Errorf("%v: %v, want it refused", listen, err)
		}
		if _, err := handler(t, &Handler{InsecureNoAuth: true}, listen...); err != nil {
			t.Errorf("%v with insecure_no_auth: %v", listen, err)
		}
		if _, err := handler(t, &Handler{Tokens: []*Token{{Token: adminToken1}}}, listen...); err != nil && listen != nil {
			t.Errorf("%v with a token: %v", listen, err)
		}
	}
}

func TestTokensRefused(t *testing.T) {
	dir := t.TempDir()
	file := func(name, content string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return "{file." + path + "}"
	}
	t.Setenv("WAYHOUSE_TEST_SHORT", "hunter2")
	t.Setenv("WAYHOUSE_TEST_EMPTY", "")
	const secret = "SECRET-in-the-config"
	for name, tc := range map[string]struct {
		tokens []*Token
		want   string
	}{
		"null":         {[]*Token{nil}, "tokens[0]: is null"},
		"none":         {[]*Token{{Token: adminToken1}, {}}, "tokens[1].token: missing"},
		"short":        {[]*Token{{Token: "fifteen-bytes-x"}}, "tokens[0].token: 15 bytes are fewer than 16"},
		"long":         {[]*Token{{Token: strings.Repeat("x", 1025)}}, "tokens[0].token: is longer than 1024 bytes"},
		"blank":        {[]*Token{{Token: secret + " x"}}, "tokens[0].token: has characters that are not visible ASCII, which no header can carry"},
		"umlaut":       {[]*Token{{Token: secret + "ü"}}, "tokens[0].token: has characters that are not visible ASCII, which no header can carry"},
		"short env":    {[]*Token{{Token: "{env.WAYHOUSE_TEST_SHORT}"}}, "tokens[0].token: 7 bytes are fewer than 16"},
		"empty env":    {[]*Token{{Token: "{env.WAYHOUSE_TEST_EMPTY}"}}, "tokens[0].token: {env.WAYHOUSE_TEST_EMPTY} is not set, or empty"},
		"unset env":    {[]*Token{{Token: "{env.WAYHOUSE_TEST_UNSET}"}}, "tokens[0].token: {env.WAYHOUSE_TEST_UNSET} is not set, or empty"},
		"brace":        {[]*Token{{Token: "{" + secret + "}"}}, `tokens[0].token: what is in braces is no placeholder that is known, or is empty; write \{ for a brace of the token's own`},
		"no file":      {[]*Token{{Token: "{file." + dir + "/none}"}}, "tokens[0].token: open " + dir + "/none: no such file or directory"},
		"directory":    {[]*Token{{Token: "{file." + dir + "}"}}, "tokens[0].token: " + dir + " is not a regular file"},
		"empty file":   {[]*Token{{Token: file("empty", "\n")}}, "tokens[0].token: " + dir + "/empty: is empty"},
		"two lines":    {[]*Token{{Token: file("lines", secret+"\n"+secret+"\n")}}, "tokens[0].token: " + dir + "/lines: has characters that are not visible ASCII, which no header can carry"},
		"large file":   {[]*Token{{Token: file("large", strings.Repeat("x", 1<<20))}}, "tokens[0].token: " + dir + "/large: is longer than 1024 bytes"},
		"misplaced":    {[]*Token{{Token: "read", Role: secret}}, "tokens[0].role: give read, operate or admin"},
		"role":         {[]*Token{{Token: adminToken1, Role: "root"}}, "tokens[0].role: give read, operate or admin"},
		"twice":        {[]*Token{{Token: adminToken1}, {Token: readToken1}, {Token: adminToken1, Role: "read"}}, "tokens[2].token: the same as that of tokens[0]"},
		"twice a file": {[]*Token{{Token: adminToken1}, {Token: file("same", adminToken1)}}, "tokens[1].token: the same as that of tokens[0]"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := handler(t, &Handler{Tokens: tc.tokens}, ":443")
			if err == nil || err.Error() != tc.want {
				t.Errorf("got %v, want %s", err, tc.want)
			}
			if err != nil && (strings.Contains(err.Error(), secret) || strings.Contains(err.Error(), "hunter2")) {
				t.Errorf("the error tells the token: %v", err)
			}
		})
	}
	_, err := handler(t, &Handler{Tokens: []*Token{{Token: adminToken1}}, InsecureNoAuth: true}, ":443")
	if err == nil || !strings.HasPrefix(err.Error(), "insecure_no_auth: there are tokens too") {
		t.Errorf("both a token and none: %v", err)
	}
}

// TestTokensRead has the ways to give a token; each opens the API.
func TestTokensRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(path, []byte("of-a-file-0123456789\r\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("WAYHOUSE_TEST_TOKEN", "of-the-env-0123456789")
	h := newHandler(t, &Handler{Tokens: []*Token{
		{Token: "literal-0123456789~!"}, {Token: "{env.WAYHOUSE_TEST_TOKEN}"}, {Token: "{file." + path + "}"}, {Token: `with-\{a-brace}-0123`}, {Token: "b-{env.WAYHOUSE_TEST_TOKEN}"},
	}}, ":443")
	for token, want := range map[string]int{
		"literal-0123456789~!":        200,
		"of-the-env-0123456789":       200,
		"of-a-file-0123456789":        200,
		"with-{a-brace}-0123":         200,
		"b-of-the-env-0123456789":     200,
		"{env.WAYHOUSE_TEST_TOKEN}":   401,
		"of-a-file-0123456789\r\n":    401,
		"literal-0123456789~":         401,
		"literal-0123456789~!!":       401,
		"LITERAL-0123456789~!":        401,
		"{file." + path + "}":         401,
		"b-{env.WAYHOUSE_TEST_TOKEN}": 401,
	} {
		r := httptest.NewRequest("GET", "/pools", nil)
		r.Header["Authorization"] = []string{"Bearer " + token}
		if w := do(t, h, r); w.Code != want {
			t.Errorf("%q: %d %s, want %d", token, w.Code, w.Body, want)
		}
	}
}

// TestAuthorization has what the header may look like.
func TestAuthorization(t *testing.T) {
	h := newHandler(t, &Handler{Tokens: []*Token{{Token: adminToken1}}}, ":443")
	for name, tc := range map[string]struct {
		headers []string
		want    int
		reason  string // in WWW-Authenticate
	}{
		"right":          {[]string{"Bearer " + adminToken1}, 200, ""},
		"any case":       {[]string{"bEARER " + adminToken1}, 200, ""},
		"blanks":         {[]string{"Bearer   " + adminToken1 + " "}, 200, ""},
		"none":           {nil, 401, `Bearer realm="wayhouse"`},
		"empty":          {[]string{""}, 401, `Bearer realm="wayhouse"`},
		"no token":       {[]string{"Bearer "}, 401, `Bearer realm="wayhouse"`},
		"bare":           {[]string{adminToken1}, 401, `Bearer realm="wayhouse"`},
		"another scheme": {[]string{"Basic " + adminToken1}, 401, `Bearer realm="wayhouse"`},
		"wrong":          {[]string{"Bearer " + adminToken1 + "x"}, 401, `Bearer realm="wayhouse", error="invalid_token"`},
		"two tokens":     {[]string{"Bearer " + adminToken1 + " " + adminToken1}, 401, `Bearer realm="wayhouse", error="invalid_token"`},
		"two headers":    {[]string{"Bearer " + adminToken1, "Bearer " + adminToken1}, 401, `Bearer realm="wayhouse", error="invalid_token"`},
		"right and none": {[]string{"Bearer " + adminToken1, ""}, 401, `Bearer realm="wayhouse", error="invalid_token"`},
	} {
		t.Run(name, func(t *testing.T) {
			r := httptest.NewRequest("GET", "/pools", nil)
			r.RemoteAddr = "192.0.2.77:1"
			r.Header["Authorization"] = tc.headers
			w := do(t, h, r)
			if got := w.Header().Get("WWW-Authenticate"); w.Code != tc.want || got != tc.reason {
				t.Errorf("%d %s, want %d; WWW-Authenticate: %s, want %s", w.Code, w.Body, tc.want, got, tc.reason)
			}
			if w.Code == 401 && !json.Valid(w.Body.Bytes()) {
				t.Errorf("the error is no JSON: %s", w.Body)
			}
		})
	}
	for _, place := range []string{"/pools?token=" + adminToken1, "/pools?access_token=" + adminToken1, "/pools?authorization=Bearer+" + adminToken1} {
		if w := do(t, h, httptest.NewRequest("GET", place, nil)); w.Code != 401 {
			t.Errorf("a token in the query: %d", w.Code)
		}
	}
}

// TestNoLogin has what is asked where no token is needed: by this host's
// programs, not by pages in its browsers.
func TestNoLogin(t *testing.T) {
	loopback := newHandler(t, new(Handler), "127.0.0.1:8080", "unix//x")
	socket := newHandler(t, new(Handler), "unix//x")
	open := newHandler(t, &Handler{InsecureNoAuth: true}, ":8080")
	type h = map[string]string
	for name, tc := range map[string]struct {
		host                   string
		headers                h
		loopback, socket, open int
	}{
		"curl":              {"localhost:8080", nil, 204, 204, 204},
		"by address":        {"127.0.0.1:8080", nil, 204, 204, 204},
		"IPv6":              {"[::1]:8080", nil, 204, 204, 204},
		"IPv6, no port":     {"[::1]", nil, 204, 204, 204},
		"any case":          {"LocalHost", nil, 204, 204, 204},
		"below localhost":   {"admin.localhost:8080", nil, 204, 204, 204},
		"rebound name":      {"evil.example:8080", nil, 403, 204, 204},
		"looks like it":     {"localhost.evil.example", nil, 403, 204, 204},
		"address in a name": {"127.0.0.1.evil.example", nil, 403, 204, 204},
		"private address":   {"192.168.0.1:8080", nil, 403, 204, 204},
		"no host":           {"", nil, 403, 204, 204},

		"own page":          {"localhost:8080", h{"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost:8080"}, 204, 204, 204},
		"typed":             {"localhost:8080", h{"Sec-Fetch-Site": "none"}, 204, 204, 204},
		"other site":        {"localhost:8080", h{"Sec-Fetch-Site": "cross-site"}, 403, 403, 403},
		"sister site":       {"localhost:8080", h{"Sec-Fetch-Site": "same-site"}, 403, 403, 403},
		"unknown word":      {"localhost:8080", h{"Sec-Fetch-Site": "near"}, 403, 403, 403},
		"origin":            {"localhost:8080", h{"Origin": "http://localhost:8080"}, 204, 204, 204},
		"origin, any case":  {"localhost:8080", h{"Origin": "http://LOCALHOST:8080"}, 204, 204, 204},
		"foreign origin":    {"localhost:8080", h{"Origin": "https://evil.example"}, 403, 403, 403},
		"null origin":       {"localhost:8080", h{"Origin": "null"}, 403, 403, 403},
		"empty origin":      {"localhost:8080", h{"Origin": ""}, 403, 403, 403},
		"other port":        {"localhost:8080", h{"Origin": "http://localhost:3000"}, 403, 403, 403},
		"sub-domain":        {"localhost:8080", h{"Origin": "http://a.localhost:8080"}, 403, 403, 403},
		"name in user-info": {"localhost:8080", h{"Origin": "http://localhost:8080@evil.example"}, 403, 403, 403},
		"extension":         {"localhost:8080", h{"Origin": "moz-extension://0f"}, 403, 403, 403},
		"form":              {"localhost:8080", h{"Origin": "https://evil.example", "Content-Type": "text/plain"}, 403, 403, 403},
	} {
		t.Run(name, func(t *testing.T) {
			for _, x := range []struct {
				name string
				h    *Handler
				want int
			}{{"loopback", loopback, tc.loopback}, {"socket", socket, tc.socket}, {"insecure_no_auth", open, tc.open}} {
				for _, method := range []string{"POST", "GET"} {
					r := httptest.NewRequest(method, "/admin/overload", strings.NewReader(`{"auto": true}`))
					r.Host = tc.host
					for k, v := range tc.headers {
						r.Header.Set(k, v)
					}
					want := x.want
					if want == 204 {
						want = 200
					}
					if w := do(t, x.h, r); w.Code != want {
						t.Errorf("%s, %s: %d %s, want %d", x.name, method, w.Code, w.Body, want)
					}
				}
			}
		})
	}
}

// TestRoles has the least role of every call. One that is not here fails it.
func TestRoles(t *testing.T) {
	want := map[string]role{
		"GET /healthz": nobody, "GET /readyz": nobody,
		"GET /pools": reader, "GET /pools/{pool}": reader, "GET /sessions": reader, "GET /sessions/{id}": reader,
		"GET /listeners": reader, "GET /wayhouse/config/last-rejected": reader, "GET /web": reader, "GET /route-hints": reader, "GET /admin/overload": reader, "GET /admin/sniffers": reader, "GET /metrics": reader,
		"DELETE /sessions/{id}": operate, "POST /route-hint": operate, "DELETE /route-hints/{src_ip}": operate, "POST /explain": operate,
		"GET /sessions/resolve": reader, "GET /overlay": reader, "DELETE /overlay": admin,
		"POST /pools/{pool}/backends": operate, "PATCH /pools/{pool}/backends/{addr}": operate, "DELETE /pools/{pool}/backends/{addr}": operate,
		"POST /admin/drain": operate, "POST /admin/undrain": operate,
		"POST /admin/overload": admin, "POST /admin/reload": admin, "POST /admin/sniffers": admin,
		"DELETE /admin/sniffers/{name}": admin, "POST /admin/sniffers/{name}/rollback": admin,
	}
	h := newHandler(t, &Handler{Tokens: []*Token{{Token: adminToken1}}}, ":443")
	for pattern, methods := range h.calls {
		for method := range methods {
			key := method + " " + pattern
			if w, ok := want[key]; !ok {
				t.Errorf("%s is not in the table of this test", key)
			} else if got := roleOf(pattern, method); got != w {
				t.Errorf("%s: %s, want %s", key, got, w)
			}
			delete(want, key)
		}
	}
	for key := range want {
		t.Errorf("there is no %s", key)
	}
}

// TestCaddyfile has what the directive becomes.
func TestCaddyfile(t *testing.T) {
	for in, want := range map[string]string{
		"wayhouse_admin":                                              `{}`,
		"wayhouse_admin {\n insecure_no_auth\n}":                      `{"insecure_no_auth":true}`,
		"wayhouse_admin {\n token {env.T}\n}":                         `{"tokens":[{"token":"{env.T}"}]}`,
		"wayhouse_admin {\n token a read\n token b operate panel\n}":  `{"tokens":[{"token":"a","role":"read"},{"token":"b","role":"operate","name":"panel"}]}`,
		"wayhouse_admin {\n token\n}":                                 `token: a value is missing, at Testfile:2`,
		"wayhouse_admin {\n token a read panel more\n}":               `token: more than a token, its role and a name; quote what has blanks, at Testfile:2`,
		"wayhouse_admin {\n token a {\n role read\n}\n}":              `token: takes no block, at Testfile:3`,
		"wayhouse_admin {\n insecure_no_auth\n insecure_no_auth\n}":   `insecure_no_auth: given twice, first in line 2, at Testfile:3`,
		"wayhouse_admin {\n insecure_no_auth on\n}":                   `insecure_no_auth: unexpected argument "on", at Testfile:2`,
		"wayhouse_admin {\n tokens a\n}":                              `unrecognized option "tokens" of wayhouse_admin; did you mean token?, at Testfile:2`,
		"wayhouse_admin secret-on-this-line-0123 {\n token abcdef\n}": `wayhouse_admin: takes no arguments; tokens stand in its block, at Testfile:1`,
	} {
		var h Handler
		var got string
		if err := h.UnmarshalCaddyfile(caddyfile.NewTestDispenser(in)); err != nil {
			got = err.Error()
		} else {
			b, err := json.Marshal(&h)
			if err != nil {
				t.Fatal(err)
			}
			got = string(b)
		}
		if got != want {
			t.Errorf("%s\ngives %s\nwant  %s", in, got, want)
		}
	}
}
