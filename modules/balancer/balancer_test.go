package balancer

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

type backend struct {
	addr   netip.AddrPort
	weight uint32
	active int64
}

func (b *backend) Addr() netip.AddrPort { return b.addr }
func (b *backend) Weight() uint32       { return b.weight }
func (b *backend) Active() int64        { return b.active }

func backends(weights ...uint32) []Candidate {
	var list []Candidate
	for i, w := range weights {
		a := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), 7777)
		list = append(list, &backend{addr: a, weight: w})
	}
	return list
}

func same(n int) []Candidate {
	w := make([]uint32, n)
	for i := range w {
		w[i] = 1
	}
	return backends(w...)
}

func client(i int) Flow {
	a := netip.AddrFrom4([4]byte{198, 51, byte(i >> 8), byte(i)})
	return Flow{Client: netip.AddrPortFrom(a, uint16(40000+i%1000))}
}

func TestRoundRobinTakesTurns(t *testing.T) {
	c, r := same(3), new(RoundRobin)
	for i := range 9 {
		if got := r.Pick(c, Flow{}); got != i%3 {
			t.Fatalf("choice %d is %d, want %d", i, got, i%3)
		}
	}
}

func TestFirstAvailable(t *testing.T) {
	if got := new(FirstAvailable).Pick(same(3), Flow{}); got != 0 {
		t.Errorf("chose %d, want the first", got)
	}
}

func TestLeastConn(t *testing.T) {
	for name, tc := range map[string]struct {
		weights []uint32
		active  []int64
		want    int
	}{
		"fewest":             {[]uint32{1, 1, 1}, []int64{5, 3, 4}, 1},
		"fewest of weight":   {[]uint32{1, 4}, []int64{2, 7}, 1},
		"weights when empty": {[]uint32{1, 3, 2}, []int64{0, 0, 0}, 1},
		"one":                {[]uint32{1}, []int64{9}, 0},
		"huge":               {[]uint32{1 << 31, 1}, []int64{1 << 62, 1 << 62}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			c := backends(tc.weights...)
			for i, n := range tc.active {
				c[i].(*backend).active = n
			}
			l := new(LeastConn)
			for range 2 * len(c) { // from every start
				if got := l.Pick(c, Flow{}); got != tc.want {
					t.Errorf("chose %d, want %d", got, tc.want)
				}
			}
		})
	}
}

// Callers who all see the same counts must not all choose the same backend.
func TestLeastConnSpreadsTies(t *testing.T) {
	c, l := same(4), new(LeastConn)
	var got [4]int
	for range 400 {
		got[l.Pick(c, Flow{})]++
	}
	if got != [4]int{100, 100, 100, 100} {
		t.Errorf("choices %v, want 100 each", got)
	}
}

func TestWeightedIsExactOverACycle(t *testing.T) {
	for _, weights := range [][]uint32{
		{1}, {1, 1}, {3, 3, 3}, {5, 1, 1}, {1, 2, 3, 4}, {100, 1}, {7, 11, 13}, {10, 20, 30}, {50_000, 49_999},
	} {
		t.Run(fmt.Sprint(weights), func(t *testing.T) {
			c, w := backends(weights...), new(Weighted)
			var total uint64
			for _, n := range weights {
				total += uint64(n)
			}
			got := make([]uint32, len(c))
			for range total {
				got[w.Pick(c, Flow{})]++
			}
			for i := range got {
				if got[i] != weights[i] {
					t.Fatalf("one cycle gave %v", got)
				}
			}
		})
	}
}

// At no time may a backend be more than two flows ahead of, or behind, its
// share.
func TestWeightedIsSmooth(t *testing.T) {
	for _, weights := range [][]uint32{{5, 1, 1}, {50, 10, 10}, {1, 1, 1, 1}, {100, 1}, {7, 11, 13}, {1, 2, 3, 4, 5, 6, 7}, {1000, 1000, 1}, {512, 512, 1024, 3}} {
		t.Run(fmt.Sprint(weights), func(t *testing.T) {
			c, w := backends(weights...), new(Weighted)
			var total float64
			for _, n := range weights {
				total += float64(n)
			}
			got := make([]float64, len(c))
			for n := 1.0; n <= 2*total; n++ {
				got[w.Pick(c, Flow{})]++
				for i := range got {
					if d := got[i] - n*float64(weights[i])/total; d > 2 || d < -2 {
						t.Fatalf("after %.0f flows backend %d is %.2f from its share", n, i, d)
					}
				}
			}
		})
	}
}

