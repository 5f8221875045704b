package kube

import (
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/kube/kubetest"
)

func writeFile(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// certificate is the authority of a server, in PEM.
func certificate(api *kubetest.API) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: api.Certificate().Raw}))
}

// TestInPod has what a pod finds: the API's address in the environment, a token
// and an authority in files.
func TestInPod(t *testing.T) {
	api := kubetest.NewTLS(t)
	api.Require(canary)
	dir := t.TempDir()
	mounted := pod{filepath.Join(dir, "token"), filepath.Join(dir, "ca.crt")}
	writeFile(t, mounted.token, canary+"\n")
	writeFile(t, mounted.ca, certificate(api))
	host, port, _ := strings.Cut(strings.TrimPrefix(api.URL, "https://"), ":")
	t.Setenv("KUBERNETES_SERVICE_HOST", host)
	t.Setenv("KUBERNETES_SERVICE_PORT", port)
	c, err := (&Access{pod: mounted}).Connect()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if c.Namespace() != "default" {
		t.Errorf("the namespace is %s", c.Namespace())
	}
	mustList(t, c.Follow(Objects{Group: "example.com/v1", Resource: "things"}))

	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	u, err := (&Access{}).url()
	if err != nil || u.String() != "https://kubernetes.default.svc" {
		t.Errorf("without the environment the API is %v, %v", u, err)
	}
	t.Setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
	if u, err = (&Access{}).url(); err != nil || u.String() != "https://[fd00::1]:"+port {
		t.Errorf("with IPv6 the API is %v, %v", u, err)
	}
}

// TestWrongAuthority has an API that somebody else vouches for: it must not get
// the token.
func TestWrongAuthority(t *testing.T) {
	api := kubetest.NewTLS(t)
	token := filepath.Join(t.TempDir(), "token")
	writeFile(t, token, canary)
	if got := listError(t, follow(t, Access{TokenFile: token}, api)); !strings.Contains(got, "certificate") {
		t.Error(got)
	}
	if n := api.Lists(); n != 0 {
		t.Errorf("the API was asked %d times", n)
	}
}

func TestConnectRefuses(t *testing.T) {
	dir := t.TempDir()
	token, ca := filepath.Join(dir, "token"), filepath.Join(dir, "ca")
	writeFile(t, token, canary)
	writeFile(t, ca, "x")
	none := filepath.Join(dir, "none")
	for name, tc := range map[string]struct {
		a    Access
		want string
	}{
		"no pod":               {Access{}, "token_file: there is no " + none + ", as in a pod"},
		"http to another host": {Access{API: "http://192.0.2.1:8080", TokenFile: token}, "api: \"http://192.0.2.1:8080\" is http:// to another host"},
		"http without token":   {Access{API: "http://192.0.2.1:8080"}, "api: \"http://192.0.2.1:8080\" is http:// to another host"},
		"user":                 {Access{API: "https://a:canary@192.0.2.1"}, "api: a user in the URL"},
		"no URL":               {Access{API: "192.0.2.1:6443"}, "api: this is not a URL"},
		"no token file":        {Access{API: "https://192.0.2.1", TokenFile: none}, "token_file: open " + none},
		"no CA file":           {Access{API: "https://192.0.2.1", CAFile: none}, "ca_file: open " + none},
		"CA file of nothing":   {Access{API: "https://192.0.2.1", CAFile: ca}, "ca_file: " + ca + " has no certificate in PEM"},
		"CA file over http":    {Access{API: "http://127.0.0.1", CAFile: ca}, "ca_file: the API is http://"},
		"namespace":            {Access{API: "https://192.0.2.1", Namespace: "a/b"}, "namespace: \"a/b\" is not made of"},
		"placeholder":          {Access{Namespace: "{env.WAYHOUSE_TEST_NONE}"}, "namespace: "},
		"context alone":        {Access{Context: "x"}, "context: is of a kubeconfig"},
		"both":                 {Access{Kubeconfig: none, API: "https://a"}, "api: the kubeconfig says that"},
		"both tokens":          {Access{Kubeconfig: none, TokenFile: token}, "token_file: the kubeconfig says that"},
		"no kubeconfig":        {Access{Kubeconfig: none}, "kubeconfig: open " + none},
	} {
		tc.a.pod = pod{none, none}
		_, err := tc.a.Connect()
		if err == nil || !strings.HasPrefix(err.Error(), tc.want) || strings.Contains(err.Error(), "canary") {
			t.Errorf("%s: %v, want %s…", name, err, tc.want)
		}
	}
}

