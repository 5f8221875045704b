package proxy

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

func TestHashOf(t *testing.T) {
	const one = "e9ed102c1420" // what sha256sum says of the first, without a newline
	for name, tc := range map[string]struct {
		config string
		same   bool
	}{
		"as it is":        {`{"a":["<&>",1],"b":{"c":1.50,"d":null}}`, true},
		"other order":     {`{"b":{"d":null,"c":1.50},"a":["<&>",1]}`, true},
		"with spaces":     {"{ \"a\": [\"<&>\", 1],\n\"b\": {\"c\": 1.50, \"d\": null} }\n", true},
		"other value":     {`{"a":["<&>",2],"b":{"c":1.50,"d":null}}`, false},
		"other list":      {`{"a":[1,"<&>"],"b":{"c":1.50,"d":null}}`, false},
		"key that is new": {`{"a":["<&>",1],"b":{"c":1.50,"d":null},"e":0}`, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := hashOf([]byte(tc.config)); (got == one) != tc.same || len(got) != hashDigits {
				t.Errorf("hash of %s is %s; the first is %s", tc.config, got, one)
			}
		})
	}
	if got := hashOf([]byte(`{`)); got != "" {
		t.Errorf("hash of what is no JSON is %q", got)
	}
}

func TestReason(t *testing.T) {
	for _, tc := range []struct {
		cause error
		why   string
		ok    bool
	}{
		{fmt.Errorf("configuration error: %w", errNoFile), errNoFile.Error(), true},
		{fmt.Errorf("configuration start error: %w", errNoFile), errNoFile.Error(), true},
		{errors.New("stopping apps"), "", false},
		{context.Canceled, "", false},
	} {
		if why, ok := reason(tc.cause); why != tc.why || ok != tc.ok {
			t.Errorf("reason(%v) = %q, %v, want %q, %v", tc.cause, why, ok, tc.why, tc.ok)
		}
	}
}

// TestRefusedWithoutEndpoint has nobody but the app hear of what is refused.
func TestRefusedWithoutEndpoint(t *testing.T) {
	load := func(app string) error {
		return caddy.Load(fmt.Appendf(nil, `{"admin": {"disabled": true}, "apps": {"wayhouse": %s}}`, app), true)
	}
	if err := load(`{}`); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := caddy.Stop(); err != nil {
			t.Error(err)
		}
	})
	running := Applied()
	count := func(result string) float64 {
		LastRefusal() // settles
		return testutil.ToFloat64(reloads.WithLabelValues(result))
	}
	oks, errs := count("ok"), count("error")
	for _, bad := range []string{`{"wrokers": 1}`, `{"workers": -1}`} {
		if err := load(bad); err == nil {
			t.Fatalf("%s: taken", bad)
		}
		errs++
		last := LastRefusal()
		if last == nil || !strings.Contains(last.Error, bad[2:9]) || last.Hash != hashOf([]byte(bad)) || last.Source != "other" {
			t.Errorf("%s: last refusal %+v", bad, last)
		}
		if ok, n := count("ok"), count("error"); ok != oks || n != errs {
			t.Errorf("%s: counted %v and %v refused, want %v and %v", bad, ok, n, oks, errs)
		}
		if now := Applied(); now != running {
			t.Errorf("%s: what runs was %v and is %v", bad, running, now)
		}
	}
	if err := load(`{"workers": 0}`); err != nil {
		t.Fatal(err)
	}
	if ok, n := count("ok"), count("error"); ok != oks+1 || n != errs {
		t.Errorf("counted %v and %v refused, want %v and %v", ok, n, oks+1, errs)
	}
	if LastRefusal().Superseded.IsZero() || Applied().Hash == running.Hash {
		t.Errorf("a config was taken; last refusal %+v, running %v", LastRefusal(), Applied())
	}
}

// TestLookedAt provisions a config without making it run.
func TestLookedAt(t *testing.T) {
	before := configs.refusedBy("other")
	err := caddy.Validate(&caddy.Config{AppsRaw: caddy.ModuleMap{"wayhouse": []byte(`{"workers": -1}`)}})
	if after := configs.refusedBy("other"); err == nil || after != before {
		t.Errorf("a config that was only looked at: %v; refused before %d, after %d", err, before, after)
	}
}
