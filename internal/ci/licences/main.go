// Command licences looks at the licences of the modules that a command is built
// of, and fails when there is one that a release must not have in it, or that it
// does not know.
//
//	go run ./internal/ci/licences [-tags TAGS] [-o FILE] PACKAGE...
//
// It prints a line for each module: path, version, licence. With -o the full texts
// go into a file as well, for a release has to pass them on. It looks at what the
// module cache has and asks nobody.
package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// allowed are the licences under which a part may be: none of them asks for
// more of a release than its text, and of MPL-2.0 the source, which the module's
// path and version name.
var allowed = []string{"0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "ISC", "MIT", "MPL-2.0", "Unlicense"}

// own is this module's path.
const own = "github.com/wayhouse-proxy/wayhouse"

// module is one that the command is built of.
type module struct {
	Path, Version, Dir string
	Main               bool
	Replace            *module
}

// licensed is a module and what its files say.
type licensed struct {
	module
	licences []string
	text     []byte
}

func main() {
	tags := flag.String("tags", "", "build tags")
	out := flag.String("o", "", "file for the list and the texts")
	flag.Parse()
	if err := run(*tags, *out, flag.Args(), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "licences:", err)
		os.Exit(1)
	}
}

func run(tags, out string, packages []string, list io.Writer) error {
	modules, err := modulesOf(tags, packages)
	if err != nil {
		return err
	}
	var texts bytes.Buffer
	var wrong []error
	for _, m := range modules {
		l, err := read(m)
		if err != nil {
			wrong = append(wrong, err)
			continue
		}
		for _, name := range l.licences {
			if !slices.Contains(allowed, name) {
				wrong = append(wrong, fmt.Errorf("%s: %s is none of %s", m.Path, name, strings.Join(allowed, ", ")))
			}
		}
		fmt.Fprintf(list, "%s %s %s\n", m.Path, m.Version, strings.Join(l.licences, " and "))
		fmt.Fprintf(&texts, "== %s %s\n\n%s\n", m.Path, m.Version, bytes.TrimSpace(l.text))
	}
	if out == "" || len(wrong) > 0 {
		return errors.Join(wrong...)
	}
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		return err
	}
	return os.WriteFile(out, texts.Bytes(), 0o644)
}

// modulesOf are the modules from which the packages take code, and no others.
func modulesOf(tags string, packages []string) ([]module, error) {
	args := append([]string{"list", "-deps", "-json=Module", "-tags", tags, "--"}, packages...)
	cmd := exec.Command("go", args...)
	cmd.Stderr = os.Stderr
	b, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	seen := make(map[string]module)
	for d := json.NewDecoder(bytes.NewReader(b)); ; {
		var p struct{ Module *module }
		if err := d.Decode(&p); err == io.EOF {
			break
		} else if err != nil {
			return nil, fmt.Errorf("go list: %w", err)
		}
		if m := p.Module; m != nil && m.Path != own {
			if m.Replace != nil {
				m.Dir = m.Replace.Dir
			}
			seen[m.Path] = *m
		}
	}
	var all []module
	for _, m := range seen {
		all = append(all, m)
	}
	slices.SortFunc(all, func(a, b module) int { return cmp.Compare(a.Path, b.Path) })
	return all, nil
}

// fileName is how the files are called that a licence is in.
var fileName = regexp.MustCompile(`(?i)^(un)?(licen[cs]e|copying)([-_.].*)?$`)

// read finds what the licence files at the root of a module say.
func read(m module) (*licensed, error) {
	entries, err := os.ReadDir(m.Dir)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", m.Path, err)
	}
	l := &licensed{module: m}
	for _, e := range entries {
		if e.IsDir() || !fileName.MatchString(e.Name()) {
			continue
		}
		b, err := os.ReadFile(filepath.Join(m.Dir, e.Name()))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", m.Path, err)
		}
		name := classify(b)
		if name == "" {
			return nil, fmt.Errorf("%s: what %s says is not known", m.Path, e.Name())
		}
		if !slices.Contains(l.licences, name) {
			l.licences = append(l.licences, name)
		}
		l.text = append(append(l.text, b...), '\n')
	}
	if len(l.licences) == 0 {
		return nil, fmt.Errorf("%s: there is no licence", m.Path)
	}
	return l, nil
}

// phrases are words that a licence has and those above it in the list have not,
// once spaces are one and letters small.
var phrases = []struct{ name, phrase string }{
	{"AGPL", "gnu affero general public license"},
	{"LGPL", "gnu lesser general public license"},
	{"GPL", "gnu general public license"},
	{"Apache-2.0", "apache license version 2.0"},
	{"Apache-2.0", "apache license, version 2.0"},
	{"CC0-1.0", "cc0 1.0 universal"},
	{"Unlicense", "this is free and unencumbered software released into the public domain"},
	{"BSD-3-Clause", "may be used to endorse or promote products"},
	{"BSD-2-Clause", "redistributions in binary form must reproduce the above copyright"},
	{"0BSD", "permission to use, copy, modify, and/or distribute this software for any purpose with or without fee is hereby granted. the software"},
	{"ISC", "permission to use, copy, modify, and distribute this software for any purpose with or without fee is hereby granted, provided that"},
	{"ISC", "permission to use, copy, modify, and/or distribute this software for any purpose with or without fee is hereby granted, provided that"},
	{"MIT", "permission is hereby granted, free of charge, to any person obtaining a copy"},
}

// classify is the SPDX name of a licence's text, or empty. The Mozilla licence
// names the GNU ones, so it is looked for by its title.
func classify(text []byte) string {
	text = bytes.ReplaceAll(text, []byte(">"), nil) // some are quoted
	words := strings.Join(strings.Fields(strings.ToLower(string(text))), " ")
	if head := words[:min(len(words), 200)]; strings.Contains(head, "mozilla public license") {
		return "MPL-2.0"
	}
	for _, p := range phrases {
		if strings.Contains(words, p.phrase) {
			return p.name
		}
	}
	return ""
}
