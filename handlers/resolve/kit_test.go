package resolve_test

import (
	"bytes"
	"crypto/tls"
	"io"
	"net"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
)

// value is what a series of ours is now.
func value(t *testing.T, name string, labels ...string) float64 {
	t.Helper()
	reg := prometheus.NewRegistry()
	if err := metrics.Register(reg); err != nil {
		t.Fatal(err)
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
	series:
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				ok := false
				for i := 0; i < len(labels); i += 2 {
					ok = ok || l.GetName() == labels[i] && l.GetValue() == labels[i+1]
				}
				if !ok {
					continue series
				}
			}
			return m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return 0
}

func noRoute(t *testing.T, listener string) float64 {
	return value(t, "wayhouse_datagrams_dropped_total", "listener", listener, "reason", "no_route")
}

// clientHello is what a TLS client sends first.
func clientHello(t *testing.T, name string) string {
	t.Helper()
	var sent bytes.Buffer
	c := tls.Client(recorder{&sent}, &tls.Config{ServerName: name})
	if err := c.Handshake(); err == nil {
		t.Fatal("a handshake with nobody")
	}
	return sent.String()
}

type recorder struct{ w io.Writer }

func (r recorder) Read([]byte) (int, error)         { return 0, io.EOF }
func (r recorder) Write(p []byte) (int, error)      { return r.w.Write(p) }
func (r recorder) Close() error                     { return nil }
func (r recorder) LocalAddr() net.Addr              { return nil }
func (r recorder) RemoteAddr() net.Addr             { return nil }
func (r recorder) SetDeadline(time.Time) error      { return nil }
func (r recorder) SetReadDeadline(time.Time) error  { return nil }
func (r recorder) SetWriteDeadline(time.Time) error { return nil }
