package filter

import (
	"context"
	"encoding/json"
	"net/netip"
	"testing"

	"github.com/caddyserver/caddy/v2"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
)

func TestMain(m *testing.M) { kit.Main(m) }

// chain loads filters as a listener of the name of the test would.
func chain(t testing.TB, filters string) (*Chain, error) {
	t.Helper()
	return chainOf(t, caddy.Context{Context: context.Background()}, filters)
}

func chainOf(t testing.TB, parent caddy.Context, filters string) (*Chain, error) {
	t.Helper()
	ctx, cancel := caddy.NewContext(parent)
	t.Cleanup(cancel)
	return Load(ctx, t.Name(), rawList(t, filters))
}

func rawList(t testing.TB, filters string) (raws []json.RawMessage) {
	t.Helper()
	if err := json.Unmarshal([]byte(filters), &raws); err != nil {
		t.Fatal(err)
	}
	return raws
}

func mustChain(t testing.TB, filters string) *Chain {
	t.Helper()
	c, err := chain(t, filters)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// from is a flow of a client, as the listener would ask about it.
func from(t testing.TB, client string) Flow {
	t.Helper()
	a, err := netip.ParseAddr(client)
	if err != nil {
		t.Fatal(err)
	}
	return flowOf(a, flow.ListenerOf(t.Name()))
}
