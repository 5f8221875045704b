package web

import (
	"bufio"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// Real clients: Chromium and curl, each in a network namespace of its own, fetch
// a site through port 443, which TLS that is passed through and a game on TCP and
// on UDP have as well.
//
//	browser 10.7.1.2 ── 10.7.1.1
//	shell   10.7.2.2 ── 10.7.2.1  town :443 (the namespace of the test)
//	edge    10.7.3.2 ── 10.7.3.1
//	shell   10.7.4.2 ── 10.7.4.1  edge :443, with PROXY headers to town
const (
	townToBrowser, browserAt = "10.7.1.1", "10.7.1.2"
	townToShell, shellAt     = "10.7.2.1", "10.7.2.2"
	townToEdge, edgeToTown   = "10.7.3.1", "10.7.3.2"
	edgeToShell, shellAtEdge = "10.7.4.1", "10.7.4.2"
)

// poll is a page that asks for the word of the day and tells what it got, or that
// it got none, by what it asks for next.
const poll = `<!doctype html><script>
(async () => {
	for (;;) {
		try {
			const r = await fetch("/word", {cache: "no-store"});
			await fetch("/saw/" + r.status + "/" + await r.text(), {cache: "no-store"});
		} catch (e) {
			await fetch("/lost/" + encodeURIComponent(e), {cache: "no-store"}).catch(() => {});
		}
		await new Promise(done => setTimeout(done, 200));
	}
})();
</script>`

// TestBrowserAndCurl has a Chromium for each version of HTTP ask all the time, and
// curl once between reloads, while the other users of the port go on.
func TestBrowserAndCurl(t *testing.T) {
	chromium, err := exec.LookPath("chromium")
	kit.Require(t, err, "Chromium (package chromium)")
	curl, err := curlWithHTTP3()
	kit.Require(t, err, "curl with HTTP/3 (test/realclients/curl3)")

	browser, shell, edge := kit.NewNetns(t), kit.NewNetns(t), kit.NewNetns(t)
	join(t, browser, townToBrowser, browserAt)
	join(t, shell, townToShell, shellAt)
	join(t, edge, townToEdge, edgeToTown)
	kit.Veth(t, shell, shellAtEdge+"/24", edge, edgeToShell+"/24")

	c := newTown(t)
	pass := newEcho(t, c)
	tcp := kit.NewTCPBackend(t, 2, "127.0.0.1:0")
	dir := t.TempDir()
	page, access := filepath.Join(dir, "index.html"), filepath.Join(dir, "access.log")
	if err := os.WriteFile(page, []byte(poll), 0o600); err != nil {
		t.Fatal(err)
	}
	config := func(word string) kit.M {
		return adapt(t, fmt.Sprintf(`{
	wayhouse {
		pool pass {
			to %s
			health none
		}
		pool tcp {
			to %s
			health none
		}
		pool udp {
			to %s
			health none
		}
		listener streams tcp/:443 {
			accept_proxy %[4]s
			@web sni %[5]s
			@pass sni %[6]s
			@game first_bytes ascii:WH
			route @web {
				http_front web
			}
			route @pass {
				pool pass
			}
			route @game {
				pool tcp
			}
		}
		listener datagrams udp/:443 {
			accept_proxy %[4]s
			@web sni %[5]s
			route @web {
				http_front web
			}
			route {
				pool udp
			}
		}
	}
}
%[5]s {
	bind wayhouse/web
	tls %[7]s %[8]s
	log {
		output file %[9]s
		format json
	}
	root %[10]s
	respond /word %[11]s
	file_server
}
`, pass.addr, tcp.Addr, c.game, edgeToTown, site, other, c.cert, c.key, access, dir, word))
	}
	p := kit.Start(t, config("one"), kit.Options{})
	kit.Start(t, adapt(t, fmt.Sprintf(`{
	wayhouse {
		pool tcp {
			to %s:443
			health none
			proxy_protocol v2
		}
		pool udp {
			to %[1]s:443
			health none
			proxy_protocol v2-udp
		}
		listener tcp tcp/:443 {
			route {
				pool tcp
			}
		}
		listener udp udp/:443 {
			route {
				pool udp
			}
		}
	}
}
`, townToEdge)), kit.Options{Netns: edge})

	load := kit.StartLoad(t, kit.LoadOptions{TCP: "127.0.0.1:443", Conns: 3, UDP: "127.0.0.1:443", Flows: 3, Rate: 100})
	load.Round(t)
	through := pass.dial(t, "127.0.0.1:443")
	pin := c.pin(t)
	for _, flags := range [][]string{
		{"--disable-http2", "--disable-quic"},
		{"--disable-quic"},
		{"--enable-quic", "--origin-to-force-quic-on=" + site + ":443"},
	} {
		startChromium(t, browser, chromium, append(flags, "--ignore-certificate-errors-spki-list="+pin)...)
	}

	type line struct{ from, proto, uri string }
	seen := func() map[line]int {
		return readAccess(t, access, func(from, proto, uri string) line { return line{from, proto, uri} })
	}
	for i, word := range []string{"one", "two", "three", "four"} {
		if i > 0 {
			if err := p.Load(config(word)); err != nil {
				t.Fatal(err)
			}
		}
		for _, proto := range versions {
			kit.Eventually(t, "Chromium gets "+word+" by "+proto, func() bool { return seen()[line{browserAt, proto, "/saw/200/" + word}] > 0 })
		}
		for version, flag := range map[string]string{"HTTP/1.1": "--http1.1", "HTTP/2.0": "--http2", "HTTP/3.0": "--http3-only"} {
			for at, from := range map[string]string{townToShell: shellAt, edgeToShell: shellAtEdge} {
				out, err := inside(shell, append(curl, "-sS", "--max-time", "30", flag, "--cacert", c.cert,
					"--resolve", site+":443:"+at, "https://"+site+"/word?by=curl")...).CombinedOutput()
				if string(out) != word {
					t.Errorf("curl %s to %s: %q, %v; want %q", flag, at, out, err, word)
				}
				kit.Eventually(t, "the log has curl by "+version+" from "+from, func() bool { return seen()[line{from, version, "/word?by=curl"}] == i+1 })
			}
		}
		through.says(t, word)
		load.Round(t)
	}
	for l := range seen() {
		if strings.HasPrefix(l.uri, "/lost/") || l.from != browserAt && l.from != shellAt && l.from != shellAtEdge {
			t.Errorf("the log has %v", l)
		}
	}
	if r := load.Stop(); !r.Perfect() {
		t.Errorf("the game: %v", &r)
	}
}

// join puts a veth between the namespace of the test and another.
func join(t *testing.T, ns *kit.Netns, here, there string) {
	t.Helper()
	dev := "wht" + strings.ReplaceAll(here[len("10."):], ".", "x")
	for _, args := range [][]string{
		{"link", "add", dev, "type", "veth", "peer", "name", dev + "p", "netns", ns.Name},
		{"addr", "add", here + "/24", "dev", dev},
		{"link", "set", dev, "up"},
		{"-n", ns.Name, "addr", "add", there + "/24", "dev", dev + "p"},
		{"-n", ns.Name, "link", "set", dev + "p", "up"},
	} {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	t.Cleanup(func() { exec.Command("ip", "link", "del", dev).Run() }) // gone with the other end
}

// inside is a command that runs in a namespace.
func inside(ns *kit.Netns, argv ...string) *exec.Cmd {
	return exec.Command("ip", append([]string{"netns", "exec", ns.Name}, argv...)...)
}

// curlWithHTTP3 is how to call a curl that speaks HTTP/3: the system's, or the one
// that test/realclients/curl3 has fetched.
func curlWithHTTP3() ([]string, error) {
	fetched, err := filepath.Abs("../../bin/curl3/curl")
	if err != nil {
		return nil, err
	}
	for _, c := range []string{"curl", fetched} {
		if out, err := exec.Command(c, "--version").Output(); err == nil && strings.Contains(string(out), "HTTP3") {
			return []string{c}, nil
		}
	}
	return nil, errors.New("none of curl and bin/curl3/curl has it")
}

// startChromium has a browser load the site until the test ends.
func startChromium(t *testing.T, ns *kit.Netns, chromium string, flags ...string) {
	t.Helper()
	dir := t.TempDir()
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	argv := append([]string{"unshare", "--pid", "--mount-proc", "--fork", "--kill-child", // all of it ends with its first process
		chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
		"--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-port=0", "--user-data-dir=" + filepath.Join(dir, "profile"),
		"--host-resolver-rules=MAP * " + townToBrowser}, flags...)
	cmd := inside(ns, append(argv, "https://"+site+"/")...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(os.Environ(), "HOME="+dir, "XDG_CONFIG_HOME="+dir, "XDG_CACHE_HOME="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill() // ip has become unshare
		cmd.Wait()
		if t.Failed() {
			b, _ := os.ReadFile(log.Name())
			t.Logf("Chromium with %v:\n%s", flags, b)
		}
	})
}

// pin is the hash of the public key by which Chromium knows the certificate.
func (c *town) pin(t *testing.T) string {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(c.cert, c.key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(pair.Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(leaf.RawSubjectPublicKeyInfo)
	return base64.StdEncoding.EncodeToString(sum[:])
}

// readAccess counts the lines of an access log.
func readAccess[K comparable](t *testing.T, file string, key func(from, proto, uri string) K) map[K]int {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	n := make(map[K]int)
	for s := bufio.NewScanner(f); s.Scan(); {
		var l struct {
			Request struct {
				RemoteIP string `json:"remote_ip"`
				Proto    string `json:"proto"`
				URI      string `json:"uri"`
			} `json:"request"`
		}
		if err := json.Unmarshal(s.Bytes(), &l); err != nil {
			continue // its end is still to come
		}
		n[key(l.Request.RemoteIP, l.Request.Proto, l.Request.URI)]++
	}
	return n
}

// echo is a TLS server that sends lines back.
type echo struct {
	addr string
	town *town
}

func newEcho(t *testing.T, c *town) *echo {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(c.cert, c.key)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{pair}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				io.Copy(conn, conn)
			}()
		}
	}()
	return &echo{ln.Addr().String(), c}
}

// line is a connection to an echo.
type line struct {
	*tls.Conn
	r *bufio.Reader
}

func (e *echo) dial(t *testing.T, at string) *line {
	t.Helper()
	conn, err := tls.DialWithDialer(&net.Dialer{Timeout: kit.Long}, "tcp", at, &tls.Config{RootCAs: e.town.roots, ServerName: other})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return &line{conn, bufio.NewReader(conn)}
}

func (l *line) says(t *testing.T, word string) {
	t.Helper()
	if _, err := io.WriteString(l, word+"\n"); err != nil {
		t.Errorf("what is passed through: %v", err)
		return
	}
	if got, err := l.r.ReadString('\n'); got != word+"\n" {
		t.Errorf("what is passed through answers %q, %v", got, err)
	}
}
