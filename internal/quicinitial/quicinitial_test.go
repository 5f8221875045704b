package quicinitial

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"net"
	"slices"
	"testing"
	"time"

	stdhmac "crypto/hmac"

	"github.com/quic-go/quic-go"

	"github.com/wayhouse-proxy/wayhouse/internal/clienthello"
	"github.com/wayhouse-proxy/wayhouse/internal/firstpackets"
	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// The keys of RFC 9001, A.1, and RFC 9369, A.1.
func TestKeysOfTheRFCs(t *testing.T) {
	dcid := unhex(t, "8394c8f03e515708")
	for version, iv := range map[uint32]string{v1: "fa044b2f42a3fd3b46fb255c", v2: "91f73e2351d8fa91660e909f"} {
		var k keys
		if err := k.make(version, dcid); err != nil {
			t.Fatal(err)
		}
		if got := hex.EncodeToString(k.iv[:]); got != iv {
			t.Errorf("version %x: iv %s, want %s", version, got, iv)
		}
	}
	// From draft 33 on the salt is that of version 1.
	for version, same := range map[uint32]bool{draft29: false, draft33 - 1: false, draft33: true, draft34: true} {
		var k keys
		if err := k.make(version, dcid); err != nil {
			t.Fatal(err)
		}
		if got := hex.EncodeToString(k.iv[:]) == "fa044b2f42a3fd3b46fb255c"; got != same {
			t.Errorf("version %x has the keys of version 1: %v", version, got)
		}
	}
	for n := range 60 {
		key, msg := bytes.Repeat([]byte{1}, n%33), bytes.Repeat([]byte{2}, n)
		std := stdhmac.New(sha256.New, key)
		std.Write(msg)
		h, m := newHasher(), new(mac)
		h.setKey(m, []byte("a key before"))
		h.setKey(m, key)
		h.sum(m, []byte("a message before"))
		if got := h.sum(m, msg); !bytes.Equal(got, std.Sum(nil)) {
			t.Fatalf("hmac of %d bytes: %x", n, got)
		}
	}
}

