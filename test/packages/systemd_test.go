package packages

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

const unit = root + "/deploy/systemd/wayhouse.service"

// exposure is what "systemd-analyze security" may say of the unit at the most, in
// tenths: 0 is a service that can do nothing.
const exposure = "16"

// TestUnit has systemd's own tools look at the unit.
func TestUnit(t *testing.T) {
	_, err := exec.LookPath("systemd-analyze")
	kit.Require(t, err, "systemd-analyze")
	// Its commands have to exist.
	text := strings.ReplaceAll(readFile(t, unit), "/usr/bin/wayhouse", kit.Binary(t, ""))
	file := filepath.Join(t.TempDir(), "wayhouse.service")
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if out := command(t, ".", "systemd-analyze", "verify", "--man=no", "--recursive-errors=no", file); strings.Contains(out, "wayhouse.service") {
		t.Errorf("verify says\n%s", out)
	}
	command(t, ".", "systemd-analyze", "security", "--no-pager", "--offline=true", "--threshold="+exposure, unit)
}

// TestUnitAndConfig wants the commands of the unit to be commands, and its folders
// those that the config writes to.
func TestUnitAndConfig(t *testing.T) {
	text := readFile(t, unit)
	for _, m := range regexp.MustCompile(`(?m)^Exec\w+=/usr/bin/wayhouse (\w+) (.*)$`).FindAllStringSubmatch(text, -1) {
		help := command(t, t.TempDir(), kit.Binary(t, ""), m[1], "--help")
		for _, arg := range strings.Fields(m[2]) {
			if strings.HasPrefix(arg, "--") && !strings.Contains(help, arg) {
				t.Errorf("%s has no %s", m[1], arg)
			}
		}
	}
	config, err := filepath.Abs(root + "/deploy/systemd/Caddyfile")
	if err != nil {
		t.Fatal(err)
	}
	command(t, t.TempDir(), kit.Binary(t, ""), "validate", "--config", config, "--adapter", "caddyfile")
}

// TestNotify is systemd's side of Type=notify.
func TestNotify(t *testing.T) {
	dir := t.TempDir()
	socket, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(dir, "n"), Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	told := func(want string) {
		t.Helper()
		b := make([]byte, 1024)
		socket.SetReadDeadline(time.Now().Add(kit.Long))
		for {
			n, err := socket.Read(b)
			if err != nil {
				t.Fatalf("systemd is not told %s: %v", want, err)
			}
			if strings.Contains(string(b[:n]), want) {
				return
			}
		}
	}
	p := kit.Start(t, kit.App(kit.M{}, kit.M{}), kit.Options{Env: []string{"NOTIFY_SOCKET=" + filepath.Join(dir, "n")}})
	told("READY=1")
	p.Signal(syscall.SIGHUP)
	told("RELOADING=1")
	told("READY=1")
	p.Signal(syscall.SIGTERM)
	told("STOPPING=1")
}