func TestWeightedUnderConcurrency(t *testing.T) {
	c, w := backends(3, 1), new(Weighted)
	var mu sync.Mutex
	var got [2]int
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			var mine [2]int
			for range 1000 {
				mine[w.Pick(c, Flow{})]++
			}
			mu.Lock()
			defer mu.Unlock()
			got[0] += mine[0]
			got[1] += mine[1]
		})
	}
	wg.Wait()
	if got != [2]int{6000, 2000} {
		t.Errorf("choices %v, want 6000 and 2000", got)
	}
}

func provisioned(t *testing.T, hashOn string) *ConsistentHash {
	t.Helper()
	c := &ConsistentHash{HashOn: hashOn}
	if err := c.Provision(caddy.Context{}); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestConsistentHashKey(t *testing.T) {
	c := same(16)
	base := Flow{Client: netip.MustParseAddrPort("203.0.113.7:51343")}
	for name, tc := range map[string]struct {
		hashOn, client string
		same           bool
	}{
		"another port":              {"", "203.0.113.7:9", true},
		"IPv4-mapped":               {"", "[::ffff:203.0.113.7]:51343", true},
		"another address":           {"", "203.0.113.9:51343", false},
		"another port, with ports":  {srcIPPort, "203.0.113.7:9", false},
		"IPv4-mapped, with ports":   {srcIPPort, "[::ffff:203.0.113.7]:51343", true},
		"the same flow, with ports": {srcIPPort, "203.0.113.7:51343", true},
	} {
		t.Run(name, func(t *testing.T) {
			h := provisioned(t, tc.hashOn)
			got := h.Pick(c, base) == h.Pick(c, Flow{Client: netip.MustParseAddrPort(tc.client)})
			if got != tc.same {
				t.Errorf("same backend: %v, want %v", got, tc.same)
			}
		})
	}
}

// The choice is part of what versions promise each other.
func TestConsistentHashNeverChanges(t *testing.T) {
	h, c := provisioned(t, ""), same(100)
	var got []int
	for _, s := range []string{"203.0.113.7:1", "198.51.100.20:1", "[2001:db8::1]:1", "[2001:db8::2]:1"} {
		got = append(got, h.Pick(c, Flow{Client: netip.MustParseAddrPort(s)}))
	}
	if want := "[78 69 60 1]"; fmt.Sprint(got) != want {
		t.Errorf("choices %v, want %s", got, want)
	}
}

func TestConsistentHashSpreadsAndRemaps(t *testing.T) {
	const clients, n = 20000, 10
	h, c := provisioned(t, ""), same(n+1)
	got := make([]int, n)
	moved, movedElsewhere := 0, 0
	for i := range clients {
		before, after := h.Pick(c[:n], client(i)), h.Pick(c, client(i))
		got[before]++
		if before != after {
			moved++
			if after != n {
				movedElsewhere++
			}
		}
	}
	for i, k := range got {
		if k < clients/n*8/10 || k > clients/n*12/10 {
			t.Errorf("backend %d has %d of %d clients", i, k, clients)
		}
	}
	if movedElsewhere > 0 {
		t.Errorf("%d clients moved between old backends", movedElsewhere)
	}
	if want := clients / (n + 1); moved < want*8/10 || moved > want*12/10 {
		t.Errorf("%d clients moved, want about %d", moved, want)
	}
}

func TestConsistentHashSpreadsOverMany(t *testing.T) {
	h, c := provisioned(t, srcIPPort), same(100)
	got := make([]int, len(c))
	for port := range 20000 { // one client behind many ports
		f := Flow{Client: netip.AddrPortFrom(netip.MustParseAddr("203.0.113.7"), uint16(port))}
		got[h.Pick(c, f)]++
	}
	for i, n := range got {
		if n < 130 || n > 270 { // five standard deviations
			t.Errorf("backend %d has %d of 20000 flows, want about 200", i, n)
		}
	}
}

func TestConsistentHashWeights(t *testing.T) {
	h, c := provisioned(t, ""), backends(1, 3, 1)
	var got [3]int
	for i := range 20000 {
		got[h.Pick(c, client(i))]++
	}
	if got[1] < 11400 || got[1] > 12600 {
		t.Errorf("choices %v, want about 12000 for the second", got)
	}
}

func TestPickDoesNotAllocate(t *testing.T) {
	c := backends(3, 1, 2, 5)
	seed := [2]uint64{1, 2}
	t.Logf("seed %v", seed)
	rnd := rand.New(rand.NewPCG(seed[0], seed[1]))
	for _, b := range []Balancer{new(RoundRobin), new(LeastConn), new(Weighted), provisioned(t, ""), new(FirstAvailable)} {
		f := client(rnd.IntN(1000))
		if n := testing.AllocsPerRun(100, func() { b.Pick(c, f) }); n != 0 {
			t.Errorf("%T allocates %v times", b, n)
		}
	}
}

func TestConfig(t *testing.T) {
	for name, tc := range map[string]struct {
		policy, in, err string
	}{
		"round robin":           {"round_robin", `{}`, ""},
		"an option of another":  {"round_robin", `{"hash_on": "src_ip"}`, "hash_on"},
		"weights of another":    {"least_conn", `{"weights": {"10.0.0.1:1": 2}}`, "weights"},
		"hash":                  {"consistent_hash", `{"hash_on": "src_ip_port"}`, ""},
		"hash default":          {"consistent_hash", `{}`, ""},
		"hash on what":          {"consistent_hash", `{"hash_on": "sni"}`, `hash_on: "sni" is neither src_ip nor src_ip_port`},
		"weights":               {"weighted", `{"weights": {"10.0.0.1:1": 2, "game.example:7777": 3}}`, ""},
		"weight 0":              {"weighted", `{"weights": {"10.0.0.1:1": 0}}`, `weights: "10.0.0.1:1": 0 is not between 1`},
		"weight below 0":        {"weighted", `{"weights": {"10.0.0.1:1": -1}}`, `-1`},
		"weight of no port":     {"weighted", `{"weights": {"10.0.0.1": 1}}`, `weights: "10.0.0.1" is not ip:port or host:port`},
		"weight of port 0":      {"weighted", `{"weights": {"10.0.0.1:0": 1}}`, `is not ip:port or host:port`},
		"first available":       {"first_available", `{}`, ""},
		"first available, more": {"first_available", `{"x": 1}`, `unknown field "x"`},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
			defer cancel()
			_, err := ctx.LoadModuleByID("wayhouse.balancers."+tc.policy, json.RawMessage(tc.in))
			if (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
				t.Errorf("error %v, want %q", err, tc.err)
			}
		})
	}
}

