package fetch

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

const secret = "canary-4f1c-token"

var bearer = Options{Header: "Authorization", Prefix: "Bearer "}

func serve(t *testing.T, h http.HandlerFunc) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s
}

func at(t *testing.T, s string) *url.URL {
	t.Helper()
	u, err := ParseURL(s)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// client is one whose access is always the same.
func client(t *testing.T, o Options, a Access) *Client {
	t.Helper()
	c, err := New(o, func() (Access, error) { return a, nil })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func get(c *Client) error {
	ctx, cancel := context.WithTimeout(context.Background(), kit.Long)
	defer cancel()
	resp, err := c.Get(ctx, "v1/things", url.Values{"q": {"a b"}})
	if err == nil {
		resp.Body.Close()
	}
	return err
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestGet(t *testing.T) {
	var got http.Request
	s := serve(t, func(_ http.ResponseWriter, r *http.Request) { got = *r })
	if err := get(client(t, bearer, Access{URL: at(t, s.URL+"/below"), Token: secret})); err != nil {
		t.Fatal(err)
	}
	if got.RequestURI != "/below/v1/things?q=a+b" || got.Header.Get("Authorization") != "Bearer "+secret {
		t.Errorf("asked for %s with %q", got.RequestURI, got.Header)
	}
}

func TestEscapedPath(t *testing.T) {
	var got string
	s := serve(t, func(_ http.ResponseWriter, r *http.Request) { got = r.RequestURI })
	c := client(t, bearer, Access{URL: at(t, s.URL)})
	resp, err := c.Get(context.Background(), "v1/service/"+url.PathEscape("a/b c?d"), nil)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if want := "/v1/service/a%2Fb%20c%3Fd"; got != want {
		t.Errorf("asked for %s, want %s", got, want)
	}
}

func TestStatus(t *testing.T) {
	for name, tc := range map[string]struct {
		code int
		body string
		want string
	}{
		"object":  {403, `{"kind":"Status","message":"endpointslices is forbidden","code":403}`, "status 403: endpointslices is forbidden"},
		"line":    {500, "rpc error: No cluster leader\nmore", "status 500: rpc error: No cluster leader"},
		"page":    {502, "<html>bad gateway</html>", "status 502"},
		"nothing": {503, "", "status 503"},
		"204":     {204, "", "status 204"},
		"echo":    {403, "no such token: " + secret, "status 403: no such token: …"},
		"control": {500, "a\x1b[31mb\rc", "status 500: a [31mb c"},
		"long":    {500, strings.Repeat("ä", 2000), "status 500: " + strings.Repeat("ä", 150) + "…"},
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(tc.code)
				fmt.Fprint(w, tc.body)
			})
			if err := get(client(t, bearer, Access{URL: at(t, s.URL), Token: secret})); err == nil || err.Error() != tc.want {
				t.Errorf("the error is %q, want %q", err, tc.want)
			}
		})
	}
}

func TestRedirectIsNotFollowed(t *testing.T) {
	var strayed atomic.Int64
	other := serve(t, func(http.ResponseWriter, *http.Request) { strayed.Add(1) })
	for _, code := range []int{301, 302, 303, 307, 308} {
		s := serve(t, func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, other.URL, code) })
		err := get(client(t, bearer, Access{URL: at(t, s.URL), Token: secret}))
		if want := fmt.Sprintf("status %d: redirects are not followed", code); err == nil || err.Error() != want {
			t.Errorf("the error is %q, want %q", err, want)
		}
	}
	if n := strayed.Load(); n != 0 {
		t.Errorf("%d requests went where the redirects point to", n)
	}
}

