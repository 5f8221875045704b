package docker

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// What goes wrong with a list is an error that says what, and the set stays: the
// host keeps it after an error.
func TestBadAnswers(t *testing.T) {
	hijack := func(text string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			c, _, err := w.(http.Hijacker).Hijack()
			if err != nil {
				panic(err)
			}
			defer c.Close()
			io.WriteString(c, text)
		}
	}
	body := func(text string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, text) }
	}
	for name, tc := range map[string]struct {
		answer http.HandlerFunc
		want   string
	}{
		"a chunk cut off":     {hijack("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n100\r\n[{\"Id\": \"a\"},"), "unexpected EOF"},
		"a body cut off":      {hijack("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n[{\"Id\": \"a\"}"), "unexpected EOF"},
		"no body":             {body(""), "unexpected EOF"},
		"the last chunk gone": {hijack("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[]\r\n"), "unexpected EOF"},
		"no HTTP":             {hijack("SSH-2.0-OpenSSH\r\n"), "malformed HTTP response"},
		"a redirect": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "http://192.0.2.1/", http.StatusFound)
		}, "status 302"},
		"an object":            {body(`{"message": "hello"}`), "where an array belongs"},
		"more after it":        {body(`[] []`), "more follows"},
		"no JSON":              {body(`[<html>`), "invalid character"},
		"another type":         {body(`[{"Id": 5}]`), "cannot unmarshal number"},
		"many containers":      {body("[" + strings.Repeat("{},", maxContainers) + "{}]"), "there are more than 16384 containers"},
		"an error":             {func(w http.ResponseWriter, _ *http.Request) { fail(w, 500, "disk full") }, "status 500: disk full"},
		"an error in HTML":     {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(502); io.WriteString(w, "<html>") }, "status 502"},
		"a large container":    {body(`[{"Id": "` + strings.Repeat("x", 2*maxValue) + `"}]`), "too large"},
		"a header without end": {hijack("HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 1<<20)), "exceeded"},
	} {
		t.Run(name, func(t *testing.T) {
			f, endpoint := newFake(t)
			d := mustLoad(t, lobby(endpoint, nil))
			if got := addrs(t, d); got != "" { // the version is known from here on
				t.Fatal(got)
			}
			f.set(func() { f.answer = tc.answer })
			_, err := d.List(t.Context())
			if err == nil || !strings.HasPrefix(err.Error(), "GET /containers/json: ") || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %.300v, want %s", err, tc.want)
			}
		})
	}
}

// A list without end costs its bound in time and much less in memory.
func TestEndlessList(t *testing.T) {
	f, endpoint := newFake(t)
	d := mustLoad(t, lobby(endpoint, nil))
	addrs(t, d)
	var sent atomic.Int64
	container := []byte(`{"Id": "a", "Labels": {"x": "` + strings.Repeat("x", 64<<10) + `"}},`)
	f.set(func() {
		f.answer = func(w http.ResponseWriter, _ *http.Request) {
			io.WriteString(w, "[")
			for sent.Load() < 1<<30 {
				n, err := w.Write(container)
				if sent.Add(int64(n)); err != nil {
					return
				}
			}
		}
	})
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if _, err := d.List(t.Context()); err == nil || !strings.Contains(err.Error(), "too large") {
		t.Errorf("error %v", err)
	}
	runtime.ReadMemStats(&after)
	// What is read is bounded, and with it what can be allocated for it.
	if n := sent.Load(); n > maxList+16<<20 {
		t.Errorf("%d MiB were taken", n>>20)
	}
	if n := after.TotalAlloc - before.TotalAlloc; n > 10*maxList {
		t.Errorf("%d MiB were allocated", n>>20)
	}
}

// A daemon that takes a request and says nothing is given up when the context
// ends.
func TestSilent(t *testing.T) {
	f, endpoint := newFake(t)
	asked, end := make(chan struct{}), make(chan struct{})
	f.set(func() { f.answer = func(http.ResponseWriter, *http.Request) { close(asked); <-end } })
	defer close(end)
	d := mustLoad(t, lobby(endpoint, nil))
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-asked; cancel() }()
	if _, err := d.List(ctx); err == nil || !strings.Contains(err.Error(), "context canceled") {
		t.Errorf("error %v", err)
	}
}

