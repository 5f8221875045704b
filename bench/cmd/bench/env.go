package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/bench/proxies"
)

// Environment is what the figures depend on besides the proxies.
type Environment struct {
	Kernel   string            `json:"kernel"`
	CPU      string            `json:"cpu"`
	CPUs     int               `json:"cpus"`
	Go       string            `json:"go"`
	MaxFiles uint64            `json:"max_files"`
	Commit   string            `json:"commit"`
	Sysctls  map[string]string `json:"sysctls"`
	Versions map[string]string `json:"versions"`
	Missing  []string          `json:"missing,omitempty"` // proxies that could not be had, and why
}

var sysctls = []string{
	"net.core.somaxconn", "net.core.rmem_max", "net.core.rmem_default", "net.ipv4.tcp_congestion_control",
	"net.ipv4.ip_local_port_range", "net.ipv4.tcp_tw_reuse", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem",
}

func environment(ctx context.Context) Environment {
	e := Environment{CPUs: runtime.NumCPU(), Go: runtime.Version(), Sysctls: map[string]string{}, Versions: map[string]string{}}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		e.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &lim) == nil {
		e.MaxFiles = lim.Max
	}
	b, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
			e.CPU = strings.TrimSpace(v)
			break
		}
	}
	for _, name := range sysctls {
		b, err := os.ReadFile("/proc/sys/" + strings.ReplaceAll(name, ".", "/"))
		if err == nil {
			e.Sysctls[name] = strings.Join(strings.Fields(string(b)), " ")
		}
	}
	out, _ := exec.CommandContext(ctx, "git", "describe", "--always", "--dirty", "--abbrev=12").Output()
	e.Commit = strings.TrimSpace(string(out))
	return e
}

// build builds a package of this module into dir.
func build(ctx context.Context, dir, name, pkg string) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMOD: %w", err)
	}
	bin := filepath.Join(dir, name)
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", bin, pkg)
	cmd.Dir = filepath.Dir(strings.TrimSpace(string(out)))
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building %s: %w: %s", pkg, err, out)
	}
	return bin, nil
}

// find finds or builds a proxy's binary; given, where not empty, is used as it is.
func find(ctx context.Context, dir string, p *proxies.Proxy, given string) (string, error) {
	switch {
	case given != "":
		return filepath.Abs(given)
	case p.Built:
		return build(ctx, dir, p.Name, p.Program)
	}
	bin, err := exec.LookPath(p.Program)
	if errors.Is(err, exec.ErrNotFound) {
		for _, dir := range []string{"/usr/sbin", "/usr/local/sbin"} { // not in every user's path
			if bin, err := exec.LookPath(filepath.Join(dir, p.Program)); err == nil {
				return bin, nil
			}
		}
		return "", fmt.Errorf("%w (bench/setup.sh installs it)", err)
	}
	return bin, err
}

// freePorts finds n ports that are free for TCP and UDP on every address. They
// are below the ephemeral ones, so that no connection takes one before it is
// bound.
func freePorts(n int) ([]uint16, error) {
	var ports []uint16
	taken := map[uint16]bool{}
	for range 200 {
		if len(ports) == n {
			return ports, nil
		}
		port := uint16(20_000 + rand.IntN(12_000))
		if taken[port] {
			continue
		}
		taken[port] = true
		addr := net.JoinHostPort("0.0.0.0", strconv.Itoa(int(port)))
		l, err := net.Listen("tcp4", addr)
		if err != nil {
			continue
		}
		c, err := net.ListenPacket("udp4", addr)
		l.Close()
		if err != nil {
			continue
		}
		c.Close()
		ports = append(ports, port)
	}
	return nil, errors.New("no free ports between 20000 and 32000")
}
