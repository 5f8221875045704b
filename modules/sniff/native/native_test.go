package native

import (
	"bytes"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/internal/firstpackets"
	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// kinds are the sniffers that the first packets are for, by protocol.
var kinds = map[string]sniff.Sniffer{
	"a2s": new(A2S), "quake3": new(Quake3), "raknet": new(RakNet), "wireguard": new(WireGuard), "openvpn": new(OpenVPN),
	"teamspeak3": new(TeamSpeak3), "enet": new(ENet), "stun": new(STUN), "dtls": new(DTLS), "quic": new(QUIC), "minecraft": new(Minecraft),
}

// input is the first n segments of a case.
func input(t testing.TB, c firstpackets.Case, n int, final bool) *sniff.Input {
	data := c.Data(t)[:n]
	if c.UDP() {
		return udp(data, final)
	}
	return &sniff.Input{Bytes: bytes.Join(data, nil), Final: final}
}

func udp(datagrams [][]byte, final bool) *sniff.Input {
	return &sniff.Input{Bytes: datagrams[0], Datagrams: datagrams, Final: final}
}

func ask(s sniff.Sniffer, in *sniff.Input) (sniff.Verdict, *sniff.Hint) {
	h := new(sniff.Hint)
	return s.Sniff(in, h), h
}

func TestVectors(t *testing.T) {
	for protocol, s := range kinds {
		for _, c := range firstpackets.All(t, protocol) {
			t.Run(c.ID, func(t *testing.T) {
				n := len(c.Segments)
				v, h := ask(s, input(t, c, n, false))
				switch recognised := v == sniff.Recognised || v == sniff.Partial; {
				case recognised != c.Expect.Recognised && c.Expect.Tolerance != "either":
					t.Errorf("%v, want recognised %v", v, c.Expect.Recognised)
				case recognised && string(h.Key) != protocol:
					t.Errorf("key %q", h.Key)
				case recognised && !c.Expect.HostOptional && (string(h.Host) != c.Expect.Host || h.HasHost != (c.Expect.Host != "")):
					t.Errorf("host %q (%v), want %q", h.Host, h.HasHost, c.Expect.Host)
				case c.Expect.More && v != sniff.Undecided, !c.Expect.More && v == sniff.Undecided && c.Expect.Tolerance != "either":
					t.Errorf("%v, more %v", v, c.Expect.More)
				}
				for i, want := range c.Expect.Steps {
					got, _ := ask(s, input(t, c, i+1, false))
					early := c.Expect.Tolerance == "early-match" && got == sniff.Recognised
					if now := map[string]sniff.Verdict{"more": sniff.Undecided, "partial": sniff.Partial, "match": sniff.Recognised}[want]; got != now && !early {
						t.Errorf("after segment %d: %v, want %v", i, got, now)
					}
				}
			})
		}
	}
}

// A stream that is recognised is undecided at every cut, and every other
// stream changes its verdict from undecided alone. Recognised stays, for the
// listener's flow keeps it.
func TestEveryCut(t *testing.T) {
	for protocol, s := range kinds {
		for _, c := range firstpackets.All(t) {
			if c.UDP() {
				continue
			}
			stream := bytes.Join(c.Data(t), nil)
			whole, _ := ask(s, &sniff.Input{Bytes: stream})
			last := sniff.Undecided
			for cut := range len(stream) + 1 {
				v, _ := ask(s, &sniff.Input{Bytes: stream[:cut]})
				if last != sniff.Undecided && v != last && last != sniff.Recognised {
					t.Fatalf("%s, %s: %v of %d bytes is %v of %d", protocol, c.ID, last, cut-1, v, cut)
				}
				if last = v; v == sniff.Recognised {
					break
				}
			}
			if protocol == c.Protocol && whole == sniff.Recognised && last != sniff.Recognised {
				t.Errorf("%s, %s: never recognised on the way", protocol, c.ID)
			}
		}
	}
}

// What one sniffer is for the others are not, but for the pairs that the first
// packets name: openvpn is weak, quake3 shares words with source-connect, and
// a header may have the payload of another protocol behind it.
func TestOthers(t *testing.T) {
	for protocol, s := range kinds {
		for _, c := range firstpackets.All(t) {
			if c.Protocol == protocol || !c.Expect.Recognised || protocol == "openvpn" && c.Protocol != "wireguard" ||
				protocol == "quake3" && c.Protocol == "source-connect" {
				continue
			}
			v, h := ask(s, input(t, c, len(c.Segments), true))
			if v == sniff.Recognised || v == sniff.Partial {
				t.Errorf("%s takes %s: host %q", protocol, c.ID, h.Host)
			}
		}
	}
}

// No prefix and no changed byte of a first packet makes any sniffer panic,
// change what it looks at, or say what a hint cannot be.
func TestAnyBytes(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	all := slices.Collect(func(yield func(sniff.Sniffer) bool) {
		for _, s := range kinds {
			if !yield(s) {
				return
			}
		}
	})
	for _, c := range firstpackets.All(t) {
		data := c.Data(t)
		first := data[0]
		step := max(1, len(first)/testkit.Scaled(100, len(first)+1)) // in a soak every byte
		for at := rng.IntN(step); at < len(first); at += step {
			changed := bytes.Clone(first)
			changed[at] ^= byte(1 + rng.IntN(255))
			for _, s := range all {
				look(t, s, first[:at], nil)
				look(t, s, changed, data[1:])
			}
		}
	}
}

// look asks a sniffer about bytes in every way and checks the answer.
func look(t testing.TB, s sniff.Sniffer, b []byte, rest [][]byte) {
	before := bytes.Clone(b)
	for _, in := range []*sniff.Input{{Bytes: b}, {Bytes: b, Final: true}, udp(append([][]byte{b}, rest...), false)} {
		v, h := ask(s, in)
		if !bytes.Equal(before, b) {
			t.Fatalf("%T has changed its input % x", s, before)
		}
		if v != sniff.Recognised {
			continue
		}
		if h.HasHost == (len(h.Host) == 0) || !h.HasKey || h.Reject || bytes.ContainsAny(h.Host, "\x00 ") || len(h.Host) > maxHost ||
			bytes.ContainsFunc(h.Host, func(r rune) bool { return 'A' <= r && r <= 'Z' }) {
			t.Fatalf("%T: %+v of % x", s, h, b)
		}
	}
}

func TestRegisteredNames(t *testing.T) {
	for protocol, s := range kinds {
		info, err := caddy.GetModule("wayhouse.sniffers." + protocol)
		if err != nil {
			t.Error(err)
			continue
		}
		if got := s.(caddy.Module).CaddyModule().ID; got != info.ID {
			t.Errorf("%s is %s", protocol, got)
		}
	}
}

func TestMinecraftParts(t *testing.T) {
	for id, want := range map[string]string{
		"mc-1.8-login": "state=login protocol=47", "mc-1.21.5-transfer": "state=transfer protocol=770",
		"mc-status-ver-minus1": "state=status protocol=-1", "mc-legacy-1.6": "state=status protocol=78",
	} {
		for _, c := range firstpackets.All(t, "minecraft") {
			if c.ID != id {
				continue
			}
			_, h := ask(new(Minecraft), input(t, c, 1, false))
			var got []byte
			for i, p := range h.Parts() {
				if i > 0 {
					got = append(got, ' ')
				}
				got = append(append(append(got, p.Name...), '='), p.Value...)
			}
			if string(got) != want {
				t.Errorf("%s: %s, want %s", id, got, want)
			}
		}
	}
	for _, bare := range []string{"\xfe", "\xfe\x01"} {
		if v, _ := ask(new(Minecraft), &sniff.Input{Bytes: []byte(bare)}); v != sniff.Undecided {
			t.Errorf("% x: %v while more may come", bare, v)
		}
		if v, h := ask(new(Minecraft), &sniff.Input{Bytes: []byte(bare), Final: true}); v != sniff.Recognised || h.HasHost {
			t.Errorf("% x: %v, host %q", bare, v, h.Host)
		}
	}
}

func TestMinecraftLength(t *testing.T) {
	ok := "\x10\x00\xff\x05\x09localhost\x63\xdd\x02"
	for in, want := range map[string]sniff.Verdict{
		ok: sniff.Recognised, ok + "more": sniff.Recognised, "\x11" + ok[1:] + "\x00": sniff.Unrecognised, "\x0f" + ok[1:]: sniff.Unrecognised,
		"\x11" + ok[1:]: sniff.Unrecognised,
	} {
		if v, _ := ask(new(Minecraft), &sniff.Input{Bytes: []byte(in)}); v != want {
			t.Errorf("%q: %v, want %v", in, v, want)
		}
	}
}

// A fragment of another message is none of the first one's.
func TestDTLSFragments(t *testing.T) {
	for _, c := range firstpackets.All(t, "dtls") {
		if c.ID != "dtls-frag-2" {
			continue
		}
		data := c.Data(t)
		for at, what := range map[int]string{16: "length", 18: "sequence", 2: "version", 4: "epoch", 13: "type"} {
			second := bytes.Clone(data[1])
			second[at]++
			if v, h := ask(new(DTLS), udp([][]byte{data[0], second}, false)); v != sniff.Partial || h.HasHost {
				t.Errorf("with another %s: %v, host %q", what, v, h.Host)
			}
		}
	}
}

func TestSTUNClasses(t *testing.T) {
	for kind, want := range map[string]sniff.Verdict{
		"\x00\x01": sniff.Recognised, "\x00\x11": sniff.Unrecognised, "\x01\x01": sniff.Unrecognised, "\x01\x11": sniff.Unrecognised,
		"\x40\x01": sniff.Unrecognised, "\x80\x01": sniff.Unrecognised, "\x3e\xef": sniff.Recognised,
	} {
		b := append([]byte(kind+"\x00\x00"+stunCookie), make([]byte, 12)...)
		if v, _ := ask(new(STUN), udp([][]byte{b}, false)); v != want {
			t.Errorf("%x: %v, want %v", kind, v, want)
		}
	}
}

// No sniffer allocates, on what it recognises, on what it does not, and on what
// the others are for. Quic does for the keys of a new client, which is not
// counted here: internal/quicinitial does.
func TestNoAllocations(t *testing.T) {
	for protocol, s := range kinds {
		for _, c := range firstpackets.All(t) {
			in, h := input(t, c, len(c.Segments), false), new(sniff.Hint)
			s.Sniff(in, h) // grows the hint's buffers
			n := testing.AllocsPerRun(5, func() {
				h.Reset()
				s.Sniff(in, h)
			})
			if n > 0 && !testkit.Race {
				t.Errorf("%s, %s: %v allocations", protocol, c.ID, n)
			}
		}
	}
}

// BenchmarkSniff has, for each sniffer, the first packet that it recognises and,
// as no, those of all others one after the other.
func BenchmarkSniff(b *testing.B) {
	for _, protocol := range slices.Sorted(maps.Keys(kinds)) {
		s := kinds[protocol]
		var yes *sniff.Input
		var others []*sniff.Input
		for _, c := range firstpackets.All(b) {
			in := input(b, c, len(c.Segments), false)
			switch v, _ := ask(s, in); {
			case v == sniff.Recognised && c.Protocol == protocol && yes == nil:
				yes = in
			case v == sniff.Unrecognised:
				others = append(others, in)
			}
		}
		h := new(sniff.Hint)
		b.Run(protocol, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				h.Reset()
				s.Sniff(yes, h)
			}
		})
		b.Run(protocol+"/no", func(b *testing.B) {
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				h.Reset()
				s.Sniff(others[i%len(others)], h)
			}
		})
	}
}

func FuzzSniffers(f *testing.F) {
	for _, c := range firstpackets.All(f) {
		f.Add(c.Data(f)[0], uint16(5))
	}
	f.Fuzz(func(t *testing.T, b []byte, cut uint16) {
		for _, s := range kinds {
			look(t, s, b, nil)
			early, _ := ask(s, &sniff.Input{Bytes: b[:min(int(cut), len(b))]})
			if v, _ := ask(s, &sniff.Input{Bytes: b}); early == sniff.Unrecognised && v != early {
				t.Errorf("%T: %v of %d bytes, %v of all", s, early, cut, v)
			}
		}
	})
}
