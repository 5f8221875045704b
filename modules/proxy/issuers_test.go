package proxy

import (
	"context"
	"errors"
	"testing"
)

// TestIssuerWaits has a certificate wanted before the listeners are bound, and the
// config given up.
func TestIssuerWaits(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	i := &lateIssuer{bound: make(chan struct{})}
	if _, err := i.Issue(ctx, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want the end of the config", err)
	}
}
