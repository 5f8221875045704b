package doctor

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/relay/udprelay"
)

func cmpString(a, b string) int { return cmp.Compare(a, b) }

// Gather looks at this host, and at this process for what it may do.
func Gather() *State {
	s := &State{Sysctls: make(map[string]string)}
	if b, err := os.ReadFile("/proc/self/status"); err == nil {
		for line := range strings.Lines(string(b)) {
			if hex, ok := strings.CutPrefix(line, "CapEff:"); ok {
				s.Caps, _ = strconv.ParseUint(strings.TrimSpace(hex), 16, 64)
			}
		}
	}
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &lim) == nil {
		s.Files = lim.Max // Go raises what a process may have to that
	}
	for _, name := range []string{
		"net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start",
		"net.core.somaxconn", "net.core.rmem_max", "net.core.wmem_max",
	} {
		s.sysctl(name, filepath.Join("/proc/sys", strings.ReplaceAll(name, ".", "/")))
	}
	files, _ := filepath.Glob("/proc/sys/net/ipv4/conf/*/rp_filter")
	for _, f := range files {
		s.sysctl("net.ipv4.conf."+filepath.Base(filepath.Dir(f))+".rp_filter", f)
	}
	s.policy()
	s.nft()
	s.GSO, s.GRO = udprelay.Offload()
	return s
}

func (s *State) sysctl(name, file string) {
	if b, err := os.ReadFile(file); err == nil {
		s.Sysctls[name] = strings.TrimSpace(string(b))
	}
}

// isReversePath reports whether a sysctl is about interfaces that matter.
// default is for those that are still to come.
func isReversePath(name string) bool {
	return strings.HasSuffix(name, ".rp_filter") && !strings.HasSuffix(name, ".default.rp_filter")
}

// policy reads rules that look at marks, and local routes. A host without the
// command ip is as one without either.
func (s *State) policy() {
	for _, v := range []string{"-4", "-6"} {
		var rules []struct{ Fwmark, Table string }
		if ask(&rules, "ip", "-j", v, "rule", "show") != nil {
			continue
		}
		for _, r := range rules {
			if mark, err := strconv.ParseUint(r.Fwmark, 0, 64); err == nil {
				s.Rules = append(s.Rules, Rule{v == "-6", mark, r.Table})
			}
		}
		var routes []struct{ Type, Dst, Table string }
		if ask(&routes, "ip", "-j", v, "route", "show", "table", "all") != nil {
			continue
		}
		for _, r := range routes {
			if r.Type == "local" {
				if to, err := parseRoute(r.Dst, v == "-6"); err == nil {
					s.Routes = append(s.Routes, Route{cmp.Or(r.Table, "main"), to})
				}
			}
		}
	}
}

func parseRoute(dst string, v6 bool) (netip.Prefix, error) {
	switch {
	case dst == "default" && v6:
		return netip.MustParsePrefix("::/0"), nil
	case dst == "default":
		return netip.MustParsePrefix("0.0.0.0/0"), nil
	case strings.Contains(dst, "/"):
		return netip.ParsePrefix(dst)
	}
	a, err := netip.ParseAddr(dst)
	return netip.PrefixFrom(a, a.BitLen()), err
}

// nft reads the rules that redirect.
func (s *State) nft() {
	var set struct {
		Nftables []struct {
			Rule struct{ Expr []map[string]json.RawMessage }
		}
	}
	if s.NoNft = ask(&set, "nft", "-j", "list", "ruleset"); s.NoNft != nil {
		return
	}
	for _, item := range set.Nftables {
		s.rule(item.Rule.Expr)
	}
}

// rule reads one rule of nft's JSON.
func (s *State) rule(expr []map[string]json.RawMessage) {
	var redirect *Tproxy
	var mark uint64
	transparent := false
	for _, e := range expr {
		if raw, ok := e["tproxy"]; ok {
			redirect = new(Tproxy)
			json.Unmarshal(raw, redirect) // family and port have these names there
		}
		if raw, ok := e["mangle"]; ok {
			var m struct {
				Key   struct{ Meta struct{ Key string } }
				Value json.Number
			}
			if json.Unmarshal(raw, &m) == nil && m.Key.Meta.Key == "mark" {
				mark, _ = strconv.ParseUint(m.Value.String(), 10, 64)
			}
		}
		if raw, ok := e["match"]; ok {
			var m struct {
				Left struct{ Socket struct{ Key string } }
			}
			transparent = transparent || json.Unmarshal(raw, &m) == nil && m.Left.Socket.Key == "transparent"
		}
	}
	if redirect != nil {
		redirect.Mark = mark
		s.Tproxy = append(s.Tproxy, *redirect)
	}
	s.Marked = s.Marked || transparent && mark != 0
}

// ask runs a command that answers in JSON.
func ask(v any, name string, args ...string) error {
	out, err := exec.Command(name, args...).Output()
	if err != nil {
		return fmt.Errorf("running %s: %w", name, err)
	}
	if len(out) == 0 { // nothing to tell
		return nil
	}
	return json.Unmarshal(out, v)
}
