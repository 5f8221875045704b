package web

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// Automatic HTTPS with a CA of another process in another namespace, which asks
// the site's name on ports 80 and 443 as those of the internet do.
const (
	townToCA, caAt = "10.7.5.1", "10.7.5.2"
	caSocket       = caAt + ":14000"
)

// startCA runs a CA that knows one kind of challenge, and returns a file with its
// root.
func startCA(t *testing.T, ns *kit.Netns, challenge string) string {
	t.Helper()
	dir := t.TempDir()
	hosts := filepath.Join(dir, "hosts")
	if err := os.WriteFile(hosts, []byte(townToCA+" "+site+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	kit.Start(t, adapt(t, fmt.Sprintf(`{
	skip_install_trust
	auto_https disable_redirects
	storage file_system %s
	wayhouse {
		pool nobody {
			to 127.0.0.1:9
			health none
		}
	}
}
https://%s {
	tls internal
	acme_server {
		challenges %s
	}
}
`, dir, caSocket, challenge)), kit.Options{Netns: ns, Wrap: []string{"sh", "-c", `mount --bind "$0" /etc/hosts && exec "$@"`, hosts}})
	root := filepath.Join(dir, "pki", "authorities", "local", "root.crt")
	kit.Eventually(t, "the CA has a root", func() bool { _, err := os.Stat(root); return err == nil })
	return root
}

// certificate is what the site presents.
func certificate(at string, roots *x509.CertPool) (*x509.Certificate, error) {
	c, err := tls.DialWithDialer(&net.Dialer{Timeout: 5 * time.Second}, "tcp", at, &tls.Config{ServerName: site, RootCAs: roots})
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return c.ConnectionState().PeerCertificates[0], nil
}

// TestAutomaticHTTPS has a site get its certificate by each challenge alone and
// renew it, by the ports that are everybody's and by others that a NAT in front
// forwards those to.
func TestAutomaticHTTPS(t *testing.T) {
	for name, tc := range map[string]struct {
		challenge, disable string
		plain, secure      int
		global             string
	}{
		"http-01":              {"http-01", "disable_tlsalpn_challenge", 80, 443, ""},
		"tls-alpn-01":          {"tls-alpn-01", "disable_http_challenge", 80, 443, ""},
		"http-01 by a NAT":     {"http-01", "disable_tlsalpn_challenge", 8080, 8443, "http_port 8080\n\thttps_port 8443"},
		"tls-alpn-01 by a NAT": {"tls-alpn-01", "disable_http_challenge", 8080, 8443, "http_port 8080\n\thttps_port 8443"},
	} {
		t.Run(name, func(t *testing.T) {
			ns := kit.NewNetns(t)
			join(t, ns, townToCA, caAt)
			if tc.secure != 443 {
				forward(t, map[int]int{80: tc.plain, 443: tc.secure})
			}
			root := startCA(t, ns, tc.challenge)
			pem, err := os.ReadFile(root)
			if err != nil {
				t.Fatal(err)
			}
			roots := x509.NewCertPool()
			roots.AppendCertsFromPEM(pem)

			kit.Start(t, adapt(t, fmt.Sprintf(`{
	%s
	renew_interval 1s
	wayhouse {
		pool game {
			to 127.0.0.1:9
			health none
		}
		listener plain tcp/:%d {
			route {
				http_front web
			}
		}
		listener tls tcp/:%d {
			@web sni %s
			route @web {
				http_front web
			}
			route {
				pool game
			}
		}
	}
}
%[4]s {
	bind wayhouse/web
	tls {
		renewal_window_ratio 0.9999
		issuer acme {
			dir https://%s/acme/local/directory
			trusted_roots %s
			%s
		}
	}
	respond hello
}
`, tc.global, tc.plain, tc.secure, site, caSocket, root, tc.disable)), kit.Options{})
			secure := fmt.Sprintf("127.0.0.1:%d", tc.secure)
			var first *x509.Certificate
			kit.Eventually(t, "the site has a certificate", func() bool {
				first, err = certificate(secure, roots)
				return err == nil
			})
			kit.Eventually(t, "it is renewed", func() bool {
				c, err := certificate(secure, roots)
				return err == nil && c.SerialNumber.Cmp(first.SerialNumber) != 0
			})
			h := &http.Client{Timeout: kit.Long, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }, Transport: &http.Transport{DisableKeepAlives: true}}
			req, err := http.NewRequest(http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d/there", tc.plain), nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Host = site
			r, err := h.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			r.Body.Close()
			if to := r.Header.Get("Location"); to != "https://"+site+"/there" {
				t.Errorf("plain HTTP is sent to %q", to)
			}
		})
	}
}

// forward has the namespace of the test forward ports to others of its own.
func forward(t *testing.T, ports map[int]int) {
	t.Helper()
	rules := "table ip web { chain in { type nat hook prerouting priority dstnat\n"
	for from, to := range ports {
		rules += fmt.Sprintf("tcp dport %d redirect to :%d\n", from, to)
	}
	if out, err := exec.Command("nft", rules+"}\n}").CombinedOutput(); err != nil {
		kit.Require(t, fmt.Errorf("%w: %s", err, out), "nftables with NAT")
	}
	t.Cleanup(func() {
		if out, err := exec.Command("nft", "delete table ip web").CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
}
