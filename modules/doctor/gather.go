package doctor

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/relay/udprelay"
	"github.com/wayhouse-proxy/wayhouse/modules/offload"
)

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
		"net.ipv4.ip_nonlocal_bind", "net.ipv6.ip_nonlocal_bind",
		"net.core.somaxconn", "net.core.rmem_max", "net.core.wmem_max",
		"net.netfilter.nf_conntrack_max", "net.netfilter.nf_conntrack_count",
	} {
		s.sysctl(name, filepath.Join("/proc/sys", strings.ReplaceAll(name, ".", "/")))
	}
	files, _ := filepath.Glob("/proc/sys/net/ipv4/conf/*/rp_filter")
	for _, f := range files {
		s.sysctl("net.ipv4.conf."+filepath.Base(filepath.Dir(f))+".rp_filter", f)
	}
	s.policy()
	s.filter()
	s.NoOffload = offload.Usable()
	s.GSO, s.GRO = udprelay.Offload()
	s.programs()
	return s
}

// programs reads which interfaces have XDP programs.
func (s *State) programs() {
	type attached struct {
		Mode int
		Prog struct{ ID int }
	}
	var links []struct {
		Ifname string
		XDP    struct{ Attached []attached }
	}
	if ask(&links, "ip", "-j", "link", "show") != nil {
		return // who has no ip hears of it from the routes
	}
	modes := map[int]string{1: "xdpdrv", 2: "xdpgeneric", 3: "xdpoffload"}
	for _, l := range links {
		for _, a := range l.XDP.Attached {
			s.XDP = append(s.XDP, XDP{l.Ifname, cmp.Or(modes[a.Mode], "xdp"), a.Prog.ID})
		}
	}
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

// policy reads rules that look at marks, and local routes.
func (s *State) policy() {
	for _, v := range []string{"-4", "-6"} {
		var rules []struct{ Fwmark, Fwmask, Table string }
		if s.NoRoutes = ask(&rules, "ip", "-j", v, "rule", "show"); s.NoRoutes != nil {
			return
		}
		for _, r := range rules {
			if mark, err := strconv.ParseUint(r.Fwmark, 0, 64); err == nil {
				mask, err := strconv.ParseUint(r.Fwmask, 0, 64)
				if err != nil {
					mask = math.MaxUint32
				}
				s.Rules = append(s.Rules, Rule{v == "-6", mark, mask, r.Table})
			}
		}
		var routes []struct{ Type, Dst, Table string }
		if s.NoRoutes = ask(&routes, "ip", "-j", v, "route", "show", "table", "all"); s.NoRoutes != nil {
			return
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

// ask runs a command that answers in JSON.
func ask(v any, name string, args ...string) error {
	out, err := output(name, args...)
	if err != nil || len(out) == 0 { // nothing to tell
		return err
	}
	return json.Unmarshal(out, v)
}

func output(name string, args ...string) ([]byte, error) {
	out, err := exec.Command(name, args...).Output()
	if err != nil {
		return nil, fmt.Errorf("running %s: %w", name, err)
	}
	return out, nil
}
