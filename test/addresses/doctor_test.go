package addresses

import (
	"encoding/json"
	"os/exec"
	"strings"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

type finding struct{ Check, Level, Text, Fix string }

// doctor runs wayhouse doctor in the proxy's namespace.
func (w *world) doctor(t *testing.T, p *kit.Process, wrap ...string) (found []finding, code int) {
	t.Helper()
	argv := append([]string{"netns", "exec", w.proxy.Name}, wrap...)
	cmd := exec.Command("ip", append(argv, kit.Binary(t, ""), "doctor", "--config", p.Config, "--json")...)
	cmd.Env = append(cmd.Environ(), "HOME="+p.Dir)
	out, _ := cmd.Output()
	if err := json.Unmarshal(out, &found); err != nil {
		t.Fatalf("doctor answers %q: %v", out, err)
	}
	return found, cmd.ProcessState.ExitCode()
}

// TestDoctor breaks a sound set-up in six ways and mends it again.
func TestDoctor(t *testing.T) {
	_, err := exec.LookPath("setpriv")
	kit.Require(t, err, "setpriv command (package util-linux)")
	w := newWorld(t)
	w.redirect(t)
	w.proxy.Run(t, "ip", "route", "add", "local", "203.0.113.0/24", "dev", "lo")
	for _, file := range []string{"all", "lo"} {
		w.proxy.Run(t, "sysctl", "-qw", "net.ipv4.conf."+file+".rp_filter=0")
	}
	w.proxy.Run(t, "sh", "-c", "for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 > $f; done")
	seen := kit.With(kit.ToPool("four", "tcp/0.0.0.0:7777", "udp/0.0.0.0:7777"), kit.M{"transparent": true})
	wide := kit.With(kit.ToPool("four", "udp/0.0.0.0:7778"), kit.M{"prefix": "203.0.113.0/24"})
	p := kit.Prepare(t, kit.App(kit.M{"seen": seen, "wide": wide}, w.pools()), kit.Options{Netns: w.proxy})
	wrong := func(t *testing.T, wrap ...string) (checks []string, code int) {
		found, code := w.doctor(t, p, wrap...)
		for _, f := range found {
			if f.Level == "wrong" {
				checks = append(checks, f.Check+": "+f.Text)
			}
		}
		return checks, code
	}
	if checks, code := wrong(t); len(checks) > 0 || code != 0 {
		t.Fatalf("on a sound host it ends with %d and finds %v", code, checks)
	}
	for name, tc := range map[string]struct {
		broken, mended []string
		wrap           []string
		want           string
	}{
		"no policy rule":      {strings.Fields("ip rule del fwmark 1 lookup 100"), strings.Fields("ip rule add fwmark 1 lookup 100"), nil, "policy route: no rule looks up"},
		"no local route":      {strings.Fields("ip route del local 0.0.0.0/0 dev lo table 100"), strings.Fields("ip route add local 0.0.0.0/0 dev lo table 100"), nil, "policy route: table 100"},
		"prefix not local":    {strings.Fields("ip route del local 203.0.113.0/24 dev lo"), strings.Fields("ip route add local 203.0.113.0/24 dev lo"), nil, "prefix: the host does not take"},
		"strict reverse path": {strings.Fields("sysctl -qw net.ipv4.conf.all.rp_filter=1"), strings.Fields("sysctl -qw net.ipv4.conf.all.rp_filter=0"), nil, "return path: net.ipv4.conf.all.rp_filter"},
		"no capability":       {[]string{"true"}, []string{"true"}, []string{"setpriv", "--bounding-set", "-net_raw,-net_admin"}, "capabilities: transparent listeners"},
	} {
		t.Run(name, func(t *testing.T) {
			w.proxy.Run(t, tc.broken...)
			checks, code := wrong(t, tc.wrap...)
			if code != 1 || len(checks) != 1 || !strings.HasPrefix(checks[0], tc.want) {
				t.Errorf("it ends with %d and finds %v, want %s", code, checks, tc.want)
			}
			w.proxy.Run(t, tc.mended...)
		})
	}
	w.proxy.Run(t, "nft", "flush", "ruleset")
	if checks, code := wrong(t); code != 1 || len(checks) != 2 ||
		!strings.HasPrefix(checks[0], "redirection: no rule redirects") || !strings.HasPrefix(checks[1], "return path: no rule marks") {
		t.Errorf("without rules it ends with %d and finds %v", code, checks)
	}
}
