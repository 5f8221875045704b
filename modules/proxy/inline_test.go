package proxy

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/modules/pool"
)

// TestInlinePoolsAreNumberedByOptions wants the same names whatever the order
// in which handlers are loaded.
func TestInlinePoolsAreNumberedByOptions(t *testing.T) {
	want := map[int]string{1: "inline:10.0.0.1:1", 2: "inline3:10.0.0.1:1", 3: "inline4:10.0.0.1:1"} // by max_tries
	for _, order := range [][]int{{1, 2, 3}, {1, 3, 2}, {2, 1, 3}, {2, 3, 1}, {3, 1, 2}, {3, 2, 1}} {
		t.Run(fmt.Sprint(order), func(t *testing.T) {
			ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
			defer cancel()
			taken := &pool.Config{Targets: []string{"10.0.0.2:1"}}
			a := &App{ctx: ctx, pools: make(map[string]*pool.Pool), Pools: map[string]*pool.Config{"inline2:10.0.0.1:1": taken}}
			made := make(map[int]*pool.Pool)
			for _, tries := range order {
				p, err := a.InlinePool(&pool.Config{Targets: []string{"10.0.0.1:1"}, MaxTries: &tries})
				if err != nil {
					t.Fatal(err)
				}
				made[tries] = p
			}
			for tries, name := range want {
				if got := made[tries].Name(); got != name || a.pools[name] != made[tries] {
					t.Errorf("the pool with max_tries %d is named %s, want %s", tries, got, name)
				}
			}
			if len(a.pools) != 3 {
				t.Errorf("the app has %d pools, want 3", len(a.pools))
			}
			for _, p := range a.pools {
				p.Cleanup()
			}
		})
	}
}

// Pools in handlers are named after their sources, those of one source by a
// number.
func TestInlinePoolsOfSources(t *testing.T) {
	for in, want := range map[string]string{
		`{"targets": ["10.0.0.1:1", "10.0.0.2:1"]}`: "10.0.0.1:1,10.0.0.2:1",
		`{"source": "match-us"}`:                    "source match-us",
		`{"source": {"source": "static"}}`:          "source static,…",
		`{"source": {"source": "dns", "port": 7, "name": "a.test"}}`: inlineBase(&pool.Config{
			SourceRaw: json.RawMessage(`{"name": "a.test", "source": "dns", "port": 7}`),
		}),
	} {
		var c pool.Config
		if err := json.Unmarshal([]byte(in), &c); err != nil {
			t.Fatal(err)
		}
		if got := inlineBase(&c); !strings.HasPrefix(got, want) {
			t.Errorf("%s is named %s, want %s", in, got, want)
		}
	}
}