const kubeconfigHead = `
apiVersion: v1
kind: Config
preferences: {}
current-context: games
contexts:
- {name: games, context: {cluster: home, user: wayhouse, namespace: games}}
- {name: plain, context: {cluster: home, user: wayhouse}}
- {name: nobody, context: {cluster: home}}
- {name: lost, context: {cluster: hom, user: wayhouse}}
- {name: stranger, context: {cluster: home, user: wayhous}}
`

func TestKubeconfig(t *testing.T) {
	const server = "clusters:\n- {name: home, cluster: {server: 'https://192.0.2.1:6443'}}\n"
	users := func(s string) string {
		return kubeconfigHead + server + "users:\n- {name: wayhouse, user: {" + s + "}}\n"
	}
	clusters := func(s string) string { return kubeconfigHead + "clusters:\n- {name: home, cluster: {" + s + "}}\n" }
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "token"), canary+"-file\n")
	writeFile(t, filepath.Join(dir, "pem"), "of a file")
	data := base64.StdEncoding.EncodeToString([]byte("of data"))
	for name, tc := range map[string]struct {
		file, context string
		want          string // of namespace, token, roots, cert and key
		err           string
	}{
		"token":              {users("token: " + canary), "", "games " + canary + " - - -", ""},
		"token file":         {users("tokenFile: token, token: x"), "", "games " + canary + "-file - - -", ""},
		"absolute path":      {users("tokenFile: " + dir + "/token"), "", "games " + canary + "-file - - -", ""},
		"certificates":       {users("client-certificate: pem, client-key-data: " + data), "", "games  - of a file of data", ""},
		"data before a file": {users("client-certificate: pem, client-certificate-data: " + data + ", client-key: pem"), "", "games  - of data of a file", ""},
		"CA file":            {clusters("server: 'https://a', certificate-authority: pem"), "nobody", "  of a file - -", ""},
		"CA data":            {clusters("server: 'https://a', certificate-authority-data: " + data), "nobody", "  of data - -", ""},
		"another context":    {users("token: " + canary), "plain", " " + canary + " - - -", ""},
		"extensions":         {users("token: "+canary) + "extensions: [{name: x, extension: {a: b}}]\n", "", "games " + canary + " - - -", ""},

		"exec":             {users("exec: {command: aws, args: [eks, get-token]}"), "", "", "user wayhouse: exec: no programs are run"},
		"auth-provider":    {users("auth-provider: {name: oidc}"), "", "", "user wayhouse: auth-provider: it is not supported"},
		"password":         {users("username: u, password: " + canary), "", "", "user wayhouse: username: passwords are not sent"},
		"impersonation":    {users("token: t, as: root"), "", "", "user wayhouse: as: nobody is impersonated"},
		"one certificate":  {users("client-certificate: pem"), "", "", "user wayhouse: client-certificate and client-key go together"},
		"no file":          {users("tokenFile: none"), "", "", "user wayhouse: tokenFile: open " + dir + "/none"},
		"no base64":        {users("client-key-data: '*" + canary + "'"), "", "", "user wayhouse: client-key: the data is not base64"},
		"two tokens":       {users(`token: "` + canary + `\nx"`), "", "", "user wayhouse: token: it holds more than a token"},
		"insecure":         {clusters("server: 'https://a', insecure-skip-tls-verify: true"), "", "", "cluster home: insecure-skip-tls-verify: "},
		"proxy":            {clusters("server: 'https://a', proxy-url: 'http://b'"), "", "", "cluster home: proxy-url: proxies are not used"},
		"in the clear":     {clusters("server: 'http://192.0.2.1'"), "", "", "cluster home: server: \"http://192.0.2.1\" is http:// to another host"},
		"no server":        {clusters(""), "", "", "cluster home: server: "},
		"no such context":  {users(""), "game", "", `no context is named "game"; did you mean games?`},
		"no such cluster":  {users(""), "lost", "", `context lost: no cluster is named "hom"; did you mean home?`},
		"no such user":     {users(""), "stranger", "", `context stranger: no user is named "wayhous"; did you mean wayhouse?`},
		"no context":       {"clusters: []", "", "", "it has no current-context"},
		"no YAML":          {"a: b: " + canary, "", "", "this is not the YAML of a kubeconfig"},
		"YAML of no file":  {"[" + canary + "]", "", "", "this is not the YAML of a kubeconfig"},
		"empty":            {"", "", "", "it has no current-context"},
		"aliases of alias": {"a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n", "", "", "it has no current-context"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(dir, "config")
			writeFile(t, path, tc.file)
			k, err := readKubeconfig(path, tc.context)
			if tc.err != "" {
				if want := path + ": " + tc.err; err == nil || !strings.HasPrefix(err.Error(), want) {
					t.Errorf("the error is %v, want %s…", err, want)
				}
				if err != nil && strings.Contains(err.Error(), canary) {
					t.Errorf("the error has a secret: %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			or := func(b []byte) string {
				if b == nil {
					return "-"
				}
				return string(b)
			}
			a := k.access
			if got := fmt.Sprint(k.namespace, " ", a.Token, " ", or(a.Roots), " ", or(a.Cert), " ", or(a.Key)); got != tc.want {
				t.Errorf("it says %q, want %q", got, tc.want)
			}
		})
	}
}

