package adminsite

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// writePair writes a new self-signed pair with a serial number.
func writePair(t *testing.T, dir string, serial int64) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: "admin"}, DNSNames: []string{"localhost"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	cert, err := x509.CreateCertificate(rand.Reader, c, c, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string]*pem.Block{"cert": {Type: "CERTIFICATE", Bytes: cert}, "key": {Type: "PRIVATE KEY", Bytes: der}} {
		if err := os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(b), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// moved reports whether a connection was lost because Caddy closes a socket that
// it has taken the place of, with those that wait in it: a client tries again.
func moved(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.Is(err, io.EOF)
}

// again shakes hands, and again when the socket has moved meanwhile.
func again(shake func() (int64, error)) (serial int64, err error) {
	for range 10 {
		if serial, err = shake(); err == nil || !moved(err) {
			break
		}
	}
	return serial, err
}

// TestCertificatesChange replaces the pair of the site by reloads while clients
// shake hands: TLS fails for none of them, and the new pair is there when the
// answer comes. A half-written pair is refused and the one before is served on.
func TestCertificatesChange(t *testing.T) {
	dir := t.TempDir()
	writePair(t, dir, 1)
	config, addr := both(t, matrixConfig(t), handler())
	apps := config["apps"].(kit.M)
	apps["http"].(kit.M)["servers"].(kit.M)["site"].(kit.M)["tls_connection_policies"] = kit.A{kit.M{}}
	apps["tls"] = kit.M{"certificates": kit.M{"load_files": kit.A{kit.M{"certificate": filepath.Join(dir, "cert"), "key": filepath.Join(dir, "key")}}}}
	p := kit.Start(t, config, kit.Options{})
	shake := func() (int64, error) {
		c, err := tls.DialWithDialer(&net.Dialer{Timeout: kit.Long}, "tcp", addr, &tls.Config{ServerName: "localhost", InsecureSkipVerify: true})
		if err != nil {
			return 0, err
		}
		defer c.Close()
		return c.ConnectionState().PeerCertificates[0].SerialNumber.Int64(), nil
	}
	var wg sync.WaitGroup
	var done atomic.Bool
	var shaken atomic.Int64
	for range 4 {
		wg.Go(func() {
			for !done.Load() {
				switch _, err := shake(); {
				case err == nil:
					shaken.Add(1)
				case !moved(err):
					t.Errorf("a handshake failed: %v", err)
					return
				}
			}
		})
	}
	local := newClient(t, "unix", socket(p))
	reload := func() int { return local.do("POST", "/admin/reload").status }
	for serial := int64(2); serial <= 21; serial++ {
		writePair(t, dir, serial)
		if status := reload(); status != 204 {
			t.Errorf("reload %d: %d", serial, status)
		}
		if got, err := again(shake); err != nil || got != serial {
			t.Errorf("after reload %d the certificate is %d, %v", serial, got, err)
		}
	}
	if err := os.Truncate(filepath.Join(dir, "cert"), 100); err != nil {
		t.Fatal(err)
	}
	if status := reload(); status != 422 {
		t.Errorf("a reload with half a certificate: %d, want 422", status)
	}
	if got, err := again(shake); err != nil || got != 21 {
		t.Errorf("after it the certificate is %d, %v", got, err)
	}
	done.Store(true)
	wg.Wait()
	if shaken.Load() == 0 {
		t.Error("nobody shook hands meanwhile")
	}
}
