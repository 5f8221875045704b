package overload

import (
	"math"
	"os"
	"path/filepath"
	"strconv"
	"testing"
)

func TestGroupLimit(t *testing.T) {
	for name, tc := range map[string]struct {
		groups string
		files  map[string]string
		want   int64
	}{
		"of the group":            {"0::/system.slice/wayhouse.service\n", map[string]string{"system.slice/wayhouse.service/memory.max": "1000\n"}, 1000},
		"of the one around it":    {"0::/a/b\n", map[string]string{"a/b/memory.max": "max\n", "a/memory.max": "2000\n"}, 2000},
		"the smaller one":         {"0::/a/b\n", map[string]string{"a/b/memory.max": "3000\n", "a/memory.max": "2000\n"}, 2000},
		"mounted at the group":    {"0::/outside/name\n", map[string]string{"memory.max": "4000\n"}, 4000},
		"a namespace of its own":  {"0::/\n", map[string]string{"memory.max": "4000\n"}, 4000},
		"version 1":               {"5:cpu:/x\n4:memory:/x\n0::/\n", map[string]string{"memory/x/memory.limit_in_bytes": "5000\n", "cpu/x/memory.limit_in_bytes": "1\n"}, 5000},
		"none":                    {"0::/a\n", map[string]string{"a/memory.max": "max\n"}, math.MaxInt64},
		"above where it may look": {"0::/../../etc\n", map[string]string{"etc/memory.max": "6000\n"}, 6000},
		"nothing to be made of":   {"\nx\n0:\n", nil, math.MaxInt64},
	} {
		t.Run(name, func(t *testing.T) {
			root := filepath.Join(t.TempDir(), "cgroup")
			for path, content := range tc.files {
				path = filepath.Join(root, path)
				if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if got := groupLimit(tc.groups, root); got != tc.want {
				t.Errorf("groupLimit(%q) = %d, want %d", tc.groups, got, tc.want)
			}
		})
	}
}

// TestLimitChanges gives a control group more memory, as can be done while a
// process runs.
func TestLimitChanges(t *testing.T) {
	dir := t.TempDir()
	groups := filepath.Join(dir, "cgroup")
	write := func(path, content string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(groups, "0::/\n")
	for _, limit := range []string{"1000000", "2000000"} {
		write(filepath.Join(dir, "memory.max"), limit+"\n")
		if got := strconv.FormatInt(memoryLimit(groups, dir), 10); got != limit {
			t.Errorf("%s bytes, want %s", got, limit)
		}
	}
}