func unhex(t testing.TB, s string) []byte {
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestVectors(t *testing.T) {
	for _, v := range firstpackets.All(t, "quic") {
		t.Run(v.ID, func(t *testing.T) {
			datagrams := v.Data(t)
			name, state := AppendName(nil, datagrams)
			switch recognised := state != NotQUIC; {
			case recognised != v.Expect.Recognised && v.Expect.Tolerance != "either":
				t.Errorf("%v", state)
			case recognised && string(name) != v.Expect.Host:
				t.Errorf("name %q, want %q (%v)", name, v.Expect.Host, state)
			}
			for i, want := range v.Expect.Steps {
				name, state := AppendName(nil, datagrams[:i+1])
				if want == "partial" && state != Partial && v.Expect.Tolerance == "" || want == "match" && state != Done {
					t.Errorf("datagram %d: %v, want %s", i, state, want)
				}
				if state == Partial && name != nil {
					t.Errorf("datagram %d: %v with the name %q", i, state, name)
				}
			}
			twice := slices.Concat(datagrams, datagrams)
			if again, s := AppendName(nil, twice); s != state || !bytes.Equal(again, name) {
				t.Errorf("sent twice: %v %q, once %v %q", s, again, state, name)
			}
		})
	}
}

// seal makes an Initial of version 1 as a client does, from frames.
func seal(t testing.TB, version uint32, dcid []byte, pn byte, frames []byte) []byte {
	t.Helper()
	var k keys
	if err := k.make(version, dcid); err != nil {
		t.Fatal(err)
	}
	first := byte(0xc0)
	if version == v2 {
		first = 0xd0
	}
	frames = append(slices.Clone(frames), make([]byte, max(0, 4-len(frames)))...)
	n := 1 + len(frames) + tagLen
	head := append([]byte{first, byte(version >> 24), byte(version >> 16), byte(version >> 8), byte(version), byte(len(dcid))}, dcid...)
	head = append(head, 0, 0, 0x80|byte(n>>24), byte(n>>16), byte(n>>8), byte(n))
	pnAt := len(head)
	head = append(head, pn)
	nonce := k.iv
	nonce[ivLen-1] ^= pn
	whole := k.aead.Seal(head, nonce[:], frames, head)
	var mask [16]byte
	k.header.Encrypt(mask[:], whole[pnAt+4:][:16])
	whole[0] ^= mask[0] & 0x0f
	whole[pnAt] ^= mask[1]
	return whole
}

func crypto(offset int, b []byte) []byte {
	return append([]byte{frameCrypto, 0x80, byte(offset >> 16), byte(offset >> 8), byte(offset), 0x80, byte(len(b) >> 16), byte(len(b) >> 8), byte(len(b))}, b...)
}

// message is a handshake message with a name.
func message(t testing.TB) []byte {
	t.Helper()
	for _, v := range firstpackets.All(t, "tls") {
		if v.ID == "tls-pq-go" {
			return v.Data(t)[0][5:]
		}
	}
	t.Fatal("no hello")
	return nil
}

// Whatever pieces a hello comes in, in whatever order, over any packets and
// datagrams, it has its name when all has come and none before.
func TestPieces(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	msg := message(t)
	versions := []uint32{v1, v2, draft29, draft29 + 3, draft33, draft34}
	for round := range 300 {
		version, dcid := versions[round%len(versions)], make([]byte, 8+rng.IntN(13))
		for i := range dcid {
			dcid[i] = byte(rng.Uint32())
		}
		var frames [][]byte
		for at := 0; at < len(msg); {
			n := min(60+rng.IntN(400), len(msg)-at)     // more than an overlap, so that each is needed
			from := max(0, at-rng.IntN(2)*rng.IntN(50)) // overlapping the one before
			frames = append(frames, crypto(from, msg[from:at+n]))
			at += n
		}
		rng.Shuffle(len(frames), func(i, j int) { frames[i], frames[j] = frames[j], frames[i] })
		var datagrams [][]byte
		for pn := byte(0); len(frames) > 0; pn++ {
			n := max(1+rng.IntN(6), len(frames)/3)
			n = min(n, len(frames))
			payload := append([]byte{framePing, 0, 0, frameACK, 5, 0, 1, 0, 1, 1}, bytes.Join(frames[:n], []byte{0})...)
			p := seal(t, version, dcid, pn, payload)
			if len(datagrams) > 0 && rng.IntN(2) == 0 {
				last := len(datagrams) - 1
				datagrams[last] = append(datagrams[last], p...)
			} else {
				datagrams = append(datagrams, p)
			}
			frames = frames[n:]
		}
		for i := 1; i < len(datagrams); i++ {
			if name, state := AppendName(nil, datagrams[:i]); state != Partial || name != nil {
				t.Fatalf("round %d: %q, %v after %d of %d datagrams", round, name, state, i, len(datagrams))
			}
		}
		if name, state := AppendName(nil, datagrams); state != Done || string(name) != "pq.example.com" {
			t.Fatalf("round %d: %q, %v", round, name, state)
		}
	}
}

// What cannot be read at the end of a client's words is Partial: never a
// name, and never certain not to have one.
func TestDoubtful(t *testing.T) {
	msg, dcid := message(t), []byte("12345678")
	wrong := bytes.Clone(msg[:700])
	wrong[650] ^= 1
	for name, frames := range map[string][]byte{
		"a gap":           append(crypto(0, msg[:100]), crypto(101, msg[101:])...),
		"frames disagree": append(crypto(0, wrong), crypto(600, msg[600:])...),
		"beyond 16 KiB":   append(crypto(16<<10, msg), crypto(0, msg[:100])...),
		"an ACK too long": append([]byte{frameACK, 1, 1, 0xbf, 0xff, 0xff, 0xff}, crypto(0, msg)...),
		"nothing":         {framePing},
		"closed":          append([]byte{0x1c}, crypto(0, msg)...),
	} {
		if got, state := AppendName(nil, [][]byte{seal(t, v1, dcid, 0, frames)}); state != Partial || got != nil {
			t.Errorf("%s: %q, %v", name, got, state)
		}
	}
	forged := seal(t, v1, dcid, 0, crypto(0, msg))
	forged[len(forged)-1] ^= 1
	if got, state := AppendName(nil, [][]byte{forged, seal(t, v1, dcid, 0, crypto(0, msg))}); state != NotQUIC || got != nil {
		t.Errorf("forged: %q, %v", got, state)
	}
	half := seal(t, v1, dcid, 0, crypto(0, msg[:500]))
	for name, second := range map[string][]byte{
		"of another connection": seal(t, v1, []byte("87654321"), 1, crypto(500, msg[500:])),
		"of another version":    seal(t, v2, dcid, 1, crypto(500, msg[500:])),
		"damaged":               append(seal(t, v1, dcid, 1, crypto(500, msg[500:]))[:900], make([]byte, 900)...),
		"of no protocol":        []byte("hello"),
		"empty":                 {},
	} {
		if got, state := AppendName(nil, [][]byte{half, second}); state != Partial || got != nil {
			t.Errorf("a second datagram %s: %q, %v", name, got, state)
		}
	}
}

// silent is a socket on which nobody answers.
type silent struct {
	net.PacketConn
	sent chan []byte
}

func (s *silent) WriteTo(b []byte, _ net.Addr) (int, error) {
	select {
	case s.sent <- bytes.Clone(b):
	default:
	}
	return len(b), nil
}

// A client of another implementation, with a post-quantum hello in two
// datagrams.
func TestRealClient(t *testing.T) {
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer pc.Close()
	s := &silent{pc, make(chan []byte, 8)}
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Long)
	done := make(chan error, 1)
	tr := &quic.Transport{Conn: s}
	go func() {
		_, err := tr.Dial(ctx, pc.LocalAddr(), &tls.Config{ServerName: "Game.Example.com", NextProtos: []string{"h3"}}, &quic.Config{HandshakeIdleTimeout: time.Minute})
		done <- err
	}()
	var datagrams [][]byte
	for len(datagrams) < 2 {
		select {
		case d := <-s.sent:
			datagrams = append(datagrams, d)
		case <-ctx.Done():
			t.Fatal("the client has sent too little")
		}
	}
	name, state := AppendName(nil, datagrams)
	if state != Done || string(name) != "game.example.com" {
		t.Errorf("%q, %v", name, state)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	tr.Close()
}

func FuzzAppendName(f *testing.F) {
	for _, v := range firstpackets.All(f, "quic") {
		ds := append(v.Data(f), nil)
		f.Add(ds[0], ds[1])
	}
	f.Fuzz(func(t *testing.T, a, b []byte) {
		before := slices.Concat(a, b)
		one, first := AppendName(nil, [][]byte{a})
		two, state := AppendName(nil, [][]byte{a, b})
		if first != Partial && (state != first || !bytes.Equal(one, two)) {
			t.Errorf("%v %q becomes %v %q", first, one, state, two)
		}
		if first == Partial && state == NotQUIC {
			t.Error("partial becomes not QUIC")
		}
		if !bytes.Equal(before, slices.Concat(a, b)) {
			t.Error("the input was changed")
		}
	})
}

// The keys of a connection are what is allocated, two ciphers and the mode of
// one of them, and only when it is not the connection looked at last.
func TestAllocations(t *testing.T) {
	for _, v := range firstpackets.All(t, "quic") {
		datagrams, dst := v.Data(t), make([]byte, 0, 253)
		if n := testing.AllocsPerRun(100, func() { AppendName(dst, datagrams) }); n > 0 && !testkit.Race {
			t.Errorf("%s, again and again: %v allocations", v.ID, n)
		}
	}
	clients, i, dst := manyClients(t), 0, make([]byte, 0, 253)
	if n := testing.AllocsPerRun(100, func() {
		AppendName(dst, clients[i%len(clients)])
		i++
	}); n > 3 && !testkit.Race {
		t.Errorf("a new client: %v allocations", n)
	}
}

// manyClients are the hellos of clients that have a connection ID each.
func manyClients(t testing.TB) (clients [][][]byte) {
	hello := append(crypto(0, message(t)[:1000]), 0, 0)
	rest := crypto(1000, message(t)[1000:])
	for i := range 64 {
		dcid := []byte{byte(i), 2, 3, 4, 5, 6, 7, 8}
		clients = append(clients, [][]byte{seal(t, v1, dcid, 0, hello), seal(t, v1, dcid, 1, rest)})
	}
	return clients
}

// The keys last used are those of one version and one connection ID: of any
// two clients one after the other, each has what it has alone.
func TestKeysOfAnother(t *testing.T) {
	var clients [][]byte
	for _, version := range []uint32{v1, v2, draft29, draft34} {
		for _, dcid := range []string{"12345678", "123456789", "12345679", "12345678901234567890"} {
			clients = append(clients, seal(t, version, []byte(dcid), 0, crypto(0, message(t))))
		}
	}
	for _, before := range clients {
		for _, client := range clients {
			AppendName(nil, [][]byte{before})
			if name, state := AppendName(nil, [][]byte{client}); state != Done || string(name) != "pq.example.com" {
				t.Fatalf("% x behind % x: %q, %v", client[:26], before[:26], name, state)
			}
		}
	}
}

// FuzzFrames reads frames that a client has sealed correctly.
func FuzzFrames(f *testing.F) {
	msg := message(f)
	f.Add(crypto(0, msg), crypto(0, nil))
	f.Add(crypto(0, msg[:100]), crypto(100, msg[100:]))
	f.Add([]byte{frameACKECN, 1, 1, 1, 1, 1, 1, 1, 1, 1}, crypto(50, msg[50:100]))
	f.Fuzz(func(t *testing.T, a, b []byte) {
		as := new(assembly)
		as.frames(a)
		as.frames(b)
		if n := len(as.Bytes()); n > clienthello.MaxLen {
			t.Fatalf("%d bytes", n)
		}
	})
}

func BenchmarkAppendName(b *testing.B) {
	dst := make([]byte, 0, 253)
	look := func(b *testing.B, datagrams [][]byte, want State) {
		if _, state := AppendName(dst, datagrams); state != want {
			b.Fatal(state)
		}
	}
	clients := manyClients(b)
	b.Run("a new client", func(b *testing.B) {
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			look(b, clients[i%len(clients)][:1], Partial)
		}
	})
	b.Run("its second datagram", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			look(b, clients[0], Done)
		}
	})
	for _, v := range firstpackets.All(b, "quic") {
		if v.ID != "quic-rfc9001-a2" && v.ID != "quic-neg-0rtt" && v.ID != "quic-neg-vn-client" {
			continue
		}
		want := NotQUIC
		if v.Expect.Recognised {
			want = Done
		}
		datagrams := v.Data(b)
		b.Run(v.ID, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				look(b, datagrams, want)
			}
		})
	}
}
