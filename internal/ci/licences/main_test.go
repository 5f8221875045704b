package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestClassify(t *testing.T) {
	for text, want := range map[string]string{
		"Apache License\n  Version 2.0, January 2004":                                                                                      "Apache-2.0",
		"Permission is hereby granted, free of charge,\nto any person obtaining a copy":                                                    "MIT",
		"Redistributions in binary form must reproduce the above copyright notice":                                                         "BSD-2-Clause",
		"> Redistributions in binary form must reproduce the above\n> copyright notice. All else is as it was.":                            "BSD-2-Clause",
		"redistributions in binary form must reproduce the above copyright. Neither the name … may be used to endorse or promote products": "BSD-3-Clause",
		"Mozilla Public License Version 2.0. … Secondary License means the GNU General Public License":                                     "MPL-2.0",
		"GNU AFFERO GENERAL PUBLIC LICENSE":                                                                                                "AGPL",
		"GNU General Public License, version":                                                                                              "GPL",
		"All rights reserved.":                                                                                                             "",
	} {
		if got := classify([]byte(text)); got != want {
			t.Errorf("%q is %q, want %q", text, got, want)
		}
	}
}

// TestRelease looks at what a release has in it.
func TestRelease(t *testing.T) {
	t.Chdir("../../..")
	var list bytes.Buffer
	texts := filepath.Join(t.TempDir(), "texts")
	if err := run("nobadger,nomysql,nopgx", texts, []string{"./cmd/wayhouse"}, &list); err != nil {
		t.Error(err)
	}
	if !strings.Contains(list.String(), "github.com/caddyserver/caddy/v2 v2.") || strings.Contains(list.String(), own+" ") {
		t.Errorf("the list is\n%s", &list)
	}
	b, err := os.ReadFile(texts)
	if err != nil || !bytes.Contains(b, []byte("== github.com/mholt/caddy-l4 ")) {
		t.Errorf("the texts are %d bytes: %v", len(b), err)
	}
}

func TestRefused(t *testing.T) {
	for name, tc := range map[string]struct{ file, text, want string }{
		"no licence":      {"README", "MIT", "there is no licence"},
		"an unknown one":  {"LICENSE", "Ask me.", "what LICENSE says is not known"},
		"a second no one": {"LICENSE-OTHER.txt", "Ask me.", "what LICENSE-OTHER.txt says is not known"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, tc.file), []byte(tc.text), 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := read(module{Path: "example.com/m", Dir: dir}); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want %s", err, tc.want)
			}
		})
	}
}
