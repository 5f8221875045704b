package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestManifest reads the real xcaddy.json, whose versions and paths have to be
// those of this repository.
func TestManifest(t *testing.T) {
	t.Chdir("../../..")
	m, err := readManifest("xcaddy.json")
	if err != nil {
		t.Fatal(err)
	}
	gomod, err := os.ReadFile("go.mod")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(string(gomod), "module "+m.Module+"\n") {
		t.Errorf("%s is not the module of go.mod", m.Module)
	}
	if want := "github.com/caddyserver/caddy/v2 " + m.Caddy + "\n"; !strings.Contains(string(gomod), want) {
		t.Errorf("go.mod has another Caddy than %s", m.Caddy)
	}
	for name, p := range m.Optional {
		for _, file := range []string{filepath.Join(p.Path, "go.mod"), p.Try} {
			if p.Path == "" || file == "" {
				continue
			}
			if _, err := os.Stat(file); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

func TestChoose(t *testing.T) {
	m := &manifest{Optional: map[string]part{"random_two": {Module: "a"}, "other": {Module: "b"}}}
	for with, want := range map[string]string{
		"":                 "b a",
		"-":                "",
		"random_two":       "a",
		"random_two,other": "a b",
		"random_tow":       `-with: no part is named "random_tow" in xcaddy.json; did you mean random_two?`,
	} {
		parts, err := m.choose(with)
		var got []string
		for _, p := range parts {
			got = append(got, p.Module)
		}
		if err != nil {
			got = []string{err.Error()}
		}
		if s := strings.Join(got, " "); s != want {
			t.Errorf("choose(%q) = %q, want %q", with, s, want)
		}
	}
}

func TestWith(t *testing.T) {
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for want, p := range map[string]part{
		"example.com/a":                {Module: "example.com/a"},
		"example.com/a@v1.2.3":         {Module: "example.com/a", Version: "v1.2.3"},
		"example.com/a@v0.0.0=" + here: {Module: "example.com/a", Version: "v0.0.0", Path: "."},
	} {
		if got := p.with(); got != want {
			t.Errorf("with() = %q, want %q", got, want)
		}
	}
}

// An example runs beside another one when its ports are free ones.
func TestFreePorts(t *testing.T) {
	got, err := freePorts("../../../examples/third-party/Caddyfile")
	if err != nil {
		t.Fatal(err)
	}
	for _, port := range []string{":7777", ":17001", ":17002"} {
		if strings.Contains(got, port) {
			t.Errorf("%s is left in\n%s", port, got)
		}
	}
}