// TestTokenIsReadAgain has a token that is replaced: a minute later the new one
// is sent.
func TestTokenIsReadAgain(t *testing.T) {
	var got string
	s := serve(t, func(_ http.ResponseWriter, r *http.Request) { got = r.Header.Get("X-Token") })
	path := filepath.Join(t.TempDir(), "token")
	write(t, path, "one\n")
	c, err := New(Options{Header: "X-Token"}, func() (Access, error) {
		token, err := TokenFile(path)
		return Access{URL: at(t, s.URL), Token: token}, err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	now := time.Now()
	c.now = func() time.Time { return now }
	for _, step := range []struct {
		file  string // "-" takes it away
		after time.Duration
		want  string
	}{
		{"one\n", 0, "one"},
		{"two\n", time.Minute - time.Second, "one"},
		{"two\n", time.Second, "two"},
		{"-", time.Minute, "two"}, // gone: what was known stays
		{"", time.Minute, "two"},
		{"three", time.Minute, "three"},
	} {
		if step.file == "-" {
			os.Remove(path)
		} else {
			write(t, path, step.file)
		}
		now = now.Add(step.after)
		if err := get(c); err != nil {
			t.Fatal(err)
		}
		if got != step.want {
			t.Errorf("with %q in the file, %v later, %q was sent, want %q", step.file, step.after, got, step.want)
		}
	}
}

// TestRefusedTokenIsReadAtOnce has a token that no longer holds, while a newer
// one is in the file.
func TestRefusedTokenIsReadAtOnce(t *testing.T) {
	for _, code := range []int{401, 403} {
		t.Run(fmt.Sprint(code), func(t *testing.T) {
			var asked int
			valid := "one"
			s := serve(t, func(w http.ResponseWriter, r *http.Request) {
				if asked++; r.Header.Get("X-Token") != valid {
					w.WriteHeader(code)
				}
			})
			path := filepath.Join(t.TempDir(), "token")
			write(t, path, "one")
			c, err := New(Options{Header: "X-Token"}, func() (Access, error) {
				token, err := TokenFile(path)
				return Access{URL: at(t, s.URL), Token: token}, err
			})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			expect := func(what string, wantAsked int, want string) {
				t.Helper()
				asked = 0
				err := get(c)
				if asked != wantAsked || fmt.Sprint(err) != want {
					t.Errorf("%s: asked %d times, %v; want %d times, %s", what, asked, err, wantAsked, want)
				}
			}
			expect("valid", 1, "<nil>")
			valid = "two"
			expect("refused, nothing newer", 1, fmt.Sprintf("status %d", code))
			write(t, path, "two")
			expect("refused, and there is a newer one", 2, "<nil>")
			expect("the newer one", 1, "<nil>")
			valid = "three"
			os.Remove(path)
			expect("refused, and no file", 1, fmt.Sprintf("status %d (what is sent is old: open %s: no such file or directory)", code, path))
		})
	}
}

// authority makes a server whose certificate nobody knows, and the certificate.
func authority(t *testing.T, h http.HandlerFunc) (*httptest.Server, []byte) {
	t.Helper()
	s := httptest.NewUnstartedServer(h)
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	t.Cleanup(s.Close)
	return s, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
}

func TestPrivateAuthority(t *testing.T) {
	s, ca := authority(t, func(http.ResponseWriter, *http.Request) {})
	if err := get(client(t, bearer, Access{URL: at(t, s.URL), Token: secret, Roots: ca})); err != nil {
		t.Errorf("with its authority: %v", err)
	}
	if err := get(client(t, bearer, Access{URL: at(t, s.URL), Token: secret, Roots: ca, ServerName: "example.com"})); err != nil {
		t.Errorf("with another name of its certificate: %v", err)
	}
	for name, a := range map[string]Access{
		"the system's authorities": {URL: at(t, s.URL)},
		"another name":             {URL: at(t, s.URL), Roots: ca, ServerName: "other.example.net"},
	} {
		a.Token = secret
		err := get(client(t, bearer, a))
		var failed *tls.CertificateVerificationError
		if !errors.As(err, &failed) {
			t.Errorf("with %s: %v, want a certificate that is not verified", name, err)
		}
	}
}

// TestAuthorityIsRenewed has the service's certificate replaced, and the file
// with its authority.
func TestAuthorityIsRenewed(t *testing.T) {
	s, ca := authority(t, func(http.ResponseWriter, *http.Request) {})
	roots := testCA(t)
	c, err := New(bearer, func() (Access, error) { return Access{URL: at(t, s.URL), Roots: roots}, nil })
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if get(c) == nil {
		t.Fatal("another authority's certificate is good enough")
	}
	roots = ca
	now := time.Now().Add(time.Minute)
	c.now = func() time.Time { return now }
	if err := get(c); err != nil {
		t.Errorf("with the new authority: %v", err)
	}
}

func TestClientCertificate(t *testing.T) {
	cert, key := testPair(t)
	seen := ""
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		seen = r.TLS.PeerCertificates[0].Subject.CommonName
	}))
	s.TLS = &tls.Config{ClientAuth: tls.RequireAnyClientCert}
	s.StartTLS()
	defer s.Close()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
	if err := get(client(t, bearer, Access{URL: at(t, s.URL), Roots: ca, Cert: cert, Key: key})); err != nil || seen != "wayhouse test" {
		t.Errorf("seen as %q, %v", seen, err)
	}
}

