package filter

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
)

func limit(t testing.TB, options string) *RateLimit {
	t.Helper()
	return mustChain(t, `[{"filter": "rate_limit", `+options+`}]`).filters[0].Filter.(*RateLimit)
}

const second = int64(time.Second)

// TestRateLimit plays a source, its neighbours and others against the clock.
func TestRateLimit(t *testing.T) {
	r := limit(t, `"per_ip": {"rate": 2, "burst": 3}, "per_net": {"rate": 4, "burst": 5}`)
	now := 100 * second
	want := func(n int, client, then string) {
		t.Helper()
		f := from(t, client)
		for i := range n {
			if rule := r.check(f, now, false); rule != "" {
				t.Fatalf("flow %d of %s would be refused by %q", i, client, rule)
			}
			if rule := r.check(f, now, true); rule != "" {
				t.Fatalf("flow %d of %s: %q", i, client, rule)
			}
		}
		if rule := r.check(f, now, true); rule != then {
			t.Fatalf("after %d of %s: %q, want %q", n, client, rule, then)
		}
	}
	want(3, "192.0.2.1", RuleRateIP)
	want(0, "::ffff:192.0.2.1", RuleRateIP)
	want(0, "::192.0.2.1", RuleRateIP)
	want(2, "192.0.2.2", RuleRateNet)
	want(3, "192.0.3.1", RuleRateIP)
	want(3, "2001:db8::1", RuleRateIP)
	want(2, "2001:db8::2", RuleRateNet)
	want(3, "2001:db8:0:1::1", RuleRateIP)
	now += second
	want(2, "192.0.2.1", RuleRateIP) // and nothing was taken by those refused
	want(2, "192.0.2.9", RuleRateNet)
	now += 3600 * second
	want(3, "192.0.2.1", RuleRateIP)
}

// TestReloadKeepsBuckets changes the rates under a source that has spent its
// tokens.
func TestReloadKeepsBuckets(t *testing.T) {
	now := 100 * second
	old := limit(t, `"per_ip": {"rate": 1, "burst": 100}`)
	f := from(t, "192.0.2.1")
	for range 100 {
		if old.check(f, now, true) != "" {
			t.Fatal("refused within the burst")
		}
	}
	same := limit(t, `"per_ip": {"rate": 1, "burst": 100}`)
	if same.check(f, now, true) != RuleRateIP {
		t.Error("a reload has filled the bucket")
	}
	faster := limit(t, `"per_ip": {"rate": 10, "burst": 20}`)
	if faster.check(f, now, true) != RuleRateIP {
		t.Error("a reload with another rate has filled the bucket")
	}
	if rule := faster.check(f, now+second/10, true); rule != "" {
		t.Errorf("the new rate does not hold: %s", rule)
	}
	ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
	defer cancel()
	other, err := Load(ctx, "other", rawList(t, `[{"filter": "rate_limit", "per_ip": {"rate": 1}}]`))
	if err != nil {
		t.Fatal(err)
	}
	if other.Check(f) != "" {
		t.Error("two listeners share buckets")
	}
}

func TestRateLimitMistakes(t *testing.T) {
	for options, want := range map[string]string{
		`"per_ip": null`:                          `neither per_ip nor per_net is given`,
		`"per_ip": {}`:                            `per_ip.rate: 0 is not from 1 to 1000000`,
		`"per_net": {"rate": -1}`:                 `per_net.rate: -1 is not from 1`,
		`"per_net": {"rate": 1, "burst": 0}`:      `per_net.burst: 0 is not from 1 to 1000000; leave it out for the rate`,
		`"per_ip": {"rate": 2000000}`:             `per_ip.rate: 2000000 is not from`,
		`"per_ip": {"rate": 1.5}`:                 `per_ip.rate: `,
		`"per_ip": {"rate": 1, "bursts": 1}`:      `per_ip.bursts: unknown key; did you mean burst?`,
		`"per_ip": {"rate": 1}, "per_network": 1`: `per_network: unknown key`,
	} {
		if _, err := chain(t, `[{"filter": "rate_limit", `+options+`}]`); err == nil || !strings.Contains(err.Error(), "filters[0]: ") || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", options, err, want)
		}
	}
}

// spoofed is the nth of many sources, each in a network of its own.
func spoofed(n int) netip.Addr {
	var b [16]byte
	b[0], b[1] = 0x20, 0x01
	binary.BigEndian.PutUint32(b[4:], uint32(n))
	return netip.AddrFrom16(b)
}