func TestCaddyfile(t *testing.T) {
	for in, want := range map[string]string{
		"round_robin":                 `{"policy":"round_robin"}`,
		"least_conn":                  `{"policy":"least_conn"}`,
		"first_available":             `{"policy":"first_available"}`,
		"consistent_hash":             `{"policy":"consistent_hash"}`,
		"consistent_hash src_ip_port": `{"hash_on":"src_ip_port","policy":"consistent_hash"}`,
		"weighted":                    `{"policy":"weighted"}`,
		"weighted {\n weight 10.0.0.1:1 3\n weight a.example:2 4\n}": `{"policy":"weighted","weights":{"10.0.0.1:1":3,"a.example:2":4}}`,

		"least_con":                                             `unrecognized balancer "least_con"; did you mean least_conn?`,
		"round_robin src_ip":                                    `unexpected argument "src_ip" of round_robin, at Testfile:1`,
		"round_robin {\n x\n}":                                  `unrecognized option "x" of round_robin; there are none, at Testfile:2`,
		"consistent_hash sni":                                   `"sni" is neither`,
		"consistent_hash src_ip src_ip":                         `unexpected argument`,
		"consistent_hash {\n weight a:1 1\n}":                   `unrecognized option "weight"`,
		"weighted x":                                            `unexpected argument "x"`,
		"weighted {\n wait 1\n}":                                `unrecognized option "wait"`,
		"weighted {\n weight 10.0.0.1:1\n}":                     `want a target and a number, not 1`,
		"weighted {\n weight 10.0.0.1:1 0\n}":                   `{"policy":"weighted","weights":{"10.0.0.1:1":0}}`,
		"weighted {\n weight 10.0.0.1:1 x\n}":                   `"x" is not a number from 1`,
		"weighted {\n weight a.test:1 1\n weight a.test:1 2\n}": `has one already`,
	} {
		t.Run(in, func(t *testing.T) {
			d := caddyfile.NewTestDispenser(in)
			d.Next()
			raw, err := UnmarshalCaddyfile(d)
			got := string(raw)
			if err != nil {
				got = err.Error()
			}
			if strings.HasPrefix(want, "{") && got != want || !strings.Contains(got, want) {
				t.Errorf("got %s, want %s", got, want)
			}
		})
	}
}

func BenchmarkPick(b *testing.B) {
	for _, n := range []int{4, 64} {
		c := same(n)
		for i := range c {
			c[i].(*backend).weight = uint32(1 + i%3)
		}
		hash := &ConsistentHash{HashOn: srcIP}
		for _, bal := range []Balancer{new(RoundRobin), new(LeastConn), new(Weighted), hash} {
			b.Run(fmt.Sprintf("%T/%d", bal, n), func(b *testing.B) {
				f := client(1)
				for b.Loop() {
					bal.Pick(c, f)
				}
			})
		}
	}
}