// TestKubeconfigIsUsed asks an API that only the file tells of, in the namespace
// of its context, and after the file has another token.
func TestKubeconfigIsUsed(t *testing.T) {
	api := kubetest.NewTLS(t)
	api.Require(canary + "-1")
	path := filepath.Join(t.TempDir(), "config")
	file := func(token string) string {
		return kubeconfigHead + "clusters:\n- {name: home, cluster: {server: '" + api.URL + "', certificate-authority-data: " +
			base64.StdEncoding.EncodeToString([]byte(certificate(api))) + "}}\nusers:\n- {name: wayhouse, user: {token: " + token + "}}\n"
	}
	writeFile(t, path, file(canary+"-1"))
	c, err := (&Access{Kubeconfig: path}).Connect()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	put(api, "a")
	f := c.Follow(Objects{Group: "example.com/v1", Resource: "things"})
	mustList(t, f, "a")
	api.Require(canary + "-2")
	writeFile(t, path, file(canary+"-2"))
	mustList(t, f, "a")

	other, err := (&Access{Kubeconfig: path, Context: "plain", Namespace: "games"}).Connect()
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	mustList(t, other.Follow(Objects{Group: "example.com/v1", Resource: "things"}), "a")
}

func TestCaddyfile(t *testing.T) {
	var a Access
	d := caddyfile.NewTestDispenser("x {\n namespace games\n api https://a\n token_file /t\n ca_file /c\n kubeconfig /k ctx\n}")
	d.Next()
	if err := caddyopt.Block(d, a.CaddyfileOptions()); err != nil {
		t.Fatal(err)
	}
	if want := (Access{Namespace: "games", API: "https://a", TokenFile: "/t", CAFile: "/c", Kubeconfig: "/k", Context: "ctx"}); a != want {
		t.Errorf("read %+v, want %+v", a, want)
	}
	d = caddyfile.NewTestDispenser("x {\n kubeconfig\n}")
	d.Next()
	if err := caddyopt.Block(d, a.CaddyfileOptions()); err == nil || !strings.Contains(err.Error(), "kubeconfig: the path is missing") {
		t.Errorf("without a path: %v", err)
	}
}

func FuzzParseKubeconfig(f *testing.F) {
	f.Add([]byte(kubeconfigHead + "clusters:\n- {name: home, cluster: {server: 'https://a'}}\nusers:\n- {name: wayhouse, user: {token: t}}\n"))
	f.Add([]byte("current-context: a\ncontexts: [{name: a, context: {cluster: b}}]\nclusters: [{name: b, cluster: {server: 'https://c', certificate-authority-data: '*'}}]\n"))
	f.Add([]byte("a: &a [*a]"))
	f.Fuzz(func(t *testing.T, b []byte) {
		k, err := parseKubeconfig(b, t.TempDir(), "")
		if err == nil && k.access.URL == nil {
			t.Error("there is no server, and no error")
		}
	})
}
