package packages

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// TestPackages makes what a release has, and uses it.
func TestPackages(t *testing.T) {
	if !slow {
		t.Skip("builds releases and packages; make packages runs it")
	}
	t.Run("debian", testDebian)
	t.Run("reproducible", func(t *testing.T) { t.Log(command(t, root, "deploy/reproducible")) })
}

// testDebian installs, upgrades, removes and purges the package on a Debian of
// its own.
func testDebian(t *testing.T) {
	arch := strings.TrimSpace(command(t, root, "go", "env", "GOARCH"))
	for _, version := range []string{"v0.0.1", "v0.0.2-rc.1"} {
		command(t, root, "make", "--no-print-directory", "deb", "VERSION="+version, "ARCHS="+arch)
	}
	dist, err := filepath.Abs(root + "/dist")
	if err != nil {
		t.Fatal(err)
	}
	first := filepath.Join(dist, "wayhouse_0.0.1_"+arch+".deb")
	second := filepath.Join(dist, "wayhouse_0.0.2~rc.1_"+arch+".deb")

	info := command(t, root, "dpkg-deb", "--info", first)
	for _, want := range []string{"Package: wayhouse", "Version: 0.0.1", "Architecture: " + arch, "postinst", "conffiles"} {
		if !strings.Contains(info, want) {
			t.Errorf("dpkg-deb --info has no %q:\n%s", want, info)
		}
	}
	contents := command(t, root, "dpkg-deb", "--contents", first)
	for _, want := range []string{
		"-rwxr-xr-x root/root", "./usr/bin/wayhouse", "./etc/wayhouse/Caddyfile", "./usr/lib/systemd/system/wayhouse.service",
		"./usr/share/man/man8/wayhouse-quick.8.gz", "./usr/share/bash-completion/completions/wayhouse", "./usr/share/doc/wayhouse/copyright",
	} {
		if !strings.Contains(contents, want) {
			t.Errorf("dpkg-deb --contents has no %q:\n%s", want, contents)
		}
	}

	system := debian(t)
	in := func(argv ...string) string {
		t.Helper()
		return command(t, ".", append([]string{"chroot", system, "/usr/bin/env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "DEBIAN_FRONTEND=noninteractive"}, argv...)...)
	}
	dpkg := func(deb string) {
		t.Helper()
		command(t, ".", "cp", deb, filepath.Join(system, "root/wayhouse.deb"))
		in("dpkg", "--install", "/root/wayhouse.deb")
	}
	config := filepath.Join(system, "etc/wayhouse/Caddyfile")

	dpkg(first)
	if out := in("wayhouse", "version"); !strings.HasPrefix(out, "v0.0.1 (commit ") {
		t.Errorf("the version is %s", out)
	}
	in("wayhouse", "validate", "--config", "/etc/wayhouse/Caddyfile")
	if out := in("getent", "passwd", "wayhouse"); !strings.HasSuffix(strings.TrimSpace(out), ":/var/lib/wayhouse:/usr/sbin/nologin") {
		t.Errorf("the user is %s", out)
	}
	for path, mode := range map[string]os.FileMode{"usr/bin/wayhouse": 0o755, "etc/wayhouse/Caddyfile": 0o644} {
		if s, err := os.Stat(filepath.Join(system, path)); err != nil || s.Mode().Perm() != mode {
			t.Errorf("%s: %v, %v, want %v", path, s, err, mode)
		}
	}

	// What an operator has written stays.
	edited := readFile(t, config) + "\n# edited\n"
	if err := os.WriteFile(config, []byte(edited), 0o644); err != nil {
		t.Fatal(err)
	}
	state := filepath.Join(system, "var/lib/wayhouse/caddy")
	if err := os.MkdirAll(state, 0o700); err != nil {
		t.Fatal(err)
	}
	dpkg(second)
	if out := in("wayhouse", "--version"); !strings.HasPrefix(out, "v0.0.2-rc.1 ") {
		t.Errorf("after the upgrade the version is %s", out)
	}
	if readFile(t, config) != edited {
		t.Error("the upgrade has replaced a config that was edited")
	}
	in("dpkg", "--remove", "wayhouse")
	if readFile(t, config) != edited || !exists(state) || exists(filepath.Join(system, "usr/bin/wayhouse")) {
		t.Error("a removal leaves the command, or takes the config or the state")
	}
	in("dpkg", "--purge", "wayhouse")
	for _, path := range []string{"etc/wayhouse", "var/lib/wayhouse"} {
		if exists(filepath.Join(system, path)) {
			t.Errorf("a purge leaves %s", path)
		}
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// debian is the folder of a small Debian. One that WAYHOUSE_DEBIAN names is
// copied, for to make one takes the network and a minute.
func debian(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "debian")
	if ready := os.Getenv("WAYHOUSE_DEBIAN"); ready != "" {
		command(t, ".", "cp", "-a", ready, dir)
		return dir
	}
	_, err := exec.LookPath("debootstrap")
	kit.Require(t, err, "debootstrap")
	command(t, ".", "debootstrap", "--variant=minbase", "bookworm", dir)
	return dir
}
