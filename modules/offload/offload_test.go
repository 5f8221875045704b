package offload

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"testing"
)

func TestConfig(t *testing.T) {
	for in, want := range map[string]string{
		`"nftables"`:           "{20 10000000000 65536}",
		`{"kind": "nftables"}`: "{20 10000000000 65536}",
		`{"kind": "nftables", "block_after": 1, "block_for": "1h", "max_blocked": 16}`: "{1 3600000000000 16}",
		`""`:    "kind: is missing; there is nftables",
		`{}`:    "kind: is missing; there is nftables",
		`"xdp"`: `kind: "xdp" is not known; there is nftables`,
		`{"kind": "nftables", "block_four": "1h"}`:  `block_four: unknown key; did you mean block_for?`,
		`{"kind": "nftables", "block_after": 0}`:    "block_after: 0 is not from 1 to 10000",
		`{"kind": "nftables", "block_for": "10ms"}`: "block_for: 10ms is not from 1s to 1h0m0s",
		`{"kind": "nftables", "block_for": "61m"}`:  "block_for: 1h1m0s is not from 1s to 1h0m0s",
		`{"kind": "nftables", "max_blocked": 1}`:    "max_blocked: 1 is not from 16 to 1048576",
	} {
		var c Config
		err := json.Unmarshal([]byte(in), &c)
		if err == nil {
			err = c.Validate()
		}
		got := fmt.Sprint(c.settings())
		if err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}

func TestTargets(t *testing.T) {
	bind := func(udp bool, a string) Bind { return Bind{udp, netip.MustParseAddrPort(a)} }
	ids := map[string]int{"a": 1, "b": 2}
	got := targets([]*Scope{
		{Listener: "open", Binds: []Bind{bind(true, "192.0.2.1:7")}},
		{Listener: "a", Guard: true, Binds: []Bind{bind(true, "0.0.0.0:7"), bind(false, "[2001:db8::1]:7")}},
		{Listener: "b", Guard: true, Binds: []Bind{bind(true, "[::]:7"), bind(false, "[::]:7")}},
	}, func(name string) int { return ids[name] })
	addr := netip.MustParseAddr
	want := map[target]int{
		{v4, 17, netip.Addr{}, 7}: 1, {v6, 17, netip.Addr{}, 7}: 2, {v4, 6, netip.Addr{}, 7}: 2, {v6, 6, netip.Addr{}, 7}: 2,
		{v4, 17, addr("192.0.2.1"), 7}: 0, {v6, 6, addr("2001:db8::1"), 7}: 1,
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%v, want %v", got, want)
	}
}
