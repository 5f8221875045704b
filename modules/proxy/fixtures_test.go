package proxy_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/maxmind/mmdbwriter"
	"github.com/maxmind/mmdbwriter/mmdbtype"
)

// fixture is a Caddyfile of testdata and what has to come of it.
type fixture struct {
	name, file, source, want string
}

// fixtures are all of testdata, those that want an error too.
func fixtures(t *testing.T) (list []*fixture) {
	t.Helper()
	dir, err := filepath.Abs("testdata/caddyfile")
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(dir + "/*.caddytest")
	if err != nil || len(files) == 0 {
		t.Fatalf("fixtures: %v, %v", files, err)
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		source, want, ok := strings.Cut(string(b), dashes)
		if !ok {
			t.Fatalf("%s has no line of ten dashes", file)
		}
		list = append(list, &fixture{strings.TrimSuffix(filepath.Base(file), ".caddytest"), file, source, want})
	}
	return list
}

// good reports whether the fixture wants JSON.
func (f *fixture) good() bool { return strings.HasPrefix(f.want, "{") }

// withFiles goes to a directory with the files that fixtures name, and sets the
// variables.
func withFiles(t *testing.T) {
	t.Helper()
	t.Setenv("WAYHOUSE_ADMIN_TOKEN", "fedcba98765432100123456789abcdef")
	certificate, key := selfSigned(t)
	dir := t.TempDir()
	for name, content := range map[string]string{
		"country.mmdb": geoDB(t, "GeoLite2-Country", mmdbtype.Map{"country": mmdbtype.Map{"iso_code": mmdbtype.String("DE")}}),
		"asn.mmdb":     geoDB(t, "GeoLite2-ASN", mmdbtype.Map{"autonomous_system_number": mmdbtype.Uint32(64500)}),
		"drop.txt":     "192.0.2.0/24\n",
		"partners.txt": "198.51.100.7\n",
		"ca.pem":       certificate,
		"cert.pem":     certificate,
		"key.pem":      key,
		"token":        "a-token\n",
		"kubeconfig": `{contexts: [{name: games, context: {cluster: b, user: c}}],
			clusters: [{name: b, cluster: {server: "https://192.0.2.1:6443"}}], users: [{name: c, user: {token: a-token}}]}`,
	} {
		if name == "kubeconfig" {
			content = strings.ReplaceAll(content, "\t", "")
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
}

// geoDB is a database with one record.
func geoDB(t *testing.T, kind string, record mmdbtype.Map) string {
	t.Helper()
	w, err := mmdbwriter.New(mmdbwriter.Options{DatabaseType: kind})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Insert(&net.IPNet{IP: net.IPv4(8, 8, 8, 0).To4(), Mask: net.CIDRMask(24, 32)}, record); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if _, err := w.WriteTo(&b); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// selfSigned are a certificate and its key in PEM.
func selfSigned(t *testing.T) (certificate, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})),
		string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}))
}
