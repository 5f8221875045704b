// Command xcaddy builds a Wayhouse with more modules from xcaddy.json, and
// tries it: the modules have to be in it, and the Caddyfiles that use them
// have to run.
//
//	go run ./internal/ci/xcaddy [-o FILE] [-with PART,PART] [-try=false]
//
// A part is taken from the folder that xcaddy.json names for it, or, without
// one, from its module's host.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/suggest"
)

// manifest is xcaddy.json.
type manifest struct {
	XCaddy   string          `json:"xcaddy"` // version of the tool
	Caddy    string          `json:"caddy"`
	Optional map[string]part `json:"optional"`
	part                     // Wayhouse itself
}

// part is a Go module that the build takes in.
type part struct {
	Module   string   `json:"module"`
	Version  string   `json:"version,omitempty"`
	Path     string   `json:"path,omitempty"`     // folder to take it from
	Provides []string `json:"provides,omitempty"` // module IDs that must be in the binary
	Try      string   `json:"try,omitempty"`      // Caddyfile that must run
}

func (p part) with() string {
	s := p.Module
	if p.Version != "" {
		s += "@" + p.Version
	}
	if p.Path != "" {
		// xcaddy builds in a folder of its own, so that a path has to be whole.
		if abs, err := filepath.Abs(p.Path); err == nil {
			s += "=" + abs
		}
	}
	return s
}

func main() {
	out := flag.String("o", "bin/wayhouse-custom", "file to write")
	with := flag.String("with", "", "optional parts, separated by commas; all of them when empty, - for none")
	try := flag.Bool("try", true, "run the binary with the Caddyfiles of the parts")
	flag.Parse()
	if err := run(*out, *with, *try); err != nil {
		fmt.Fprintln(os.Stderr, "xcaddy:", err)
		os.Exit(1)
	}
}

func run(out, with string, try bool) error {
	m, err := readManifest("xcaddy.json")
	if err != nil {
		return err
	}
	parts, err := m.choose(with)
	if err != nil {
		return err
	}
	args := []string{"run", "github.com/caddyserver/xcaddy/cmd/xcaddy@" + m.XCaddy, "build", m.Caddy, "--output", out, "--with", m.with()}
	for _, p := range parts {
		args = append(args, "--with", p.with())
	}
	cmd := exec.Command("go", args...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("building: %w", err)
	}
	bin, err := filepath.Abs(out)
	if err != nil {
		return err
	}
	list, err := exec.Command(bin, "list-modules").Output()
	if err != nil {
		return fmt.Errorf("listing modules: %w", err)
	}
	for _, p := range parts {
		for _, id := range p.Provides {
			if !slices.Contains(strings.Fields(string(list)), id) {
				return fmt.Errorf("%s has no module %s", out, id)
			}
			fmt.Println("has", id)
		}
		if p.Try != "" && try {
			if err := runs(bin, p.Try); err != nil {
				return fmt.Errorf("running %s: %w", p.Try, err)
			}
			fmt.Println("runs", p.Try)
		}
	}
	return nil
}

func readManifest(file string) (*manifest, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	m := new(manifest)
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(m); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return m, nil
}

// choose finds the optional parts that are asked for.
func (m *manifest) choose(with string) ([]part, error) {
	names := slices.Sorted(maps.Keys(m.Optional))
	switch with {
	case "":
	case "-":
		return nil, nil
	default:
		names = strings.Split(with, ",")
	}
	var parts []part
	for _, name := range names {
		p, ok := m.Optional[name]
		if !ok {
			return nil, fmt.Errorf("-with: no part is named %q in xcaddy.json; %s", name, suggest.Hint(name, slices.Collect(maps.Keys(m.Optional))))
		}
		parts = append(parts, p)
	}
	return parts, nil
}

// runs starts the binary with a Caddyfile, on ports and an admin address of
// its own, until it is ready, and ends it.
func runs(bin, caddyfile string) error {
	dir, err := os.MkdirTemp("", "wh")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	config, err := freePorts(caddyfile)
	if err != nil {
		return err
	}
	file, socket := filepath.Join(dir, "Caddyfile"), filepath.Join(dir, "admin.sock")
	config = strings.Replace(config, "admin localhost:2019", "admin unix/"+socket, 1)
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		return err
	}
	if out, err := exec.Command(bin, "validate", "--config", file, "--adapter", "caddyfile").CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	var log bytes.Buffer
	cmd := exec.Command(bin, "run", "--config", file, "--adapter", "caddyfile")
	cmd.Env = append(os.Environ(), "HOME="+dir, "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir)
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	err = ready(socket, ended)
	cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	if err == nil {
		err = <-ended
	}
	if err != nil {
		cmd.Process.Kill()
		return fmt.Errorf("%w\n%s", err, log.String())
	}
	return nil
}

// freePorts replaces the ports of an example's loopback addresses by free
// ones, so that it runs beside others.
func freePorts(caddyfile string) (string, error) {
	b, err := os.ReadFile(caddyfile)
	if err != nil {
		return "", err
	}
	config := string(b)
	for _, port := range []string{"7777", "17001", "17002"} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return "", err
		}
		defer l.Close() // after all of them are chosen
		config = strings.ReplaceAll(config, "127.0.0.1:"+port, l.Addr().String())
	}
	return config, nil
}

const patience = 60 * time.Second

// ready waits until the process answers that it is.
func ready(socket string, ended chan error) error {
	client := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}}
	defer client.CloseIdleConnections()
	timeout := time.After(patience)
	poll := time.NewTicker(20 * time.Millisecond)
	defer poll.Stop()
	for {
		select {
		case err := <-ended:
			return fmt.Errorf("it ended at once: %w", errors.Join(err))
		case <-timeout:
			return fmt.Errorf("it is not ready after %v", patience)
		case <-poll.C:
		}
		res, err := client.Get("http://localhost/readyz")
		if err != nil {
			continue
		}
		io.Copy(io.Discard, res.Body)
		res.Body.Close()
		if res.StatusCode == http.StatusOK {
			return nil
		}
	}
}
