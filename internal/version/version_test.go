package version

import (
	"runtime/debug"
	"strings"
	"testing"
)

func TestRead(t *testing.T) {
	const sha = "0123456789abcdef0123456789abcdef01234567"
	caddy := &debug.Module{Path: "github.com/caddyserver/caddy/v2", Version: "v2.11.9"}
	layer4 := &debug.Module{Path: "github.com/mholt/caddy-l4", Version: "v0.1.2"}
	revision := []debug.BuildSetting{{Key: "vcs", Value: "git"}, {Key: "vcs.revision", Value: sha}}
	for name, tc := range map[string]struct {
		info            *debug.BuildInfo
		release, commit string
		want            Info
	}{
		"nothing is known": {want: Info{Version: Devel}},
		"go build": {
			info: &debug.BuildInfo{Main: debug.Module{Path: Module, Version: "v1.2.4-0.20261130000000-0123456789ab"}, Deps: []*debug.Module{caddy, layer4}, Settings: revision},
			want: Info{"v1.2.4-0.20261130000000-0123456789ab", sha[:12], "v2.11.9", "v0.1.2"},
		},
		"go build without a repository": {
			info: &debug.BuildInfo{Main: debug.Module{Path: Module, Version: "(devel)"}, Deps: []*debug.Module{caddy}},
			want: Info{Version: Devel, Caddy: "v2.11.9"},
		},
		"a release": {
			info:    &debug.BuildInfo{Main: debug.Module{Path: Module, Version: "(devel)"}, Deps: []*debug.Module{caddy}},
			release: "v1.2.3", commit: sha,
			want: Info{Version: "v1.2.3", Commit: sha[:12], Caddy: "v2.11.9"},
		},
		"xcaddy": {
			info: &debug.BuildInfo{Main: debug.Module{Path: "caddy", Version: "(devel)"}, Deps: []*debug.Module{{Path: Module, Version: "v1.2.3"}, caddy}, Settings: revision},
			want: Info{Version: "v1.2.3", Caddy: "v2.11.9"},
		},
		"xcaddy with a folder": {
			info: &debug.BuildInfo{Deps: []*debug.Module{{Path: Module, Version: "v0.0.0", Replace: &debug.Module{Path: "/src"}}}},
			want: Info{Version: Devel},
		},
		"a fork of Caddy": {
			info: &debug.BuildInfo{Deps: []*debug.Module{{Path: caddy.Path, Version: "v2.11.9", Replace: &debug.Module{Path: "example.com/fork", Version: "v2.11.10"}}}},
			want: Info{Version: Devel, Caddy: "v2.11.10"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if got := read(tc.info, tc.release, tc.commit); got != tc.want {
				t.Errorf("%+v, want %+v", got, tc.want)
			}
		})
	}
}

func TestString(t *testing.T) {
	for want, i := range map[string]Info{
		"v1.2.3 (commit 0123456789ab, Caddy v2.11.9, caddy-l4 v0.1.2, go1.": {"v1.2.3", "0123456789ab", "v2.11.9", "v0.1.2"},
		"devel (go1.": {Version: Devel},
	} {
		if got := i.String(); !strings.HasPrefix(got, want) {
			t.Errorf("%s, want %s…", got, want)
		}
	}
}
