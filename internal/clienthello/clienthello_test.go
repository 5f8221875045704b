package clienthello

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/firstpackets"
	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// hello is what Go's client sends first.
func hello(t testing.TB, config *tls.Config) []byte {
	t.Helper()
	client := &recorder{}
	config.InsecureSkipVerify = true
	if err := tls.Client(client, config).HandshakeContext(t.Context()); !errors.Is(err, io.EOF) {
		t.Fatalf("handshaking with nobody: %v", err)
	}
	return client.Bytes()
}

// recorder is a connection to nobody.
type recorder struct {
	net.Conn
	bytes.Buffer
}

func (*recorder) Read([]byte) (int, error)         { return 0, io.EOF }
func (r *recorder) Write(b []byte) (int, error)    { return r.Buffer.Write(b) }
func (*recorder) Close() error                     { return nil }
func (*recorder) SetDeadline(time.Time) error      { return nil }
func (*recorder) SetWriteDeadline(time.Time) error { return nil }

var errSeen = errors.New("the hello has been seen")

// replay is a connection on which a client has sent some bytes.
type replay struct {
	recorder
	in *bytes.Reader
}

func (r *replay) Read(b []byte) (int, error) { return r.in.Read(b) }

// standard is what Go's server makes of a stream.
func standard(stream []byte) (name string, ok bool) {
	srv := tls.Server(&replay{in: bytes.NewReader(stream)}, &tls.Config{
		GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			name, ok = h.ServerName, true
			return nil, errSeen
		},
	})
	srv.HandshakeContext(context.Background())
	return name, ok
}

// records puts the message of a stream of one record into records of n bytes.
func records(stream []byte, n int) []byte {
	var out []byte
	for msg := stream[recordHeader:]; len(msg) > 0; {
		n := min(n, len(msg))
		out = append(out, typeHandshake, 3, 1, byte(n>>8), byte(n))
		out = append(out, msg[:n]...)
		msg = msg[n:]
	}
	return out
}

func TestRealHellos(t *testing.T) {
	for name, config := range map[string]*tls.Config{
		"post-quantum": {ServerName: "Game.Example.com"},
		"classical":    {ServerName: "game.example.com", CurvePreferences: []tls.CurveID{tls.X25519}},
		"TLS 1.2":      {ServerName: "game.example.com", MaxVersion: tls.VersionTLS12},
		"ALPN":         {ServerName: "game.example.com", NextProtos: []string{"h2", strings.Repeat("x", 250), strings.Repeat("y", 250)}},
	} {
		t.Run(name, func(t *testing.T) {
			whole := hello(t, config)
			for _, n := range []int{len(whole), 1000, 64, 3, 1} {
				stream := records(whole, n)
				for cut := range stream {
					if got, state := AppendName(nil, stream[:cut]); state != More || got != nil {
						t.Fatalf("records of %d, %d bytes of %d: %q, %v", n, cut, len(stream), got, state)
					}
				}
				if got, state := AppendName(nil, stream); state != Done || string(got) != "game.example.com" {
					t.Fatalf("records of %d: %q, %v", n, got, state)
				}
			}
		})
	}
	if got, state := AppendName(nil, hello(t, &tls.Config{ServerName: "192.0.2.1"})); state != Done || got != nil {
		t.Errorf("dialled by address: %q, %v", got, state)
	}
}

// joinedData is the stream of a case and where its segments end.
func joinedData(t testing.TB, c firstpackets.Case) (all []byte, cuts []int) {
	for _, b := range c.Data(t) {
		all = append(all, b...)
		cuts = append(cuts, len(all))
	}
	return all, cuts
}

func TestVectors(t *testing.T) {
	for _, v := range firstpackets.All(t, "tls") {
		t.Run(v.ID, func(t *testing.T) {
			stream, cuts := joinedData(t, v)
			name, state := AppendName(nil, stream)
			switch {
			case state == Done && !v.Expect.Recognised && v.Expect.Tolerance == "":
				t.Errorf("read as a hello of %q", name)
			case state != Done && v.Expect.Recognised && v.Expect.Tolerance == "":
				t.Errorf("%v", state)
			case state == Done && string(name) != v.Expect.Host && !v.Expect.HostOptional:
				t.Errorf("name %q, want %q", name, v.Expect.Host)
			case v.Expect.More && state != More:
				t.Errorf("%v, want more", state)
			}
			for i, want := range v.Expect.Steps {
				if _, got := AppendName(nil, stream[:cuts[i]]); (got == Done) != (want == "match") && v.Expect.Tolerance == "" {
					t.Errorf("%d bytes: %v, want %s", cuts[i], got, want)
				}
			}
			settled(t, stream)
		})
	}
}

