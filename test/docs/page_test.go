package docs

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// root is the directory of the module.
const root = "../.."

// page is a document in Markdown, cut into what tests look at.
type page struct {
	path   string // from the root of the module
	text   string
	prose  string // without what is in blocks
	blocks []block
}

// block is code: fenced, or indented.
type block struct {
	kind string // behind the fence; "indented" without one
	text string
	line int // of its first line, from 1
}

// pages are all documents of the module.
func pages(t *testing.T) []*page {
	t.Helper()
	var all []*page
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			switch name := d.Name(); {
			case file != root && strings.HasPrefix(name, "."), name == "bin", name == "dist", name == "testdata", name == "node_modules":
				return filepath.SkipDir
			}
			return nil
		}
		if filepath.Ext(file) != ".md" {
			return nil
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		path, err := filepath.Rel(root, file)
		if err != nil {
			return err
		}
		all = append(all, readPage(path, string(text)))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 50 {
		t.Fatalf("only %d documents were found", len(all))
	}
	return all
}

var (
	fenceLine = regexp.MustCompile("^( {0,3})```+([^`]*)$")
	listItem  = regexp.MustCompile(`^ *([*+-]|[0-9]+\.) `)
)

// readPage cuts a document. It knows as much of Markdown as the documents use:
// an indented block stands behind an empty line and is not part of a list.
func readPage(path, text string) *page {
	p := &page{path: path, text: text}
	var prose strings.Builder
	var b *block
	end := func() {
		if b != nil {
			b.text = strings.TrimRight(b.text, "\n") + "\n"
			p.blocks = append(p.blocks, *b)
			b = nil
		}
	}
	blank, inList := true, false
	for i, line := range strings.Split(text, "\n") {
		fence := fenceLine.FindStringSubmatch(line)
		switch {
		case b != nil && b.kind != "indented": // in a fence
			if fence != nil && fence[2] == "" {
				end()
			} else {
				b.text += line + "\n"
			}
			continue
		case fence != nil:
			end()
			b = &block{kind: strings.TrimSpace(fence[2]), line: i + 2}
			if b.kind == "" {
				b.kind = "none"
			}
			continue
		case b != nil && (line == "" || strings.HasPrefix(line, "    ")): // an indented block goes on
			b.text += strings.TrimPrefix(line, "    ") + "\n"
			continue
		case blank && !inList && strings.HasPrefix(line, "    "):
			b = &block{kind: "indented", text: line[4:] + "\n", line: i + 1}
			continue
		}
		end()
		switch {
		case listItem.MatchString(line):
			inList = true
		case line != "" && line[0] != ' ':
			inList = inList && !blank
		}
		blank = line == ""
		prose.WriteString(line + "\n")
	}
	end()
	p.prose = prose.String()
	return p
}

// TestReadPage cuts a small document: whatever it overlooked, no other test
// here would see.
func TestReadPage(t *testing.T) {
	p := readPage("x.md", "# A\n\n    one\n\n    two\n\ntext `a`\n\n* item\n\n      of the item\n\n```sh\nthree\n\nfour\n```\n\n```\nfive\n```\nend\n")
	want := []block{{"indented", "one\n\ntwo\n", 3}, {"sh", "three\n\nfour\n", 14}, {"none", "five\n", 20}}
	if len(p.blocks) != len(want) {
		t.Fatalf("blocks %+v, want %+v", p.blocks, want)
	}
	for i, b := range p.blocks {
		if b != want[i] {
			t.Errorf("block %d is %+v, want %+v", i, b, want[i])
		}
	}
	if strings.Contains(p.prose, "three") || !strings.Contains(p.prose, "of the item") || !strings.Contains(p.prose, "end") {
		t.Errorf("prose %q", p.prose)
	}
}
