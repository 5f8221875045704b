package overload

import (
	"errors"
	"math"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// resident is the memory of the process.
func resident() (int64, error) {
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0, err
	}
	f := strings.Fields(string(b))
	if len(f) < 2 {
		return 0, errors.New("statm has no second field")
	}
	n, err := strconv.ParseInt(f[1], 10, 64)
	return n * int64(os.Getpagesize()), err
}

// Where the kernel says what the process may have.
const (
	groupsFile = "/proc/self/cgroup"
	groupsDir  = "/sys/fs/cgroup"
)

// memoryLimit is what the process may have: the limit of its control group, which
// may change while it runs, or all there is.
func memoryLimit(groupsFile, groupsDir string) int64 {
	limit := int64(math.MaxInt64)
	if groups, err := os.ReadFile(groupsFile); err == nil {
		limit = groupLimit(string(groups), groupsDir)
	}
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		limit = min(limit, int64(info.Totalram)*int64(info.Unit))
	}
	return limit
}

// groupLimit is the smallest limit of the control groups that /proc/self/cgroup
// names and of those around them, below where they are mounted. In a container
// the mount may begin with the process's own group, whatever its name outside.
func groupLimit(groups, mounted string) int64 {
	limit := int64(math.MaxInt64)
	for line := range strings.Lines(groups) {
		_, line, _ = strings.Cut(strings.TrimSpace(line), ":")
		controllers, group, _ := strings.Cut(line, ":")
		dir, file := mounted, "memory.max"
		switch controllers {
		case "":
		case "memory":
			dir, file = filepath.Join(mounted, "memory"), "memory.limit_in_bytes"
		default:
			continue
		}
		for group = path.Join("/", group); ; group = path.Dir(group) {
			if b, err := os.ReadFile(filepath.Join(dir, group, file)); err == nil {
				if n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64); err == nil && n > 0 {
					limit = min(limit, n)
				}
			}
			if group == "/" {
				break
			}
		}
	}
	return limit
}
