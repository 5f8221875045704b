package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode"
)

var (
	linkPattern = regexp.MustCompile(`!?\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)\s]*)\)`)
	heading     = regexp.MustCompile(`(?m)^#{1,6} +(.*?) *#*$`)
	codeSpan    = regexp.MustCompile("`[^`\n]+`")
)

// links are the targets of a page's links.
func (p *page) links() []string {
	var to []string
	for _, m := range linkPattern.FindAllStringSubmatch(codeSpan.ReplaceAllString(p.prose, "x"), -1) {
		to = append(to, m[2])
	}
	return to
}

// anchors are the names that the headings of a page have, as GitHub makes them.
func (p *page) anchors() map[string]bool {
	names := make(map[string]bool)
	for _, m := range heading.FindAllStringSubmatch(p.prose, -1) {
		name := anchor(m[1])
		for n := 1; names[name]; n++ {
			name = fmt.Sprintf("%s-%d", anchor(m[1]), n)
		}
		names[name] = true
	}
	return names
}

func anchor(title string) string {
	title = linkPattern.ReplaceAllString(title, "$1")
	return strings.Map(func(r rune) rune {
		switch {
		case unicode.IsLetter(r), unicode.IsDigit(r), r == '-', r == '_':
			return unicode.ToLower(r)
		case r == ' ':
			return '-'
		}
		return -1
	}, title)
}

// TestLinks follows every link to a file of this repository, and to a heading.
func TestLinks(t *testing.T) {
	byPath := make(map[string]*page)
	for _, p := range pages(t) {
		byPath[p.path] = p
	}
	followed := 0
	for _, p := range byPath {
		for _, to := range p.links() {
			if strings.Contains(to, "://") {
				continue
			}
			followed++
			for _, wrong := range brokenLink(byPath, p, to) {
				t.Errorf("%s links to %s: %s", p.path, to, wrong)
			}
		}
	}
	if followed < 200 {
		t.Errorf("only %d links were found", followed)
	}
}

func brokenLink(byPath map[string]*page, from *page, to string) (wrong []string) {
	file, name, _ := strings.Cut(to, "#")
	path := from.path
	if file != "" {
		path = filepath.Join(filepath.Dir(from.path), file)
	}
	info, err := os.Stat(filepath.Join(root, path))
	if err != nil {
		return []string{"there is no such file"}
	}
	if info.IsDir() {
		path = filepath.Join(path, "README.md")
	}
	if name == "" {
		return nil
	}
	switch p := byPath[path]; {
	case p == nil:
		wrong = append(wrong, "no page has such a name")
	case !p.anchors()[name]:
		wrong = append(wrong, "the page has no such heading")
	}
	return wrong
}

func TestBrokenLink(t *testing.T) {
	from := readPage("docs/README.md", "# A page: `of` two_things\n\n## Same\n\n## Same\n")
	byPath := map[string]*page{from.path: from}
	for to, broken := range map[string]bool{
		"#a-page-of-two_things": false, "#same": false, "#same-1": false, "#same-2": true, "#other": true,
		"README.md": false, "README.md#same": false, "nowhere.md": true, "../README.md": false, "handlers": false, "filters": false, "../Makefile#build": true,
	} {
		if got := brokenLink(byPath, from, to); (len(got) > 0) != broken {
			t.Errorf("%s: %v", to, got)
		}
	}
}

// TestEveryPageIsReached begins at docs/README.md and follows links: a page
// that is not reached is one that nobody reads.
func TestEveryPageIsReached(t *testing.T) {
	byPath := make(map[string]*page)
	for _, p := range pages(t) {
		byPath[p.path] = p
	}
	start := filepath.Join("docs", "README.md")
	reached := map[string]bool{start: true}
	for queue := []string{start}; len(queue) > 0; queue = queue[1:] {
		p := byPath[queue[0]]
		for _, to := range p.links() {
			file, _, _ := strings.Cut(to, "#")
			path := filepath.Join(filepath.Dir(p.path), file)
			if byPath[path] == nil {
				path = filepath.Join(path, "README.md")
			}
			if byPath[path] != nil && !reached[path] {
				reached[path] = true
				queue = append(queue, path)
			}
		}
	}
	for path := range byPath {
		if strings.HasPrefix(path, "docs"+string(filepath.Separator)) && !reached[path] {
			t.Errorf("no link leads from %s to %s", start, path)
		}
	}
}