// Of a name that vectors let a reader leave out, ours is this.
func TestTrailingDot(t *testing.T) {
	v := firstpackets.One(t, "tls-trailing-dot")
	stream, _ := joinedData(t, v)
	if name, _ := AppendName(nil, stream); string(name) != v.Expect.Host {
		t.Errorf("%q, want %q", name, v.Expect.Host)
	}
}

// settled checks that nothing but More changes its mind as a stream arrives.
func settled(t testing.TB, stream []byte) {
	t.Helper()
	last, before := More, ""
	for cut := range len(stream) + 1 {
		name, state := AppendName(nil, stream[:cut])
		if last != More && (state != last || string(name) != before) {
			t.Fatalf("%v %q of %d bytes is %v %q of %d", last, before, cut-1, state, name, cut)
		}
		if state != Done && name != nil {
			t.Fatalf("%v with the name %q", state, name)
		}
		last, before = state, string(name)
	}
}

// agrees compares a name with the one that Go's server sees. Ours is lower-case,
// has no trailing dot, which Go refuses, and is empty for what DNS cannot have.
func agrees(t testing.TB, stream []byte) {
	t.Helper()
	want, ok := standard(stream)
	name, state := AppendName(nil, stream)
	if !ok {
		return // Go has rules that are not about the name
	}
	switch want := strings.ToLower(want); {
	case state == Done && (string(name) == want || len(name) == 0 && !plain([]byte(want))):
	case state != Done && stricter(stream):
	default:
		t.Errorf("%q, %v; Go has %q of % x", name, state, want, stream)
	}
}

// stricter reports whether a hello that Go takes breaks a rule that Go leaves
// unchecked: the length of the session ID, the record version, the length of
// the cipher suites, or is too long.
func stricter(stream []byte) bool {
	var msg []byte
	for rest := stream; len(rest) > recordHeader; {
		n := min(int(rest[3])<<8|int(rest[4]), len(rest)-recordHeader)
		if rest[1] != 3 || rest[2] > 4 || n > maxRecord || n == 0 {
			return true
		}
		msg = append(msg, rest[recordHeader:recordHeader+n]...)
		rest = rest[recordHeader+n:]
	}
	const sid = messageHeader + randomAndMajor
	return len(msg) <= sid || msg[sid] > maxSessionID || msg[messageHeader] != 3 || msg[1] != 0 || int(msg[2])<<8|int(msg[3]) > MaxLen-messageHeader
}

func TestAgreesWithGo(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for _, v := range firstpackets.All(t, "tls") {
		stream, _ := joinedData(t, v)
		agrees(t, stream)
		for range 30 {
			if len(stream) == 0 {
				break
			}
			b := bytes.Clone(stream)
			b[rng.IntN(len(b))] = byte(rng.Uint32())
			agrees(t, b)
		}
	}
}

func FuzzAppendName(f *testing.F) {
	for _, v := range firstpackets.All(f, "tls") {
		stream, _ := joinedData(f, v)
		f.Add(stream, uint16(7), uint16(100))
	}
	f.Fuzz(func(t *testing.T, stream []byte, cut, record uint16) {
		agrees(t, stream)
		name, state := AppendName(nil, stream)
		if early, s := AppendName(nil, stream[:min(int(cut), len(stream))]); s != More && (s != state || !bytes.Equal(early, name)) {
			t.Errorf("%v %q becomes %v %q", s, early, state, name)
		}
		if state != Done || record == 0 {
			return
		}
		// The same hello in other records.
		total, _ := messageLen(stream[recordHeader:])
		if n := int(stream[3])<<8 | int(stream[4]); total != n {
			return
		}
		if again, s := AppendName(nil, records(stream[:recordHeader+total], int(record%maxRecord)+1)); s != Done || !bytes.Equal(again, name) {
			t.Errorf("%q, in other records %v %q", name, s, again)
		}
	})
}

func TestNoAllocations(t *testing.T) {
	stream := hello(t, &tls.Config{ServerName: "game.example.com"})
	split := records(stream, 700)
	dst := make([]byte, 0, MaxName)
	for name, b := range map[string][]byte{"one record": stream, "three records": split, "half": stream[:700], "split half": split[:900]} {
		if n := testing.AllocsPerRun(1000, func() { AppendName(dst, b) }); n > 0 && !testkit.Race {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

func BenchmarkAppendName(b *testing.B) {
	stream := hello(b, &tls.Config{ServerName: "game.example.com", NextProtos: []string{strings.Repeat("x", 250)}})
	dst := make([]byte, 0, MaxName)
	for name, in := range map[string][]byte{"one record": stream, "two records": records(stream, 1000)} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(in)))
			b.ReportAllocs()
			for b.Loop() {
				if _, state := AppendName(dst, in); state != Done {
					b.Fatal(state)
				}
			}
		})
	}
}
