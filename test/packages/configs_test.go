package packages

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// begin starts a process with a Caddyfile whose admin endpoint is its own.
func begin(t *testing.T, config string) *kit.Process {
	t.Helper()
	p := kit.Prepare(t, nil, kit.Options{})
	if strings.HasPrefix(config, "{\n") {
		config = "{\n\tadmin " + p.Admin + "\n" + strings.TrimPrefix(config, "{\n")
	} else {
		config = "{\n\tadmin " + p.Admin + "\n}\n" + config
	}
	if err := os.WriteFile(filepath.Join(p.Dir, "Caddyfile"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	p.Begin("run", "--config", "Caddyfile", "--adapter", "caddyfile")
	return p
}

// withoutComments is a Caddyfile from its first line that says something.
func withoutComments(config string) string {
	for strings.HasPrefix(config, "#") {
		_, config, _ = strings.Cut(config, "\n")
	}
	return config
}

// TestComposeByHand runs what the containers of the demo would, on loopback.
func TestComposeByHand(t *testing.T) {
	game := withoutComments(readFile(t, root+"/deploy/compose/game.Caddyfile"))
	proxy := readFile(t, root+"/deploy/compose/Caddyfile")
	ports := kit.Ports(t, 4)
	for i, name := range []string{"game-a", "game-b"} {
		addr := kit.Local(ports + i)
		begin(t, strings.NewReplacer("udp/:7777", "udp/"+addr, "\t:7777", "\t"+addr).Replace(game))
		proxy = strings.ReplaceAll(proxy, name+":7777", addr)
	}
	front, metrics := kit.Local(ports+2), kit.Local(ports+3)
	proxy = strings.NewReplacer("/:7777", "/"+front, "http://:9180", "http://"+metrics).Replace(proxy)
	p := begin(t, proxy)
	p.WaitReady()
	for _, network := range []string{"tcp", "udp"} {
		kit.Eventually(t, network+" goes through and comes back", func() bool {
			c, err := net.Dial(network, front)
			if err != nil {
				return false
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(time.Second))
			b := make([]byte, 16)
			if _, err := c.Write([]byte("hello")); err != nil {
				return false
			}
			n, err := c.Read(b)
			return err == nil && string(b[:n]) == "hello"
		})
	}
	kit.Eventually(t, "checks of both servers pass", func() bool {
		m := p.Metrics()
		return m.Sum("pool_backends", "state", "healthy") == 4
	})
	c, err := net.Dial("tcp", metrics)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(kit.Long))
	fmt.Fprintf(c, "GET /metrics HTTP/1.0\r\nHost: %s\r\n\r\n", metrics)
	b := make([]byte, 32)
	if n, err := c.Read(b); err != nil || !strings.Contains(string(b[:n]), " 200 ") {
		t.Errorf("Prometheus is answered %q: %v", b[:n], err)
	}
}

// TestConfigs validates the configs that come with images and manifests.
func TestConfigs(t *testing.T) {
	var manifest struct{ Data map[string]string }
	for _, doc := range strings.Split(readFile(t, root+"/deploy/k8s/wayhouse.yaml"), "\n---\n") {
		if strings.Contains(doc, "\nkind: ConfigMap\n") {
			if err := yaml.Unmarshal([]byte(doc+"\n"), &manifest); err != nil {
				t.Fatal(err)
			}
		}
	}
	for name, config := range map[string]string{
		"docker":     readFile(t, root+"/deploy/docker/Caddyfile"),
		"compose":    readFile(t, root+"/deploy/compose/Caddyfile"),
		"game":       readFile(t, root+"/deploy/compose/game.Caddyfile"),
		"kubernetes": manifest.Data["Caddyfile"],
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, "Caddyfile")
			for _, token := range []string{"operate", "scrape"} {
				if err := os.WriteFile(filepath.Join(dir, token), []byte("a-token-for-"+token), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			// In a pod there is an account that tells where the API is.
			config = strings.NewReplacer("/run/secrets/wayhouse/", dir+"/", "namespace games\n", "namespace games\n\t\t\tapi http://127.0.0.1:1\n").Replace(config)
			if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
				t.Fatal(err)
			}
			out := command(t, dir, kit.Binary(t, ""), "validate", "--config", file, "--adapter", "caddyfile")
			if strings.Contains(out, "not formatted") {
				t.Error("caddy fmt would write it otherwise")
			}
		})
	}
}
