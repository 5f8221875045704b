package sniff

import (
	"net"
	"slices"
	"testing"

	"github.com/mholt/caddy-l4/layer4"
	dto "github.com/prometheus/client_model/go"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// script answers the n-th byte it sees last, and counts its calls.
type script struct {
	say   string // n no, y yes, u undecided, p partial, r reject, t timeout
	calls int
}

func (s *script) Sniff(in *Input, h *Hint) Verdict {
	s.calls++
	at := min(len(in.Bytes), len(s.say)) - 1
	h.SetKey("key")
	switch s.say[at] {
	case 'y':
		return Recognised
	case 'r':
		h.Reject = true
		return Recognised
	case 'u':
		return Undecided
	case 't':
		h.Fault = Timeout
		return Undecided
	case 'p':
		return Partial
	}
	return Unrecognised
}

func connection(t testing.TB, b []byte) *layer4.Connection {
	a, z := net.Pipe()
	t.Cleanup(func() { a.Close(); z.Close() })
	return layer4.WrapConnection(a, b, zap.NewNop())
}

// Each case is what the sniffers A, B and C say as bytes come, and what routes
// that name them are told after each byte: n no, y yes, u undecided, p partial.
func TestOrder(t *testing.T) {
	for name, tc := range map[string]struct{ a, b, c, want string }{
		"the first wins":                 {"y", "y", "y", "ynn"},
		"the second, after a no":         {"n", "y", "y", "nyn"},
		"nobody":                         {"n", "n", "n", "nnn"},
		"undecided holds back all":       {"u", "y", "y", "uuu"},
		"but not those that said no":     {"n", "u", "y", "nuu"},
		"undecided, then no":             {"un", "yy", "yy", "uuu nyn"},
		"undecided, then yes":            {"uy", "yy", "yy", "uuu ynn"},
		"partial wins, its host to come": {"py", "yy", "yy", "pnn ynn"},
		"a rejection wins":               {"n", "r", "y", "nyn"},
		"a failure is no no":             {"t", "y", "y", "uuu"},
		"a failure that passes":          {"tn", "yy", "yy", "uuu nyn"},
		"decided is decided":             {"yn", "ny", "ny", "ynn ynn"},
	} {
		t.Run(name, func(t *testing.T) {
			scripts := [3]*script{{say: tc.a}, {say: tc.b}, {say: tc.c}}
			var plan Plan
			for i, s := range scripts {
				plan = append(plan, newNamed("test_"+string(rune('a'+i)), "here", s))
			}
			stream := []byte("xx")
			f := NewFlow(plan)
			f.Show(connection(t, nil), nil, nil)
			for _, n := range plan {
				if v, _ := f.Ask(n); v != Undecided {
					t.Errorf("%v without a byte", v)
				}
			}
			var got string
			for n := 1; n <= len(tc.a); n++ {
				if n > 1 {
					got += " "
				}
				f.Show(connection(t, stream[:n]), stream[:n], nil)
				for range 2 { // asked again, nobody is called again
					var now string
					for i := range plan {
						v, h := f.Ask(plan[2-i])
						if (v == Recognised || v == Partial) != (h != nil && h.HasKey) {
							t.Errorf("%v with the hint %+v", v, h)
						}
						now = string("nyup"[v]) + now
					}
					if len(got) < 4*(n-1)+3 {
						got += now
					} else if got[4*(n-1):] != now {
						t.Errorf("asked again: %s, before %s", now, got)
					}
				}
			}
			if got != tc.want {
				t.Errorf("routes are told %s, want %s", got, tc.want)
			}
			for i, s := range scripts {
				if s.calls > len(tc.a) {
					t.Errorf("sniffer %d was called %d times for %d bytes", i, s.calls, len(tc.a))
				}
			}
		})
	}
}

func TestRejection(t *testing.T) {
	for say, want := range map[string]struct{ rejected, known, recognised bool }{
		"r": {true, true, false}, "y": {false, true, true}, "n": {false, true, false}, "u": {false, false, false}, "p": {false, true, true},
	} {
		f := NewFlow(Plan{newNamed("test_reject", "here", &script{say: say})})
		f.Show(connection(t, []byte("x")), []byte("x"), nil)
		rejected, known := f.Rejected()
		if rejected != want.rejected || known != want.known || f.Recognised() != want.recognised {
			t.Errorf("%s: rejected %v, known %v, recognised %v", say, rejected, known, f.Recognised())
		}
	}
	if rejected, known := NewFlow(nil).Rejected(); rejected || !known {
		t.Error("without sniffers a flow may be rejected")
	}
}

// A flow is found by the connection whose bytes it has seen, and by no other.
func TestOf(t *testing.T) {
	b := []byte("abc")
	cx := connection(t, b)
	f := NewFlow(nil)
	f.Show(cx, b, nil)
	if Of(cx) != f {
		t.Error("the flow is not found")
	}
	other := cx.Wrap(cx.Conn)
	if Of(other) != f {
		t.Error("the flow is not found behind a handler that leaves the bytes alone")
	}
	changed := layer4.WrapConnection(cx.Conn, []byte("abc"), zap.NewNop())
	changed.SetVar(flowVar, f)
	if got := Of(changed); got == f || string(got.Input().Bytes) != "abc" {
		t.Error("a flow of other bytes is found")
	}
	if got := Of(connection(t, nil)); !got.Empty() {
		t.Error("there are bytes where there are none")
	}
}

func TestCallsAreCounted(t *testing.T) {
	n := newNamed("test_counted", "here", &script{say: "yunt"})
	count := func(result string) float64 {
		var m dto.Metric
		if err := calls.WithLabelValues("test_counted", result).Write(&m); err != nil {
			t.Fatal(err)
		}
		return m.GetCounter().GetValue()
	}
	results := []string{"ok", "undecided", "unrecognised", "timeout"}
	for i, result := range results {
		before := count(result)
		n.Sniff(&Input{Bytes: make([]byte, i+1)}, new(Hint))
		if got := count(result) - before; got != 1 {
			t.Errorf("%v calls are %s", got, result)
		}
	}
}

func TestNoAllocations(t *testing.T) {
	plan := Plan{newNamed("test_alloc", "here", &script{say: "n"}), newNamed("test_alloc2", "here", &script{say: "y"})}
	b := []byte("x")
	f, in := NewFlow(plan), Input{Bytes: b}
	h := new(Hint)
	plan[0].Sniff(&in, h)
	if n := testing.AllocsPerRun(100, func() { plan[0].Sniff(&in, h) }); n > 0 && !testkit.Race {
		t.Errorf("a call: %v allocations", n)
	}
	cx := connection(t, b)
	f.Show(cx, b, nil)
	f.Ask(plan[1])
	if n := testing.AllocsPerRun(100, func() { Of(cx).Ask(plan[1]) }); n > 0 && !testkit.Race {
		t.Errorf("a question: %v allocations", n)
	}
}

func BenchmarkCall(b *testing.B) {
	n, in, h := newNamed("test_bench", "here", &script{say: "y"}), Input{Bytes: []byte("x")}, new(Hint)
	b.ReportAllocs()
	for b.Loop() {
		n.Sniff(&in, h)
	}
}

// once recognises "abc" only when it is all there, and says no to less.
type once struct{}

func (once) OneLook() {}

func (once) Sniff(in *Input, h *Hint) Verdict {
	if string(in.Bytes) == "abc" {
		h.Reject = true
		return Recognised
	}
	return Unrecognised
}

// TestOneLook holds that a sniffer which cannot ask for more is asked again
// when there is more, before those after it.
func TestOneLook(t *testing.T) {
	plan := Plan{newNamed("once", "here", once{}), newNamed("late", "here", late{})}
	if !plan.MayReject() {
		t.Error("a plan with a sniffer that may reject says it does not")
	}
	f := NewFlow(plan)
	for _, step := range []struct {
		bytes    string
		rejected bool
		known    bool
	}{{"a", false, false}, {"ab", false, false}, {"abc", true, true}} {
		b := []byte(step.bytes)
		f.Show(connection(t, b), b, nil)
		if rejected, known := f.Rejected(); rejected != step.rejected || known != step.known {
			t.Errorf("%q: rejected %v, known %v; want %v, %v", step.bytes, rejected, known, step.rejected, step.known)
		}
	}
}

// late never decides.
type late struct{}

func (late) NeverRejects() {}

func (late) Sniff(*Input, *Hint) Verdict { return Undecided }

// user is a matcher that asks sniffers.
type user struct {
	layer4.ConnMatcher
	asks []*Named
}

func (u user) Sniffers() []*Named { return u.asks }

// TestPlan has the sniffers of matchers inside not, at any depth, in the plan
// as well, once each: they are asked in order and may reject like all others.
func TestPlan(t *testing.T) {
	a, b, c := newNamed("plan_a", "here", late{}), newNamed("plan_b", "here", once{}), newNamed("plan_c", "here", late{})
	not := func(m ...layer4.ConnMatcher) layer4.ConnMatcher {
		return &layer4.MatchNot{MatcherSets: []layer4.MatcherSet{m}}
	}
	var p Plan
	p.Add(user{asks: []*Named{c}})
	if p.MayReject() {
		t.Error("a plan without a sniffer that may reject says it may")
	}
	p.Add(not(user{asks: []*Named{a, c}}))
	p.Add(not(not(user{asks: []*Named{b}})))
	p.Add(not())
	if want := (Plan{c, a, b}); !slices.Equal(p, want) || !p.MayReject() {
		t.Errorf("%d sniffers, may reject %v; want %d", len(p), p.MayReject(), len(want))
	}
}
