package wayhouse_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"
)

// replies are structs that JSON is made from and never read into: what the
// admin endpoint answers, which is no config.
var replies = map[string]bool{"modules/sniff/wasm.Info": true}

// TestConfigFieldsHaveComments holds the manual that Caddy's docs are made
// from. In every package that registers a module, a field that JSON reaches has
// a comment, and one that is a duration or a number says its default.
func TestConfigFieldsHaveComments(t *testing.T) {
	fset := token.NewFileSet()
	fields := 0
	for dir, files := range modulePackages(t, fset) {
		for _, f := range files {
			ast.Inspect(f, func(n ast.Node) bool {
				spec, ok := n.(*ast.TypeSpec)
				if !ok {
					return true
				}
				st, ok := spec.Type.(*ast.StructType)
				if !ok || !spec.Name.IsExported() || replies[dir+"."+spec.Name.Name] {
					return true
				}
				for _, field := range st.Fields.List {
					if !inJSON(field) {
						continue
					}
					fields++
					if miss := missing(field); miss != "" {
						t.Errorf("%s: %s.%s.%s %s", fset.Position(field.Pos()), dir, spec.Name, field.Names[0], miss)
					}
				}
				return true
			})
		}
	}
	if fields < 100 {
		t.Errorf("saw %d fields, so few that the search is broken", fields)
	}
}

// missing is what the comment of a field lacks, "" for nothing.
func missing(field *ast.Field) string {
	text := field.Doc.Text()
	if strings.TrimSpace(text) == "" {
		return "has no comment"
	}
	if !numeric(field.Type) {
		return ""
	}
	for _, says := range []string{"Default: ", "Required.", "Needed."} {
		if strings.Contains(text, says) {
			return ""
		}
	}
	return `names no default: end the comment with "Default: …" or "Required."`
}

// numeric reports whether a field of this type holds a duration or a number.
func numeric(x ast.Expr) bool {
	switch x := x.(type) {
	case *ast.StarExpr:
		return numeric(x.X)
	case *ast.SelectorExpr:
		return x.Sel.Name == "Duration"
	case *ast.Ident:
		switch x.Name {
		case "int", "int8", "int16", "int32", "int64", "uint", "uint8", "uint16", "uint32", "uint64", "float32", "float64":
			return true
		}
	}
	return false
}

// inJSON reports whether JSON reaches an exported field by a name of its own.
func inJSON(field *ast.Field) bool {
	if field.Tag == nil || len(field.Names) == 0 || !field.Names[0].IsExported() {
		return false
	}
	tag, err := strconv.Unquote(field.Tag.Value)
	if err != nil {
		return false
	}
	name, ok := reflect.StructTag(tag).Lookup("json")
	return ok && name != "-"
}

// modulePackages are the parsed files of the packages that register a module,
// by directory, without tests.
func modulePackages(t *testing.T, fset *token.FileSet) map[string][]*ast.File {
	t.Helper()
	all, registers := map[string][]*ast.File{}, map[string]bool{}
	for _, root := range []string{"modules", "handlers", "matchers"} {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
				return err
			}
			f, err := parser.ParseFile(fset, path, nil, parser.ParseComments)
			if err != nil {
				return err
			}
			dir := filepath.ToSlash(filepath.Dir(path))
			all[dir] = append(all[dir], f)
			ast.Inspect(f, func(n ast.Node) bool {
				if s, ok := n.(*ast.SelectorExpr); ok && s.Sel.Name == "RegisterModule" {
					registers[dir] = true
				}
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for dir := range all {
		if !registers[dir] {
			delete(all, dir)
		}
	}
	return all
}
