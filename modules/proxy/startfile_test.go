package proxy

import (
	"errors"
	"strings"
	"testing"

	_ "github.com/caddyserver/caddy/v2/modules/standard"
)

func TestStartFile(t *testing.T) {
	for args, want := range map[string]struct{ file, adapter string }{
		"wayhouse run --config c.json":                      {"c.json", ""},
		"wayhouse run --config=dir/c.yaml --adapter=yaml":   {"dir/c.yaml", "yaml"},
		"wayhouse run -c /etc/x -a caddyfile -w":            {"/etc/x", "caddyfile"},
		"wayhouse run --environ --envfile e --config x -e":  {"x", ""},
		"wayhouse run --pingback 127.0.0.1:9 --config last": {"last", ""},
		"wayhouse run": {"", ""}, // the Caddyfile of the directory
	} {
		file, adapter, err := StartFile(strings.Fields(args))
		if file != want.file || adapter != want.adapter || err != nil {
			t.Errorf("%s: %q, %q, %v; want %q, %q", args, file, adapter, err, want.file, want.adapter)
		}
	}
	for _, args := range []string{
		"wayhouse", "", "wayhouse run --config -", "wayhouse run --resume --config x", "wayhouse quick udp/:1 127.0.0.1:2", "wayhouse.test -test.v",
	} {
		if file, _, err := StartFile(strings.Fields(args)); !errors.Is(err, errNoFile) {
			t.Errorf("%s: %q, %v; want %v", args, file, err, errNoFile)
		}
	}
	if _, _, err := StartFile([]string{"wayhouse", "run", "--confg", "x"}); err == nil || !strings.Contains(err.Error(), "--confg") {
		t.Errorf("an unknown flag: %v", err)
	}
}
