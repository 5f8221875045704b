// Command http3 is an HTTP/3 server that says its name, and a client that asks
// for one:
//
//	http3 serve ADDRESS NAME
//	http3 get ADDRESS HOST
package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"os"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
)

func main() {
	err := fmt.Errorf("usage: %s serve|get ADDRESS NAME", os.Args[0])
	if len(os.Args) == 4 {
		switch os.Args[1] {
		case "serve":
			err = serve(os.Args[2], os.Args[3])
		case "get":
			err = get(os.Args[2], os.Args[3])
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// serve answers every request with name, by a certificate of its own making.
func serve(addr, name string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{name}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		return err
	}
	s := http3.Server{
		Addr:      addr,
		TLSConfig: http3.ConfigureTLSConfig(&tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}),
		Handler:   http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, name) }),
	}
	return s.ListenAndServe()
}

// get prints what the server of host says, which is reached at addr.
func get(addr, host string) error {
	t := &http3.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // whose it is, is told by what it says
		Dial: func(ctx context.Context, _ string, tc *tls.Config, qc *quic.Config) (*quic.Conn, error) {
			return quic.DialAddr(ctx, addr, tc, qc)
		},
	}
	defer t.Close()
	res, err := (&http.Client{Transport: t, Timeout: 20 * time.Second}).Get("https://" + host + "/")
	if err != nil {
		return err
	}
	defer res.Body.Close()
	_, err = io.Copy(os.Stdout, res.Body)
	return err
}
