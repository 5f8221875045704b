package webfront

import (
	"errors"
	"testing"
	"unsafe"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// TestDialError holds what dialError supposes of Caddy's type.
func TestDialError(t *testing.T) {
	want := errors.New("no way")
	if got, ok := dialError(want).(reverseproxy.DialError); !ok || got.Error() != want.Error() {
		t.Errorf("%v, %v", got, ok)
	}
	if a, b := unsafe.Sizeof(reverseproxy.DialError{}), unsafe.Sizeof(want); a != b {
		t.Errorf("%d bytes, an error has %d", a, b)
	}
}