func TestParseEvents(t *testing.T) {
	const one = `{"Type": "container", "Action": "start", "Actor": {"Attributes": {"a": "b"}}}` + "\n"
	for in, want := range map[string]struct {
		n   int
		err string
	}{
		"":                          {},
		one + one:                   {n: 2},
		one + "null\n":              {n: 2},
		one + `{"Type"`:             {n: 1, err: "unexpected EOF"},
		one + "<":                   {n: 1, err: "invalid character"},
		one + "[]":                  {n: 1, err: "cannot unmarshal array"},
		strings.Repeat(one, 30_000): {n: 30_000}, // more than one may have
		one + `{"x": "` + strings.Repeat("x", 2*maxValue) + `"}`: {n: 1, err: "too large"},
	} {
		n := 0
		err := parseEvents(strings.NewReader(in), func(event) { n++ })
		if n != want.n || (err == nil) != (want.err == "") || err != nil && !strings.Contains(err.Error(), want.err) {
			t.Errorf("%.100q: %d events and %v, want %d and %s", in, n, err, want.n, want.err)
		}
	}
}

func FuzzParseList(f *testing.F) {
	for _, s := range []string{
		`[]`, `null`, `[null]`, `[{}]`, `[{"Id": "a", "Names": ["/a"], "Labels": {"wayhouse.port": "1"}}]`,
		`[{"Ports": [{"IP": "::", "PrivatePort": 1, "PublicPort": 2, "Type": "udp"}]}]`,
		`[{"HostConfig": {"NetworkMode": "container:a"}, "NetworkSettings": {"Networks": {"a": null, "b": {"IPAddress": "10.0.0.1"}}}}]`,
		`[{"HostConfig": {"NetworkMode": "host"}, "NetworkSettings": null, "Labels": {"wayhouse.port": "7-9"}}]`, `[`, `{}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		list, err := parseList(bytes.NewReader(b))
		if err != nil {
			return
		}
		for _, w := range []wants{
			{prefix: "wayhouse", port: anyPort},
			{prefix: "wayhouse", port: anyPort, published: true, host: loopback},
			{prefix: "wayhouse", port: anyPort, published: true, family: ipv6},
		} {
			for i := range list {
				list[i].name()
				list[i].joins()
				e, err := w.endpoint(&list[i], &list[i])
				if err == nil && !e.Addr.IsValid() {
					t.Errorf("%+v is at no address", list[i])
				}
				if err != nil && len(err.Error()) > 4096 {
					t.Errorf("an error of %d bytes", len(err.Error()))
				}
			}
		}
	})
}

func FuzzParseEvents(f *testing.F) {
	for _, s := range []string{
		`{"Type": "container", "Action": "start", "Actor": {"ID": "a", "Attributes": {"wayhouse.pool": "lobby"}}}` + "\n",
		`{"Type": "network"}{}`, `{"Actor": null}`, `{"Actor": {"Attributes": null}}`, `null`, `[]`, `{`,
	} {
		f.Add([]byte(s))
	}
	d := &Source{Labels: []string{"wayhouse.pool=lobby"}}
	f.Fuzz(func(t *testing.T, b []byte) {
		_ = parseEvents(bytes.NewReader(b), func(e event) { d.concerns(e) })
	})
}

// authority makes certificates.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	file string
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t}
	a.cert, a.key = a.sign(&x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign})
	a.file = filepath.Join(t.TempDir(), "ca.pem")
	a.write(a.file, "CERTIFICATE", a.cert.Raw)
	return a
}

func (a *authority) sign(c *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	c.SerialNumber, c.Subject = big.NewInt(1), pkix.Name{CommonName: "wayhouse test"}
	c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	parent, parentKey := c, key
	if a.cert != nil {
		parent, parentKey = a.cert, a.key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, key.Public(), parentKey)
	if err != nil {
		a.t.Fatal(err)
	}
	if c, err = x509.ParseCertificate(der); err != nil {
		a.t.Fatal(err)
	}
	return c, key
}

func (a *authority) write(path, kind string, der []byte) {
	a.t.Helper()
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		a.t.Fatal(err)
	}
}

// client makes the files of a client's certificate.
func (a *authority) client() (cert, key string) {
	c, k := a.sign(&x509.Certificate{ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	dir := a.t.TempDir()
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	a.write(cert, "CERTIFICATE", c.Raw)
	der, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		a.t.Fatal(err)
	}
	a.write(key, "PRIVATE KEY", der)
	return cert, key
}

// A daemon over TLS asks for a certificate, as Docker's own does with
// --tlsverify.
func TestTLS(t *testing.T) {
	a, other := newAuthority(t), newAuthority(t)
	cert, key := a.sign(&x509.Certificate{IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	clients := x509.NewCertPool()
	clients.AddCert(a.cert)
	f, endpoint := newTCPFake(t, &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{cert.Raw}, PrivateKey: key}},
		ClientAuth:   tls.RequireAndVerifyClientCert, ClientCAs: clients,
	})
	f.run(game("one", "172.18.0.2"))
	clientCert, clientKey := a.client()
	otherCert, otherKey := other.client()
	for name, tc := range map[string]struct {
		more kit.M
		want string
	}{
		"all is well":        {kit.M{"ca_file": a.file, "cert_file": clientCert, "key_file": clientKey}, "172.18.0.2:7777"},
		"another authority":  {kit.M{"ca_file": other.file, "cert_file": clientCert, "key_file": clientKey}, "certificate signed by unknown authority"},
		"no certificate":     {kit.M{"ca_file": a.file}, "certificate required"},
		"another's":          {kit.M{"ca_file": a.file, "cert_file": otherCert, "key_file": otherKey}, "unknown certificate authority"},
		"the system's roots": {kit.M{"cert_file": clientCert, "key_file": clientKey}, "certificate signed by unknown authority"},
		"https is the same":  {kit.M{"endpoint": strings.Replace(endpoint, "tcp", "https", 1), "ca_file": a.file, "cert_file": clientCert, "key_file": clientKey}, "172.18.0.2:7777"},
		"in the clear":       {kit.M{}, "status 400"},
	} {
		t.Run(name, func(t *testing.T) {
			d := mustLoad(t, lobby(endpoint, tc.more))
			if got := addrs(t, d); !strings.Contains(got, tc.want) {
				t.Errorf("listed %s, want %s", got, tc.want)
			}
		})
	}
	if _, err := load(t, lobby(endpoint, kit.M{"cert_file": clientCert, "key_file": otherKey})); err == nil || !strings.Contains(err.Error(), "private key does not match") {
		t.Errorf("a key of another: %v", err)
	}
}

// A redirect is not followed.
func TestRedirect(t *testing.T) {
	g, elsewhere := newTCPFake(t, nil)
	f, endpoint := newTCPFake(t, nil)
	f.set(func() {
		f.answer = func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, strings.Replace(elsewhere, "tcp", "http", 1)+r.URL.Path, http.StatusTemporaryRedirect)
		}
	})
	d := mustLoad(t, lobby(endpoint, nil))
	if got := addrs(t, d); !strings.HasPrefix(got, "GET /_ping: status 307") {
		t.Errorf("listed %s", got)
	}
	if asked := g.requests(); len(asked) > 0 {
		t.Errorf("it was followed: %q", asked)
	}
}

// IPv6 all the way.
func TestIPv6Daemon(t *testing.T) {
	l, err := net.Listen("tcp", "[::1]:0")
	kit.Require(t, err, "IPv6 on loopback")
	f := &fake{t: t, listener: func() net.Listener { return l }}
	f.start()
	f.run(running{name: "host", mode: "host", labels: map[string]string{"wayhouse.pool": "lobby", "wayhouse.port": "7000"}})
	d := mustLoad(t, lobby(fmt.Sprintf("tcp://%s", l.Addr()), nil))
	if got := addrs(t, d); got != "[::1]:7000" {
		t.Errorf("listed %s", got)
	}
}
