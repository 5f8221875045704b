// Package yamlconfig is the config adapter wayhouse: it turns a YAML document
// of the schema that docs/yaml.md describes into Caddy's JSON. A document is
// read to its end, so that every mistake is told at once, each with its place
// in the file.
package yamlconfig

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	"go.yaml.in/yaml/v3"
)

func init() { caddyconfig.RegisterAdapter("wayhouse", Adapter{}) }

// Adapter turns YAML into JSON. It opens no file and asks no other host; the
// environment is read for ${NAME}.
type Adapter struct{}

// The bounds of a document.
const (
	maxDocument = 1 << 20
	maxDepth    = 32
	maxMarks    = 200000 // line ends, commas, brackets and colons: a bound of how many nodes there are
	maxAliased  = 10000  // values that aliases add to those that are written
	maxProblems = 20     // that are told
	maxKept     = 100    // that are found before reading ends
)

// Adapt implements caddyconfig.Adapter. The option filename, a string, is named
// in errors.
func (Adapter) Adapt(body []byte, options map[string]any) ([]byte, []caddyconfig.Warning, error) {
	file, _ := options["filename"].(string)
	if file == "" {
		file = "wayhouse.yaml"
	}
	return adapt(body, file, os.LookupEnv)
}

func adapt(body []byte, file string, env func(string) (string, bool)) ([]byte, []caddyconfig.Warning, error) {
	root, err := parse(body, file)
	if err != nil {
		return nil, nil, err
	}
	r := &reader{file: file, env: env, schema: 1, most: nodes(root) + maxAliased, used: make(map[string]string)}
	d := &document{reader: r}
	out := d.read(value{r: r, n: root})
	if err := r.err(); err != nil {
		return nil, nil, err
	}
	b, err := json.Marshal(out)
	return b, r.warnings, err
}

// parse reads one document and refuses one that would cost too much to read.
func parse(body []byte, file string) (*yaml.Node, error) {
	if len(body) > maxDocument {
		return nil, fmt.Errorf("%s: %d bytes are more than %d, the most a document may have: put long lists of networks in files, which the filter acl of the Caddyfile and JSON forms reads", file, len(body), maxDocument)
	}
	if i := bytes.IndexByte(body, 0); i >= 0 {
		return nil, fmt.Errorf("%s:%d: a NUL byte, which no YAML has", file, 1+bytes.Count(body[:i], []byte("\n")))
	}
	if !utf8.Valid(body) {
		return nil, fmt.Errorf("%s: not UTF-8", file)
	}
	if marks(body) > maxMarks {
		return nil, fmt.Errorf("%s: more than %d line ends, commas, brackets and colons: too much for one document", file, maxMarks)
	}
	dec := yaml.NewDecoder(bytes.NewReader(body))
	var doc yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil, fmt.Errorf("%s: the document is empty", file)
	case err != nil:
		return nil, syntaxError(file, err)
	}
	var second yaml.Node
	switch err := dec.Decode(&second); {
	case err == nil:
		return nil, fmt.Errorf("%s:%d: a second document begins: one file has one", file, second.Line)
	case !errors.Is(err, io.EOF):
		return nil, syntaxError(file, err)
	}
	if n := tooDeep(&doc, maxDepth); n != nil {
		return nil, fmt.Errorf("%s:%d:%d: more than %d levels deep", file, n.Line, n.Column, maxDepth)
	}
	return doc.Content[0], nil
}

// marks counts what stands at the ends of nodes.
func marks(body []byte) (n int) {
	for _, c := range body {
		switch c {
		case '\n', '\r', ',', '[', '{', ':', '?':
			n++
		}
	}
	return n
}

// nodes is how many nodes are written below n, with n.
func nodes(n *yaml.Node) int {
	sum := 1
	for _, c := range n.Content {
		sum += nodes(c)
	}
	return sum
}

// tooDeep is a node below more than left others.
func tooDeep(n *yaml.Node, left int) *yaml.Node {
	if left < 0 {
		return n
	}
	for _, c := range n.Content {
		if deep := tooDeep(c, left-1); deep != nil {
			return deep
		}
	}
	return nil
}

var yamlLine = regexp.MustCompile(`^yaml: (?:line (\d+): )?`)

// syntaxError puts the place in front, as in other errors.
func syntaxError(file string, err error) error {
	text := err.Error()
	m := yamlLine.FindStringSubmatch(text)
	if m == nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	rest := strings.TrimPrefix(text, m[0])
	if line, err := strconv.Atoi(m[1]); err == nil {
		return fmt.Errorf("%s:%d: not YAML: %s", file, line, rest)
	}
	return fmt.Errorf("%s: not YAML: %s", file, rest)
}

// Interface guards
var _ caddyconfig.Adapter = Adapter{}
