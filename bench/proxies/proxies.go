// Package proxies knows the proxies that a benchmark compares: how each is
// configured, started and asked for its version. The configurations, in
// config/, give all the same work: one worker, a TCP and a UDP listener, no
// access log, no health checks.
package proxies

import (
	"bytes"
	"debug/buildinfo"
	"embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"text/template"
)

//go:embed config
var configs embed.FS

// Params fill in a proxy's configuration.
type Params struct {
	Dir         string   // for its files
	TCP, UDP    string   // where it listens
	TCPBackends []string // several addresses, for more ports
	UDPBackend  string

	NginxModules string // set by Prepare
	Match        string // set by Prepare: matchers of the TCP route, or none
}

// Proxy is one of the proxies compared.
type Proxy struct {
	Name    string
	Program string // the binary; for those the harness builds, the package
	Built   bool   // by the harness, from this module

	config  string
	match   string // matchers of the TCP route, as in its configuration
	argv    func(bin, config, dir string) []string
	version func(bin string) (string, error)

	UDP bool
}

// All are the proxies, peers first, variants of ours last.
var All = []*Proxy{
	{
		Name: "nginx", Program: "nginx", config: "nginx.conf", UDP: true,
		argv: func(bin, config, dir string) []string {
			return []string{bin, "-p", dir, "-e", filepath.Join(dir, "error.log"), "-c", config}
		},
		version: firstLine("-v"),
	},
	{
		Name: "haproxy", Program: "haproxy", config: "haproxy.cfg",
		argv:    func(bin, config, _ string) []string { return []string{bin, "-db", "-f", config} },
		version: firstLine("-v"),
	},
	{
		Name: "caddyl4", Program: "./bench/cmd/caddyl4", Built: true, config: "caddyl4.json", UDP: true,
		argv: caddyRun, version: modules,
	},
	{
		Name: "wayhouse", Program: "./cmd/wayhouse", Built: true, config: "wayhouse.json", UDP: true,
		argv: caddyRun, version: modules,
	},
	{
		// What it costs to look at a connection's first bytes: against wayhouse.
		Name: "wayhouse-look", Program: "./cmd/wayhouse", Built: true, config: "wayhouse.json", UDP: true,
		match: `{"first_bytes": {"length": {"min": 1}}}`,
		argv:  caddyRun, version: modules,
	},
	{
		// The same with one of caddy-l4's matchers.
		Name: "wayhouse-regexp", Program: "./cmd/wayhouse", Built: true, config: "wayhouse.json", UDP: true,
		match: `{"regexp": {"pattern": "", "count": 1}}`,
		argv:  caddyRun, version: modules,
	},
}

// ByName finds a proxy.
func ByName(name string) *Proxy {
	for _, p := range All {
		if p.Name == name {
			return p
		}
	}
	return nil
}

func caddyRun(bin, config, _ string) []string { return []string{bin, "run", "--config", config} }

// Version asks the proxy's binary what it is.
func (p *Proxy) Version(bin string) (string, error) { return p.version(bin) }

// Prepare writes the proxy's configuration and returns what to run.
func (p *Proxy) Prepare(bin string, params Params) (argv []string, err error) {
	params.NginxModules = nginxModules()
	params.Match = p.match
	b, err := p.render(params)
	if err != nil {
		return nil, err
	}
	config := filepath.Join(params.Dir, p.config)
	if err := os.WriteFile(config, b, 0o600); err != nil {
		return nil, err
	}
	return p.argv(bin, config, params.Dir), nil
}

func (p *Proxy) render(params Params) ([]byte, error) {
	t, err := template.New(p.config).Option("missingkey=error").ParseFS(configs, "config/"+p.config)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	err = t.Execute(&b, params)
	return b.Bytes(), err
}

// nginxModules is where the distribution keeps nginx's loadable modules.
func nginxModules() string {
	for _, dir := range []string{"/usr/lib/nginx/modules", "/usr/lib64/nginx/modules"} {
		if _, err := os.Stat(filepath.Join(dir, "ngx_stream_module.so")); err == nil {
			return dir
		}
	}
	return "/usr/lib/nginx/modules"
}

func firstLine(arg string) func(string) (string, error) {
	return func(bin string) (string, error) {
		out, err := exec.Command(bin, arg).CombinedOutput()
		line, _, _ := strings.Cut(string(out), "\n")
		if err != nil {
			return "", fmt.Errorf("%s %s: %w", bin, arg, err)
		}
		return strings.TrimSpace(line), nil
	}
}

// modules reads the versions that matter from a Go binary.
func modules(bin string) (string, error) {
	info, err := buildinfo.ReadFile(bin)
	if err != nil {
		return "", err
	}
	v := []string{info.GoVersion}
	for _, m := range info.Deps {
		if m.Path == "github.com/caddyserver/caddy/v2" || m.Path == "github.com/mholt/caddy-l4" {
			v = append(v, filepath.Base(strings.TrimSuffix(m.Path, "/v2"))+" "+m.Version)
		}
	}
	return strings.Join(v, ", "), nil
}
