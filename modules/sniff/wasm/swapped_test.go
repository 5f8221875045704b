package wasm

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

// TestSwapped has somebody put another file in the place of a pinned one, again
// and again while it is loaded: what runs is what the pin names.
func TestSwapped(t *testing.T) {
	good, evil := guest(t, "key-only"), guest(t, "alloc-null")
	dir := fill(t, map[string][]byte{"a.wasm": good})
	stop, stopped := make(chan struct{}), make(chan error, 1)
	go func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				stopped <- nil
				return
			default:
			}
			b := [][]byte{good, evil}[i%2]
			var err error
			if i%4 < 2 { // in one step, or as a copy by hand does it
				tmp := filepath.Join(dir, ".tmp")
				if err = os.WriteFile(tmp, b, 0o644); err == nil {
					err = os.Rename(tmp, filepath.Join(dir, "a.wasm"))
				}
			} else {
				err = os.WriteFile(filepath.Join(dir, "a.wasm"), b, 0o644)
			}
			if err != nil {
				stopped <- err
				return
			}
		}
	}()
	ran, refused := 0, 0
	for most := testkit.Scaled(500, 50000); ran+refused < most; {
		ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
		h := &Host{Dir: dir, CallTimeout: new(slow), Modules: pins(map[string][]byte{"a": good})}
		err := h.Provision(ctx)
		switch {
		case err != nil && !strings.Contains(err.Error(), "module a: "):
			t.Error(err)
		case err != nil:
			refused++
		default:
			ran++
			var hint sniff.Hint
			if v := h.loaded["a"].Sniff(&sniff.Input{Bytes: []byte("x")}, &hint); v != sniff.Recognised || string(hint.Key) != "k" {
				t.Errorf("what runs says %v with key %q, want k", v, hint.Key)
			}
		}
		if err := h.Cleanup(); err != nil {
			t.Error(err)
		}
		cancel()
		if t.Failed() {
			break
		}
	}
	close(stop)
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	t.Logf("%d loads ran, %d were refused", ran, refused)
	if ran == 0 || refused == 0 {
		t.Errorf("%d loads ran, %d were refused: nothing was swapped", ran, refused)
	}
}
