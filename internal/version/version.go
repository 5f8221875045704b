// Package version knows which build of Wayhouse runs. It is the one place that
// the command line, metrics and traces have it from.
package version

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"
)

// Module is the path of this module, by which it is found in the build info of
// a binary that xcaddy has made around it.
const Module = "github.com/wayhouse-proxy/wayhouse"

// Devel is the version of a build that nobody has given one.
const Devel = "devel"

// What the linker is told by a build that does not leave it to Go to find out,
// as the release is, which is the same wherever it is built:
//
//	-ldflags '-X github.com/wayhouse-proxy/wayhouse/internal/version.release=v1.2.3'
var release, commit string

// Info says what a binary is made of. A part that is not known is empty.
type Info struct {
	Version string // of Wayhouse, or Devel
	Commit  string // the first 12 digits of it
	Caddy   string // version of Caddy
	Layer4  string // version of caddy-l4
}

// Read returns what this binary is made of.
func Read() Info {
	info, _ := debug.ReadBuildInfo()
	return read(info, release, commit)
}

// String is Wayhouse's version and, behind it, what it was built with.
func (i Info) String() string {
	var with []string
	for _, part := range [][2]string{{"commit", i.Commit}, {"Caddy", i.Caddy}, {"caddy-l4", i.Layer4}} {
		if part[1] != "" {
			with = append(with, part[0]+" "+part[1])
		}
	}
	with = append(with, fmt.Sprintf("%s %s/%s", runtime.Version(), runtime.GOOS, runtime.GOARCH))
	return fmt.Sprintf("%s (%s)", i.Version, strings.Join(with, ", "))
}

// read takes what the linker was told before what Go has found out. info may be
// nil.
func read(info *debug.BuildInfo, release, commit string) Info {
	i := Info{Version: release, Commit: commit}
	if info == nil {
		i.Version = cmp.Or(i.Version, Devel)
		return i
	}
	if info.Main.Path == Module {
		i.Version = cmp.Or(i.Version, released(&info.Main))
	}
	for _, dep := range info.Deps {
		switch dep.Path {
		case Module:
			i.Version = cmp.Or(i.Version, released(dep))
		case "github.com/caddyserver/caddy/v2":
			i.Caddy = released(dep)
		case "github.com/mholt/caddy-l4":
			i.Layer4 = released(dep)
		}
	}
	if info.Main.Path == Module && i.Commit == "" { // of no other repository
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				i.Commit = s.Value
			}
		}
	}
	i.Version = cmp.Or(i.Version, Devel)
	i.Commit = i.Commit[:min(len(i.Commit), 12)]
	return i
}

// released is the version that a module has or, when it was replaced, that of
// what stands in for it. A folder has none.
func released(m *debug.Module) string {
	if m.Replace != nil {
		m = m.Replace
	}
	if m.Version == "" || m.Version == "(devel)" {
		return Devel
	}
	return m.Version
}
