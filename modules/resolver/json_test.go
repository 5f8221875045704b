package resolver

import (
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
)

func TestDecodeAnswer(t *testing.T) {
	for in, want := range map[string]string{
		`{"pool": "a"}`: "a",
		`{"pool": "a", "target": null, "ttl_sec": null}`: "a",
		`{"target": "10.1.0.5:7777", "pool": "a"}`:       "10.1.0.5:7777",
		`{"target": "[2001:db8::1]:7"}`:                  "[2001:db8::1]:7",
		`{"target": "[::ffff:10.1.0.5]:7"}`:              "10.1.0.5:7",
		`{"target": ""}`:                                 "empty",
		`{}`:                                             "empty",
		`{"unknown": {"x": [1]}}`:                        "empty",
		``:                                               "error",
		`null`:                                           "error",
		`[]`:                                             "error",
		`{"pool": "a"} x`:                                "error",
		`{"pool": 1}`:                                    "error",
		`{"target": "10.1.0.5"}`:                         "error",
		`{"target": "name:7"}`:                           "error",
		`{"target": "10.1.0.5:70000"}`:                   "error",
		`{"pool": "a", "ttl_sec": -1}`:                   "error",
		`{"pool": "a", "ttl_sec": 1.5}`:                  "error",
		`{"pool": "a", "ttl_sec": 4294967296}`:           "error",
	} {
		a, err := decodeAnswer([]byte(in))
		got := a.Pool
		switch {
		case err != nil:
			got = "error"
		case a.Empty():
			got = "empty"
		case a.Target.IsValid():
			got = a.Target.String()
		}
		if got != want {
			t.Errorf("%s: %s, %v; want %s", in, got, err, want)
		}
	}
	if a, _ := decodeAnswer([]byte(`{"pool": "a", "ttl_sec": 0}`)); !a.HasTTL || a.TTL != 0 {
		t.Errorf("ttl_sec 0: %+v", a)
	}
}

// FuzzAnswer takes anything for an answer: what is left of it names at most one
// place, within bounds.
func FuzzAnswer(f *testing.F) {
	for _, s := range []string{`{"pool": "a", "ttl_sec": 30}`, `{"target": "[2001:db8::1]:7"}`, `{"pool": null}`, `null`, `{"target": "0.0.0.0:1"}`, `{"ttl_sec": 4294967295}`} {
		f.Add([]byte(s))
	}
	s := &Settings{AllowTargets: []string{"10.0.0.0/8"}}
	if err := s.Provision(caddy.Context{}); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := decodeAnswer(b)
		if err != nil {
			if !a.Empty() {
				t.Errorf("%+v beside %v", a, err)
			}
			return
		}
		if a.Pool != "" && a.Target.IsValid() {
			t.Errorf("two places: %+v", a)
		}
		if a.TTL < 0 || a.TTL > (1<<32)*time.Second {
			t.Errorf("ttl %v", a.TTL)
		}
		if a.Target.IsValid() && s.checkTarget(a.Target) == nil && (!a.Target.Addr().Is4() || a.Target.Addr().As4()[0] != 10 || a.Target.Port() == 0) {
			t.Errorf("%v is allowed", a.Target)
		}
	})
}

func TestCheckTarget(t *testing.T) {
	for _, tc := range []struct {
		allow  []string
		target string
		want   bool
	}{
		{nil, "127.0.0.1:80", true},
		{nil, "[2001:db8::1]:80", true},
		{nil, "0.0.0.0:80", false},
		{nil, "[::]:80", false},
		{nil, "224.0.0.1:80", false},
		{nil, "255.255.255.255:80", false},
		{nil, "[fe80::1%lo]:80", false},
		{nil, "10.0.0.1:0", false},
		{[]string{"10.1.0.0/16", "2001:db8::7"}, "10.1.2.3:80", true},
		{[]string{"10.1.0.0/16", "2001:db8::7"}, "[2001:db8::7]:80", true},
		{[]string{"10.1.0.0/16", "2001:db8::7"}, "[2001:db8::8]:80", false},
		{[]string{"10.1.0.0/16", "2001:db8::7"}, "127.0.0.1:2019", false},
		{[]string{"::ffff:10.1.0.5"}, "10.1.0.5:80", true},
	} {
		s := &Settings{AllowTargets: tc.allow}
		if err := s.Provision(caddy.Context{}); err != nil {
			t.Fatal(err)
		}
		a, err := makeAnswer("", tc.target, nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := s.checkTarget(a.Target) == nil; got != tc.want {
			t.Errorf("%s of %v: %v", tc.target, tc.allow, got)
		}
	}
}
