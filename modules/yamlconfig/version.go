package yamlconfig

import (
	"fmt"
	"regexp"

	"go.yaml.in/yaml/v3"
)

// newestSchema is the schema that this build reads.
const newestSchema = 3

// since has the fields that came after the first schema. Whoever adds one to the
// schema raises newestSchema and tells it here.
var since = map[string]int64{
	"listeners.plugin_routes": 2,
	"web":                     3,
}

var index = regexp.MustCompile(`\[\d+\]`)

// checkSince refuses a field that the declared schema does not have, so that
// nobody takes it up while older builds are to read the document.
func (v value) checkSince() {
	if !v.given() || v.r.schema == newestSchema {
		return
	}
	if need := since[index.ReplaceAllString(v.where(), "")]; need > v.r.schema {
		v.fail("is a field of schema %d, and the document declares %d: write schema_version: %d at the top, once everything that reads the document knows it", need, v.r.schema, need)
	}
}

// version reads schema_version. When it is not ok, the rest of the document is
// not looked at: it may mean something else.
func (v value) version() (n int64, ok bool) {
	const right = "it is a whole number, 1 or higher"
	if !v.given() {
		return 1, true
	}
	if v.n.Kind != yaml.ScalarNode || v.n.Tag != "!!int" {
		v.fail("%s is no schema version: %s", what(v.n), right)
		return 0, false
	}
	if _, err := fmt.Sscanf(v.n.Value, "%d", &n); err != nil {
		v.fail("%.60q is no schema version: %s", v.n.Value, right)
		return 0, false
	}
	switch {
	case n < 1:
		v.fail("%d is no schema version: %s", n, right)
	case n > newestSchema:
		v.fail("config schema_version %d is newer than this build supports (max %d)", n, newestSchema)
	}
	return n, n >= 1 && n <= newestSchema
}
