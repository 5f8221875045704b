package console

import (
	"context"
	"encoding/pem"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// clientOf makes a client as a command does that has these flags.
func clientOf(t *testing.T, args ...string) (*client, error) {
	t.Helper()
	cmd := &cobra.Command{Use: "x"}
	where(cmd)
	if err := cmd.ParseFlags(args); err != nil {
		t.Fatal(err)
	}
	c, err := newClient(cmd)
	if c != nil {
		t.Cleanup(c.http.CloseIdleConnections)
	}
	return c, err
}

func file(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestWhere reads the flags that say which instance is meant.
func TestWhere(t *testing.T) {
	token := file(t, "token", "0123456789abcdef\n")
	for name, tc := range map[string]struct {
		args []string
		env  map[string]string
		base string // "": refused
		text string // of the refusal
	}{
		"nothing":              {nil, nil, "http://localhost:2019", ""},
		"the environment":      {nil, map[string]string{envAddress: "localhost:3000"}, "http://localhost:3000", ""},
		"endpoint":             {[]string{"--address", "10.0.0.1:2019"}, nil, "http://10.0.0.1:2019", ""},
		"port alone":           {[]string{"--address", ":2019"}, nil, "http://localhost:2019", ""},
		"IPv6":                 {[]string{"--address", "[::1]:2019"}, nil, "http://[::1]:2019", ""},
		"socket":               {[]string{"--address", "unix//run/x.sock|0200"}, nil, "http://127.0.0.1", ""},
		"site":                 {[]string{"--address", "https://games.example.com/way/house/", "--token-file", token}, nil, "https://games.example.com/way/house", ""},
		"local site":           {[]string{"--address", "http://localhost:8080", "--token-file", token}, nil, "http://localhost:8080", ""},
		"plain without token":  {[]string{"--address", "http://10.0.0.1"}, nil, "http://10.0.0.1", ""},
		"plain with token":     {[]string{"--address", "http://10.0.0.1", "--token-file", token}, nil, "", "a token goes by https"},
		"plain with env token": {[]string{"--address", "http://games.example.com"}, map[string]string{envToken: "secret"}, "", "a token goes by https"},
		"token for endpoint":   {[]string{"--token-file", token}, nil, "", "--token-file: the address localhost:2019 is an admin endpoint"},
		"CA for endpoint":      {[]string{"--ca-file", token}, nil, "", "--ca-file: the address localhost:2019 is an admin endpoint"},
		"CA for plain":         {[]string{"--address", "http://localhost", "--ca-file", token}, nil, "", "has no TLS"},
		"CA of nothing":        {[]string{"--address", "https://localhost", "--ca-file", token}, nil, "", "no certificate in PEM"},
		"CA not there":         {[]string{"--address", "https://localhost", "--ca-file", "gone"}, nil, "", "--ca-file: open gone"},
		"user in it":           {[]string{"--address", "https://a:b@games.example.com"}, nil, "", "https://games.example.com is all"},
		"query in it":          {[]string{"--address", "https://games.example.com/?token=x"}, nil, "", "https://games.example.com/ is all"},
		"another scheme":       {[]string{"--address", "ftp://games.example.com"}, nil, "", "not a site's address"},
		"no port":              {[]string{"--address", "localhost"}, nil, "", "none of host:port"},
		"ports":                {[]string{"--address", "localhost:1-2"}, nil, "", "none of host:port"},
		"UDP":                  {[]string{"--address", "udp/localhost:1"}, nil, "", "none of host:port"},
		"descriptor":           {[]string{"--address", "fd/3"}, nil, "", "none of host:port"},
		"no token":             {[]string{"--address", "https://localhost", "--token-file", file(t, "empty", " \n")}, nil, "", "is empty"},
		"a long token":         {[]string{"--address", "https://localhost", "--token-file", file(t, "long", strings.Repeat("x", maxToken+1))}, nil, "", "longer than"},
		"two words":            {[]string{"--address", "https://localhost", "--token-file", file(t, "two", "a\r\nX: b")}, nil, "", "one word"},
		"token not there":      {[]string{"--address", "https://localhost", "--token-file", "gone"}, nil, "", "--token-file: open gone"},
		"no time":              {[]string{"--timeout", "0s"}, nil, "", "--timeout: 0s is no time"},
		"an actor":             {nil, map[string]string{envActor: "a\nb"}, "", envActor + ": not at most 100 printable"},
		"adapter alone":        {[]string{"--adapter", "caddyfile"}, nil, "", "needs --config"},
		"config":               {[]string{"--config", file(t, "c.json", `{"admin":{"listen":"localhost:4000"}}`)}, nil, "http://localhost:4000", ""},
		"config of a socket":   {[]string{"--config", file(t, "c.json", `{"admin":{"listen":"unix/{env.NOWHERE}/x"}}`)}, nil, "http://127.0.0.1", ""},
		"config without":       {[]string{"--config", file(t, "c.json", `{}`)}, map[string]string{envAddress: "localhost:1"}, "http://localhost:2019", ""},
		"config with it off":   {[]string{"--config", file(t, "c.json", `{"admin":{"disabled":true}}`)}, nil, "", "has its admin endpoint off"},
		"config not there":     {[]string{"--config", "gone.json"}, nil, "", "--config: "},
		"config and address":   {[]string{"--config", "gone.json", "--address", "localhost:5000"}, nil, "http://localhost:5000", ""},
	} {
		t.Run(name, func(t *testing.T) {
			for _, k := range []string{envAddress, envToken, envActor} {
				t.Setenv(k, tc.env[k])
			}
			c, err := clientOf(t, tc.args...)
			var wrong *misuse
			switch {
			case tc.base == "":
				if !errors.As(err, &wrong) || !strings.Contains(err.Error(), tc.text) || strings.Contains(err.Error(), "secret") {
					t.Errorf("%v, want %s", err, tc.text)
				}
			case err != nil:
				t.Error(err)
			case c.base.String() != tc.base:
				t.Errorf("it asks %s, want %s", &c.base, tc.base)
			}
		})
	}
}

// TestSite has a site with TLS of its own, which the command is to trust, and
// the token it wants.
func TestSite(t *testing.T) {
	t.Setenv(envActor, "tester")
	t.Setenv(envToken, "0123456789abcdef")
	t.Setenv(envAddress, "")
	mux := http.NewServeMux()
	mux.HandleFunc("/endless", func(w http.ResponseWriter, _ *http.Request) {
		b := []byte("[" + strings.Repeat(" ", 1<<20))
		for {
			if _, err := w.Write(b); err != nil {
				return
			}
			b[0] = ' '
		}
	})
	srv := httptest.NewTLSServer(http.StripPrefix("/way/house", mux))
	defer srv.Close()
	check := func(w http.ResponseWriter, r *http.Request) bool {
		if r.Header.Get("Authorization") != "Bearer 0123456789abcdef" {
			w.WriteHeader(http.StatusUnauthorized)
			return false
		}
		return true
	}
	mux.HandleFunc("GET /pools/{pool}", func(w http.ResponseWriter, r *http.Request) {
		if check(w, r) {
			w.Write([]byte(`{"name":"` + r.PathValue("pool") + `"}`))
		}
	})
	mux.HandleFunc("POST /admin/drain", func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Actor") != "tester" {
			w.WriteHeader(http.StatusTeapot)
		}
	})
	mux.HandleFunc("GET /moved", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/elsewhere?x=1", http.StatusFound) })
	mux.HandleFunc("GET /elsewhere", func(http.ResponseWriter, *http.Request) { t.Error("a redirect was followed") })
	mux.HandleFunc("GET /web", func(w http.ResponseWriter, r *http.Request) { w.Write([]byte("<html>")) })
	mux.HandleFunc("GET /cut", func(w http.ResponseWriter, r *http.Request) { w.Write([]byte(`[{"id":"u-1"},`)) })
	mux.HandleFunc("GET /refuses", func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusConflict)
		w.Write([]byte(`{"error":"it is so"}`))
	})
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})
	site := srv.URL + "/way/house/"
	ctx := context.Background()

	c, err := clientOf(t, "--address", site)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.get(ctx, "/pools/x", nil, new(poolView)); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a certificate of nobody: %v", err)
	}
	if c, err = clientOf(t, "--address", site, "--ca-file", file(t, "ca", string(ca))); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"match-eu", "inline:10.0.0.1:7777,a/b", "50% ?#", "ü"} {
		path, err := at("pools", name)
		if err != nil {
			t.Fatal(err)
		}
		var p poolView
		if err := c.get(ctx, path, nil, &p); err != nil || p.Name != name {
			t.Errorf("the pool %q is %q, %v", name, p.Name, err)
		}
	}
	for _, name := range []string{"", ".", ".."} {
		if path, err := at("pools", name); err == nil {
			t.Errorf("%q is in %s", name, path)
		}
	}
	if res, err := c.ask(ctx, http.MethodPost, "/admin/drain", nil, nil); err != nil {
		t.Error(err)
	} else {
		res.Body.Close()
	}
	if err := c.get(ctx, "/endless", nil, new([]poolView)); err == nil || !strings.Contains(err.Error(), "more than 64 MiB") {
		t.Errorf("an answer without an end: %v", err)
	}
	row := func(*sessionView) error { return nil }
	for path, want := range map[string]string{
		"/moved":   "redirect to " + srv.URL + "/elsewhere?x=1, which is not followed",
		"/web":     "is not what the API of wayhouse says",
		"/cut":     "breaks off",
		"/refuses": "it is so",
		"/gone":    "404 Not Found: it does not serve this call",
	} {
		if err := each(ctx, c, path, nil, row); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", path, err, want)
		}
	}
	t.Setenv(envToken, "another")
	if c, err = clientOf(t, "--address", site, "--ca-file", file(t, "ca", string(ca))); err != nil {
		t.Fatal(err)
	}
	if err := c.get(ctx, "/pools/x", nil, new(poolView)); err == nil || !strings.Contains(err.Error(), "answers 401 Unauthorized") || strings.Contains(err.Error(), "another") {
		t.Errorf("a wrong token: %v", err)
	}
}