func TestSecretsStayOffTheWire(t *testing.T) {
	cert, key := testPair(t)
	for name, tc := range map[string]struct {
		a    Access
		want string
	}{
		"token to another host":         {Access{URL: at(t, "http://192.0.2.1:8500"), Token: secret}, "in the clear"},
		"certificate to another host":   {Access{URL: at(t, "http://192.0.2.1:8500"), Cert: cert, Key: key}, "over https:// only"},
		"token to a name":               {Access{URL: at(t, "http://localhost.example.com"), Token: secret}, "in the clear"},
		"nothing to another host":       {Access{URL: at(t, "http://192.0.2.1:8500")}, ""},
		"token to loopback":             {Access{URL: at(t, "http://127.0.0.1:8500"), Token: secret}, ""},
		"token to IPv6 loopback":        {Access{URL: at(t, "http://[::1]:8500"), Token: secret}, ""},
		"token to mapped IPv4 loopback": {Access{URL: at(t, "http://[::ffff:127.0.0.1]:8500"), Token: secret}, ""},
		"token to localhost":            {Access{URL: at(t, "http://localhost:8500"), Token: secret}, ""},
		"token over TLS":                {Access{URL: at(t, "https://192.0.2.1:8500"), Token: secret}, ""},
		"a key that is another's":       {Access{URL: at(t, "https://192.0.2.1"), Cert: cert, Key: []byte("x")}, "the client's certificate"},
		"no certificate":                {Access{URL: at(t, "https://192.0.2.1"), Roots: []byte("x")}, "not in PEM"},
	} {
		_, err := New(bearer, func() (Access, error) { return tc.a, nil })
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
		if err != nil && strings.Contains(err.Error(), secret) {
			t.Errorf("%s: the error has the token: %v", name, err)
		}
	}
}

func TestSlowHeaders(t *testing.T) {
	s := serve(t, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	o := bearer
	o.HeaderTimeout = 10 * time.Millisecond
	err := get(client(t, o, Access{URL: at(t, s.URL)}))
	var slow net.Error
	if !errors.As(err, &slow) || !slow.Timeout() {
		t.Errorf("the error is %v, want a timeout", err)
	}
}

func TestHugeHeaders(t *testing.T) {
	s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Huge", strings.Repeat("x", 4*maxHeader))
	})
	if err := get(client(t, bearer, Access{URL: at(t, s.URL)})); err == nil {
		t.Error("256 KiB of headers were taken")
	}
}

func TestParseURL(t *testing.T) {
	for s, want := range map[string]string{
		"https://consul.example.com:8501": "",
		"http://127.0.0.1:8500/consul":    "",
		"":                                "begins with neither",
		"127.0.0.1:8500":                  "not a URL",
		"consul:8500":                     "begins with neither",
		"ftp://a":                         "begins with neither",
		"https://":                        "names no host",
		"https://:8500":                   "names no host",
		"https://u:canary@a":              "a user in the URL",
		"https://u:canary@a:b":            "not a URL",
		"https://a?dc=b":                  "more than a host",
		"https://a?":                      "more than a host",
		"https://a#b":                     "more than a host",
	} {
		_, err := ParseURL(s)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: %v, want %q", s, err, want)
		}
		if err != nil && strings.Contains(err.Error(), "canary") {
			t.Errorf("%q: the error has the password: %v", s, err)
		}
	}
}

func TestFiles(t *testing.T) {
	dir := t.TempDir()
	big := filepath.Join(dir, "big")
	write(t, big, strings.Repeat("x", maxFile+1))
	two := filepath.Join(dir, "two")
	write(t, two, secret+"\nmore")
	empty := filepath.Join(dir, "empty")
	write(t, empty, " \n")
	for path, want := range map[string]string{
		big:                        "more than 1 MiB",
		two:                        "more than a token",
		empty:                      "is empty",
		dir:                        "is not a regular file",
		filepath.Join(dir, "none"): "no such file",
	} {
		_, err := TokenFile(path)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), secret) {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
	}
	if _, err := CAFile(two); err == nil || !strings.Contains(err.Error(), "no certificate") {
		t.Errorf("a token is a certificate: %v", err)
	}
	ca := filepath.Join(dir, "ca")
	write(t, ca, string(testCA(t)))
	if b, err := CAFile(ca); err != nil || !bytes.Equal(b, testCA(t)) {
		t.Errorf("CAFile = %d bytes, %v", len(b), err)
	}
}

// A service behind a socket has a URL that says nothing of where it is.
func TestDial(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	s := &httptest.Server{Listener: l, Config: &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})}}
	s.Start()
	t.Cleanup(s.Close)
	c := client(t, Options{Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return Dial(ctx, "unix", path)
	}}, Access{URL: at(t, "http://localhost")})
	if err := get(c); err != nil {
		t.Error(err)
	}
}
