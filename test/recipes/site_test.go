package recipes

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// site is the world of a recipe, of three hosts with a network namespace each:
//
//	players ── 198.51.100.10, edge ── inside
//
// On edge runs wayhouse with the Caddyfile of the page, to the letter. Every
// address of 203.0.113.0/24 and 192.0.2.0/24 is one of the players, every
// address of 10.0.0.0/8 and 172.18.0.0/16 one of inside: what the pages name is
// there.
type site struct {
	*testing.T
	page                  *page
	text                  string
	players, edge, inside *kit.Netns
	proc                  *kit.Process
	servers               map[string]*server
}

// public is the address of edge that players know.
const public = "198.51.100.10"

// begin is what runs on edge: wayhouse with its admin endpoint on a socket of
// the test, and with the files and the environment that the test has put in etc,
// run and env.
const begin = `
export CADDY_ADMIN="unix/$PWD/admin.sock"
if [ -f env ]; then . ./env; fi
if [ -d etc ]; then mount -t overlay overlay -o lowerdir="$PWD/etc:/etc" /etc || exit 1; fi
if [ -d run ]; then mount --bind "$PWD/run" /run || exit 1; fi
exec "$@"`

func newSite(t *testing.T, p *page, text string) *site {
	s := &site{T: t, page: p, text: text, players: kit.NewNetns(t), edge: kit.NewNetns(t), inside: kit.NewNetns(t), servers: make(map[string]*server)}
	kit.Veth(t, s.players, "198.51.100.1/24", s.edge, public+"/24")
	kit.Veth(t, s.inside, "172.31.255.2/30", s.edge, "172.31.255.1/30")
	s.players.Run(t, "sh", "-ec", "ip route add local 203.0.113.0/24 dev lo; ip route add local 192.0.2.0/24 dev lo")
	s.edge.Run(t, "sh", "-ec", "ip route add default via 198.51.100.1; ip route add 10.0.0.0/8 via 172.31.255.2; ip route add 172.18.0.0/16 via 172.31.255.2")
	s.inside.Run(t, "sh", "-ec", "ip route add default via 172.31.255.1; ip route add local 10.0.0.0/8 dev lo; ip route add local 172.18.0.0/16 dev lo")
	s.proc = kit.Prepare(t, nil, kit.Options{Netns: s.edge, Wrap: []string{"sh", "-c", begin, "sh"}})
	return s
}

// file puts a file on edge, below /etc or /run.
func (s *site) file(path, content string) {
	s.Helper()
	at := filepath.Join(s.proc.Dir, path)
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		s.Fatal(err)
	}
	if err := os.WriteFile(at, []byte(content), 0o600); err != nil {
		s.Fatal(err)
	}
}

// start runs the Caddyfile.
func (s *site) start() {
	s.Helper()
	s.file("Caddyfile", s.text)
	s.proc.Begin("run", "--config", "Caddyfile", "--adapter", "caddyfile")
	// At once: whoever plays would be given time.
	s.Cleanup(func() {
		if !s.proc.Ended() {
			s.proc.Signal(syscall.SIGQUIT)
			s.proc.Exit()
		}
	})
	s.proc.WaitReady()
}

// command runs the one command of the page that begins with these words, on
// edge, and returns what it prints.
func (s *site) command(words string) string {
	s.Helper()
	return s.shell(s.page.command(s.T, words))
}

// shell runs a command line on edge.
func (s *site) shell(line string) string {
	s.Helper()
	out, err := s.try(line)
	if err != nil {
		s.Fatalf("%s: %v: %s", line, err, out)
	}
	return out
}

func (s *site) try(line string) (string, error) {
	bin := filepath.Join(s.proc.Dir, "bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return "", err
	}
	if err := os.Symlink(kit.Binary(s.T, ""), filepath.Join(bin, "wayhouse")); err != nil && !errors.Is(err, os.ErrExist) {
		return "", err
	}
	cmd := exec.Command("ip", "netns", "exec", s.edge.Name, "sh", "-c", line)
	cmd.Dir = s.proc.Dir
	cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "HOME="+s.proc.Dir, "WAYHOUSE_ADDRESS=unix/"+filepath.Join(s.proc.Dir, "admin.sock"))
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

// counts waits until a series has this value.
func (s *site) counts(want float64, name string, labels ...string) {
	s.Helper()
	kit.Settles(s.T, name+" of "+strings.Join(labels, "="), want, func() float64 { return s.proc.Metric(name, labels...) })
}

// prints wants words in what a command has printed.
func (s *site) prints(out, words string) {
	s.Helper()
	if !strings.Contains(out, words) {
		s.Errorf("%q is not in\n%s", words, out)
	}
}

// bash is shell for a line that is written for bash.
func (s *site) bash(line string) string {
	s.Helper()
	return s.shell("bash -c " + quote(line))
}

// quote is one word of a shell.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