// TestFloodOfSources is D14: more sources than there is room for. The tables are
// bounded, those who were there keep their service, strangers are refused and
// counted, those with flows get in, and it is over when the flood is.
func TestFloodOfSources(t *testing.T) {
	r := limit(t, `"per_ip": {"rate": 1, "burst": 5}, "per_net": {"rate": 1, "burst": 5}`)
	core, logs := observer.New(zap.WarnLevel)
	r.logger = zap.New(core)
	stats := flow.ListenerOf(t.Name())
	now := 1000 * second
	const known = 500
	for n := range known {
		if rule := r.check(flowOf(spoofed(n), stats), now, true); rule != "" {
			t.Fatal(rule)
		}
	}
	passed, refused := 0, 0
	for n := known; n < known+300_000; n++ {
		switch rule := r.check(flowOf(spoofed(n), stats), now, true); rule {
		case "":
			passed++
		case RuleRateIP:
			refused++
		default:
			t.Fatal(rule)
		}
	}
	ips, nets := r.buckets.len()
	if ips > maxBuckets || nets > maxBuckets || passed+refused != 300_000 || ips != passed+known || nets != ips {
		t.Errorf("%d and %d buckets, %d passed and %d refused", ips, nets, passed, refused)
	}
	if passed < maxBuckets*3/4 {
		t.Errorf("only %d sources found room", passed)
	}
	if logs.FilterMessage("rate limiter table is full").Len() != 1 {
		t.Errorf("the log says %v", logs.All())
	}
	for n := range known { // within their burst
		if rule := r.check(flowOf(spoofed(n), stats), now, true); rule != "" {
			t.Fatalf("known source %d: %q", n, rule)
		}
	}
	stranger, player := spoofed(1<<30), spoofed(1<<30+1)
	stats.Open(false, player, flow.Bounds{})
	stats.Closed(&relay.Info{ID: relay.MakeID(false, 0, 1, 1), Client: netip.AddrPortFrom(player, 1)}, relay.ClientClose)
	if rule := r.check(flowOf(stranger, stats), now, true); rule != RuleRateIP {
		t.Errorf("a stranger: %q", rule)
	}
	if rule := r.check(flowOf(player, stats), now, true); rule != "" {
		t.Errorf("a player who had a flow: %q", rule)
	}
	now += 6 * second
	if rule := r.check(flowOf(stranger, stats), now, true); rule != "" {
		t.Errorf("a stranger, after the flood: %q", rule)
	}
}

// TestRatesAreExact takes tokens of few sources from many goroutines at one
// moment.
func TestRatesAreExact(t *testing.T) {
	r := limit(t, `"per_ip": {"rate": 1, "burst": 70}, "per_net": {"rate": 1, "burst": 100}`)
	now := 100 * second
	var passed [4]atomic.Int64
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for n := range 400 {
				i := n % 4
				if r.check(flowOf(netip.AddrFrom4([4]byte{192, 0, byte(i / 2), byte(i)}), nil), now, true) == "" {
					passed[i].Add(1)
				}
			}
		})
	}
	wg.Wait()
	for net := range 2 {
		a, b := passed[2*net].Load(), passed[2*net+1].Load()
		if a > 70 || b > 70 || a+b != 100 {
			t.Errorf("%d and %d passed in network %d", a, b, net)
		}
	}
}

func TestRateLimitAllocatesNothing(t *testing.T) {
	c := mustChain(t, `[{"filter": "rate_limit", "per_ip": {"rate": 1000000}, "per_net": {"rate": 1, "burst": 3}}]`)
	f := from(t, "192.0.2.1")
	c.Check(f)
	if n := testing.AllocsPerRun(1000, func() { c.Check(f) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// FuzzRateLimit compares with buckets that are refilled by the second, for
// sources of one network.
func FuzzRateLimit(f *testing.F) {
	f.Add(uint64(1), uint8(3), uint8(9))
	f.Fuzz(func(t *testing.T, seed uint64, rate, burst uint8) {
		rng := rand.New(rand.NewPCG(seed, 1))
		b := int64(burst)%20 + 1
		perIP := &Rate{Rate: int64(rate)%10 + 1, Burst: &b}
		if err := perIP.provision(); err != nil {
			t.Fatal(err)
		}
		r := &RateLimit{PerIP: perIP, buckets: newBuckets(maxBuckets), logger: zap.NewNop()}
		tokens, last := map[cidr.Key]int64{}, map[cidr.Key]int64{}
		now := second
		for range 300 {
			now += rng.Int64N(second) / perIP.step * perIP.step // whole tokens
			a := netip.AddrFrom4([4]byte{192, 0, 2, byte(rng.IntN(3))})
			k, _ := cidr.Keys(a)
			if last[k] == 0 {
				tokens[k] = b
			} else {
				tokens[k] = min(b, tokens[k]+(now-last[k])/perIP.step)
			}
			last[k] = now
			want := RuleRateIP
			if tokens[k] > 0 {
				tokens[k]--
				want = ""
			}
			if got := r.check(flowOf(a, nil), now, true); got != want {
				t.Fatalf("rate %d burst %d at %v: %q, want %q", perIP.Rate, b, time.Duration(now), got, want)
			}
		}
	})
}

// BenchmarkRateLimit is a flood of sources that finds the tables full.
func BenchmarkRateLimit(b *testing.B) {
	for _, name := range []string{"flood", "one source"} {
		b.Run(name, func(b *testing.B) {
			r := limit(b, `"per_ip": {"rate": 50, "burst": 100}, "per_net": {"rate": 500, "burst": 1000}`)
			stats := flow.ListenerOf(b.Name())
			var flows []Flow
			for n := range 300_000 {
				flows = append(flows, flowOf(spoofed(n), stats))
			}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				r.Check(flows[i])
				if i++; i == len(flows) || name != "flood" {
					i = 0
				}
			}
			ips, _ := r.buckets.len()
			b.ReportMetric(float64(ips), "buckets")
		})
	}
}
