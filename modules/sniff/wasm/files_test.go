package wasm

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

func hashOf(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

func pins(files map[string][]byte) map[string]*Pin {
	list := make(map[string]*Pin)
	for name, b := range files {
		list[name] = &Pin{SHA256: strings.ToUpper(hashOf(b))}
	}
	return list
}

// withCustom is a module with one more custom section: another file that does
// the same.
func withCustom(b []byte, text string) []byte {
	return slices.Concat(b, []byte{0, byte(2 + len(text)), 1, 'x'}, []byte(text))
}

func TestScan(t *testing.T) {
	good, bad := guest(t, "key-only"), guest(t, "abi-missing")
	other := withCustom(good, "other")
	for name, tc := range map[string]struct {
		files map[string][]byte
		pins  map[string]*Pin
		setup func(dir string) error
		want  string // the loaded ones, those of kept versions with a !
		err   string
	}{
		"empty":           {},
		"two":             {files: map[string][]byte{"a.wasm": good, "B-_9.wasm": good}, want: "B-_9 a"},
		"others":          {files: map[string][]byte{"a.wasm": good, "a.wat": bad, ".b.wasm": good, ".wasm": good, "c.wasm.bak": good}, want: "a"},
		"a bad one":       {files: map[string][]byte{"a.wasm": good, "b.wasm": bad}, want: "a"},
		"an empty one":    {files: map[string][]byte{"a.wasm": {}}},
		"a truncated one": {files: map[string][]byte{"a.wasm": good[:len(good)-20], "b.wasm": good}, want: "b"},
		"8 MiB + 1":       {files: map[string][]byte{"a.wasm": make([]byte, MaxSize+1)}},
		"a bad name":      {files: map[string][]byte{"a b.wasm": good, "ü.wasm": good, "a.b.wasm": good}},
		"a directory":     {setup: func(dir string) error { return os.Mkdir(filepath.Join(dir, "a.wasm"), 0o755) }},
		"a FIFO":          {setup: func(dir string) error { return syscall.Mkfifo(filepath.Join(dir, "a.wasm"), 0o644) }},
		"a dangling link": {setup: func(dir string) error { return os.Symlink("nowhere", filepath.Join(dir, "a.wasm")) }},
		"a link to a device": {
			setup: func(dir string) error { return os.Symlink("/dev/zero", filepath.Join(dir, "a.wasm")) }},
		"a link": {
			files: map[string][]byte{"real": good},
			setup: func(dir string) error { return os.Symlink("real", filepath.Join(dir, "a.wasm")) }, want: "a"},

		"kept":           {files: map[string][]byte{"a.wasm": bad, ".a.wasm.prev": good}, want: "a!"},
		"kept and good":  {files: map[string][]byte{"a.wasm": good, ".a.wasm.prev": other}, want: "a"},
		"kept and bad":   {files: map[string][]byte{"a.wasm": bad, ".a.wasm.prev": bad}},
		"kept and alone": {files: map[string][]byte{".a.wasm.prev": good}},

		"pinned":               {files: map[string][]byte{"a.wasm": good}, pins: pins(map[string][]byte{"a": good, "missing": good}), want: "a"},
		"pinned, unlisted":     {files: map[string][]byte{"a.wasm": good, "b.wasm": good}, pins: pins(map[string][]byte{"a": good}), err: "module b: pinned: "},
		"pinned, another hash": {files: map[string][]byte{"a.wasm": other}, pins: pins(map[string][]byte{"a": good}), err: "module a: pinned: sha256 of a is " + hashOf(other)},
		"pinned, bad":          {files: map[string][]byte{"a.wasm": bad}, pins: pins(map[string][]byte{"a": bad}), err: "module a: abi_missing: "},
		"pinned, a directory": {pins: pins(map[string][]byte{"a": good}),
			setup: func(dir string) error { return os.Mkdir(filepath.Join(dir, "a.wasm"), 0o755) }, err: "module a: "},
		"pinned, a dangling link": {pins: pins(map[string][]byte{"a": good}),
			setup: func(dir string) error { return os.Symlink("nowhere", filepath.Join(dir, "a.wasm")) }, err: "module a: "},
		"pinned, a bad name":           {files: map[string][]byte{"a b.wasm": good}, pins: pins(map[string][]byte{"a": good}), err: `module a b: `},
		"pinned, kept":                 {files: map[string][]byte{"a.wasm": bad, ".a.wasm.prev": good}, pins: pins(map[string][]byte{"a": good}), want: "a!"},
		"pinned, kept of another hash": {files: map[string][]byte{"a.wasm": bad, ".a.wasm.prev": other}, pins: pins(map[string][]byte{"a": good}), err: "module a: "},
	} {
		t.Run(name, func(t *testing.T) {
			h := &Host{Dir: fill(t, tc.files), CallTimeout: new(slow), Modules: tc.pins}
			if tc.setup != nil {
				if err := tc.setup(h.Dir); err != nil {
					t.Fatal(err)
				}
			}
			err := provision(t, h)
			if tc.err == "" && err != nil || tc.err != "" && (err == nil || !strings.Contains(err.Error(), tc.err)) {
				t.Fatalf("%v, want %q", err, tc.err)
			}
			if err != nil {
				return
			}
			var got []string
			for _, name := range slices.Sorted(maps.Keys(h.loaded)) {
				if l := h.loaded[name]; l.fallback {
					name += "!"
				}
				got = append(got, name)
			}
			if s := strings.Join(got, " "); s != tc.want {
				t.Errorf("loaded %q, want %q", s, tc.want)
			}
		})
	}
}

func TestMissingDirectory(t *testing.T) {
	h := &Host{Dir: filepath.Join(t.TempDir(), "none")}
	if err := provision(t, h); err != nil {
		t.Fatal(err)
	}
	if list, err := h.List(); err != nil || len(list) != 0 {
		t.Errorf("List = %v, %v", list, err)
	}
	if err := h.Put("a", guest(t, "key-only")); err != nil {
		t.Fatal(err)
	}
	if list, err := h.List(); err != nil || len(list) != 1 || list[0].Loaded {
		t.Errorf("List = %v, %v, want one that is not loaded", list, err)
	}
}

// Configs share what they compile; a config that is refused leaves nothing.
func TestReloadsLeakNothing(t *testing.T) {
	outer, err := takeEngine()
	if err != nil {
		t.Fatal(err)
	}
	defer outer.give()
	count := func() (modules, refs, live int) {
		outer.loading.Lock()
		defer outer.loading.Unlock()
		for _, m := range outer.modules {
			refs += m.refs
		}
		return len(outer.modules), refs, len(outer.live)
	}
	a, b := guest(t, "key-only"), guest(t, "ok-host")
	dir := fill(t, map[string][]byte{"a.wasm": a, "b.wasm": b, "c.wasm": withCustom(a, "same code"), "d.wasm": guest(t, "trap-start")})
	load := func(pins map[string]*Pin) (*Host, error) {
		ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
		defer cancel()
		h := &Host{Dir: dir, CallTimeout: new(slow), Modules: pins}
		return h, h.Provision(ctx)
	}
	var old *Host
	for range 30 {
		h, err := load(nil)
		if err != nil {
			t.Fatal(err)
		}
		refused, err := load(pins(map[string][]byte{"a": a, "b": b}))
		if err == nil {
			t.Fatal("c is not pinned")
		}
		if err := refused.Cleanup(); err != nil {
			t.Fatal(err)
		}
		if old != nil {
			if err := old.Cleanup(); err != nil {
				t.Fatal(err)
			}
		}
		old = h
		if modules, refs, live := count(); modules != 2 || refs != 3 || live != 3 {
			t.Fatalf("%d modules, %d references, %d sniffers, want 2, 3, 3", modules, refs, live)
		}
		for _, name := range []string{"a", "c"} {
			if got := sniffBytes(h.loaded[name].sniffer, "x"); got != "ok" {
				t.Fatalf("%s: %s", name, got)
			}
		}
	}
	last := old.loaded["a"].sniffer
	next, err := load(nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := old.Cleanup(); err != nil {
		t.Fatal(err)
	}
	if got := sniffBytes(last, "x"); got != "ok" {
		t.Errorf("a sniffer of a config that is gone, when another has the name: %s, want ok", got)
	}
	if err := next.Cleanup(); err != nil {
		t.Fatal(err)
	}
	if modules, _, live := count(); modules != 0 || live != 0 {
		t.Errorf("%d modules, %d sniffers are left", modules, live)
	}
	if got := sniffBytes(last, "x"); got != "busy" {
		t.Errorf("a sniffer of a config that is gone: %s, want busy", got)
	}
}

// A flow of the old config may be in a call while it is cleaned up.
func TestCleanupWaitsForCalls(t *testing.T) {
	h := &Host{Dir: fill(t, map[string][]byte{"a.wasm": guest(t, "ok-host")}), CallTimeout: new(slow)}
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	defer cancel()
	if err := h.Provision(ctx); err != nil {
		t.Fatal(err)
	}
	s := h.loaded["a"].sniffer
	begun, done := make(chan bool), make(chan string)
	go func() {
		for first := true; ; first = false {
			got := sniffBytes(s, "HOST:x")
			if first {
				close(begun)
			}
			if got != "ok" {
				done <- got
				return
			}
		}
	}()
	<-begun
	if err := h.Cleanup(); err != nil {
		t.Error(err)
	}
	if got := <-done; got != "busy" {
		t.Errorf("the last call: %s, want busy", got)
	}
}

func TestSniffers(t *testing.T) {
	h := hostOf(t, slow, map[string][]byte{"b.wasm": guest(t, "key-only"), "a.wasm": guest(t, "key-only")})
	var got []string
	err := h.Sniffers(func(name, place string, s sniff.Sniffer) error {
		got = append(got, name+" "+strings.TrimPrefix(place, h.Dir))
		return nil
	})
	if err != nil || !slices.Equal(got, []string{"a /a.wasm", "b /b.wasm"}) {
		t.Errorf("%v, %v", got, err)
	}
	if err := h.Sniffers(func(string, string, sniff.Sniffer) error { return errShut }); !errors.Is(err, errShut) {
		t.Errorf("%v, want the error of add", err)
	}
}

var errShut = errors.New("shut")

func TestConfigStrings(t *testing.T) {
	b := guest(t, "ok-config")
	list := pins(map[string][]byte{"blue": b, "none": b})
	list["blue"].Config = new("blue")
	h := &Host{Dir: fill(t, map[string][]byte{"blue.wasm": b, "none.wasm": b}), CallTimeout: new(slow), Modules: list}
	if err := provision(t, h); err != nil {
		t.Fatal(err)
	}
	var hint sniff.Hint
	in := sniff.Input{Bytes: []byte("x")}
	if v := h.loaded["blue"].Sniff(&in, &hint); v != sniff.Recognised || string(hint.Key) != "blue" {
		t.Errorf("%v, key %s, want blue", v, hint.Key)
	}
	if got := sniffBytes(h.loaded["none"].sniffer, "x"); got != "unrecognised" {
		t.Errorf("without a configuration: %s", got)
	}
}

// code is the status of an error.
func code(err error) int {
	var e *Error
	if err == nil {
		return 200
	}
	if errors.As(err, &e) {
		return e.Status
	}
	return 500
}

func TestManage(t *testing.T) {
	one, two, bad := guest(t, "key-only"), guest(t, "ok-host"), guest(t, "abi-0-2")
	h := hostOf(t, slow, nil)
	state := func() string {
		b, _ := os.ReadFile(h.file("a"))
		kept, _ := os.ReadFile(h.kept("a"))
		name := func(b []byte) string {
			for name, of := range map[string][]byte{"one": one, "two": two, "bad": bad, "none": nil} {
				if bytes.Equal(b, of) {
					return name
				}
			}
			return "mixed"
		}
		return name(b) + " " + name(kept)
	}
	for i, step := range []struct {
		do   func() error
		code int
		want string
	}{
		{func() error { return h.Rollback("a") }, 404, "none none"},
		{func() error { return h.Delete("a") }, 404, "none none"},
		{func() error { return h.Put("a", nil) }, 400, "none none"},
		{func() error { return h.Put("a", bad) }, 400, "none none"},
		{func() error { return h.Put("a", make([]byte, MaxSize+1)) }, 413, "none none"},
		{func() error { return h.Put("a", one) }, 200, "one none"},
		{func() error { return h.Rollback("a") }, 404, "one none"},
		{func() error { return h.Put("a", one) }, 200, "one none"},
		{func() error { return h.Put("a", bad) }, 400, "one none"},
		{func() error { return h.Put("a", two) }, 200, "two one"},
		{func() error { return h.Rollback("a") }, 200, "one two"},
		{func() error { return h.Rollback("a") }, 200, "two one"},
		{func() error { return os.WriteFile(h.kept("a"), bad, 0o644) }, 200, "two bad"},
		{func() error { return h.Rollback("a") }, 400, "two bad"},
		{func() error { return h.Put("a", one) }, 200, "one two"},
		{func() error { return os.WriteFile(h.file("a"), bad, 0o644) }, 200, "bad two"},
		{func() error { return h.Put("a", one) }, 200, "one two"}, // bad is not kept
		{func() error { return os.Remove(h.file("a")) }, 200, "none two"},
		{func() error { return h.Rollback("a") }, 200, "two none"},
		{func() error { return h.Put("a", one) }, 200, "one two"},
		{func() error { return h.Delete("a") }, 200, "none none"},
	} {
		err := step.do()
		if got := code(err); got != step.code {
			t.Errorf("step %d: status %d (%v), want %d", i, got, err, step.code)
		}
		if got := state(); got != step.want {
			t.Errorf("step %d: NAME.wasm and the kept version are %s, want %s", i, got, step.want)
		}
	}
	if rest, _ := filepath.Glob(filepath.Join(h.Dir, ".*")); len(rest) > 0 {
		t.Errorf("left behind: %v", rest)
	}
}

// What cannot be loaded is put back: the module, the version kept of it, and
// that there was none.
func TestChange(t *testing.T) {
	one, two := guest(t, "key-only"), guest(t, "ok-host")
	h := hostOf(t, slow, nil)
	has := func(b []byte) string { return map[bool]string{true: "one", false: "two"}[bytes.Equal(b, one)] }
	state := func() string {
		s := "none"
		if b, err := os.ReadFile(h.file("a")); err == nil {
			s = has(b)
		}
		if b, err := os.ReadFile(h.kept("a")); err == nil {
			s += " " + has(b)
		}
		return s
	}
	put := func(b []byte) func() error { return func() error { return h.Put("a", b) } }
	rollback, remove := func() error { return h.Rollback("a") }, func() error { return h.Delete("a") }
	for i, step := range []struct {
		do           func() error
		during, want string
	}{
		{put(one), "one", "none"},
		{put(one), "one", "one"},
		{put(two), "two one", "one"},
		{remove, "none", "one"},
		{put(two), "two one", "two one"},
		{rollback, "one two", "two one"},
		{put(one), "one two", "two one"},
		{remove, "none", "two one"},
		{rollback, "one two", "one two"},
		{remove, "none", "none"},
	} {
		err := h.Change("a", step.do, func() error {
			if got := state(); got != step.during {
				t.Errorf("step %d: during the load %s, want %s", i, got, step.during)
			}
			if step.during != step.want {
				return errShut
			}
			return nil
		})
		if got := state(); got != step.want || errors.Is(err, errShut) != (step.during != step.want) || err != nil && !errors.Is(err, errShut) {
			t.Errorf("step %d: %s, %v; want %s", i, got, err, step.want)
		}
	}
	// A change that fails half-way is none.
	err := h.Change("a", func() error {
		if err := h.Put("a", one); err != nil {
			return err
		}
		return errShut
	}, func() error { t.Error("loaded after a failure"); return nil })
	if !errors.Is(err, errShut) || state() != "none" {
		t.Errorf("%v leaves %s", err, state())
	}
	if err := h.Change("../a", nil, nil); code(err) != 400 {
		t.Errorf("a bad name: %v", err)
	}
	if rest, _ := filepath.Glob(filepath.Join(h.Dir, ".*")); len(rest) > 0 {
		t.Errorf("left behind: %v", rest)
	}
}

// Names reach nothing outside the directory.
func TestManageNames(t *testing.T) {
	b := guest(t, "key-only")
	h := hostOf(t, slow, nil)
	outside := filepath.Join(filepath.Dir(h.Dir), "x.wasm")
	if err := os.WriteFile(outside, b, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"", ".", "..", "../x", "a/../../x", "/x", "a\x00", "a.b", "a\\b", "ä", "a\n", " "} {
		for what, err := range map[string]error{"Put": h.Put(name, b), "Delete": h.Delete(name), "Rollback": h.Rollback(name)} {
			if code(err) != 400 {
				t.Errorf("%s(%q) = %v, want status 400", what, name, err)
			}
		}
	}
	if entries, err := os.ReadDir(h.Dir); err != nil || len(entries) != 0 {
		t.Errorf("%v, %v", entries, err)
	}
	if got, err := os.ReadFile(outside); err != nil || !bytes.Equal(got, b) {
		t.Errorf("the file outside has changed: %v", err)
	}
}

func TestManagePinned(t *testing.T) {
	one, two := guest(t, "key-only"), guest(t, "ok-host")
	h := &Host{Dir: fill(t, nil), CallTimeout: new(slow), Modules: pins(map[string][]byte{"a": one})}
	if err := provision(t, h); err != nil {
		t.Fatal(err)
	}
	check := func(what string, err error) {
		t.Helper()
		if code(err) != 409 || !strings.HasPrefix(err.Error(), "pinned:") {
			t.Errorf("%s: %v, want status 409 and pinned:", what, err)
		}
	}
	check("another name", h.Put("b", one))
	check("another hash", h.Put("a", two))
	if err := h.Put("a", one); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(h.kept("a"), two, 0o644); err != nil {
		t.Fatal(err)
	}
	check("another hash kept", h.Rollback("a"))
}

func TestList(t *testing.T) {
	good, bad := guest(t, "key-only"), guest(t, "abi-0-2")
	h := hostOf(t, slow, map[string][]byte{"a.wasm": good, "b.wasm": bad, ".b.wasm.prev": good, "c.wasm": bad, "d.wasm": good, ".a.wasm.prev": good})
	if err := os.WriteFile(h.file("d"), guest(t, "ok-host"), 0o644); err != nil {
		t.Fatal(err)
	}
	list, err := h.List()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, i := range list {
		got = append(got, fmt.Sprintf("%s %s %d %v %v %v", i.Name, i.SHA256[:4], i.SizeBytes, i.Loaded, i.HasPrevious, i.Fallback))
	}
	want := []string{
		fmt.Sprintf("a %s %d true true false", hashOf(good)[:4], len(good)),
		fmt.Sprintf("b %s %d true true true", hashOf(bad)[:4], len(bad)),
		fmt.Sprintf("c %s %d false false false", hashOf(bad)[:4], len(bad)),
		fmt.Sprintf("d %s %d false false false", hashOf(guest(t, "ok-host"))[:4], len(guest(t, "ok-host"))),
	}
	if !slices.Equal(got, want) {
		t.Errorf("List:\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
