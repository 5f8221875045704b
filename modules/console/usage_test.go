package console

import (
	"bytes"
	"strings"
	"testing"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
)

// execute runs a command line without a process and returns what it writes to
// standard error, and how it ends.
func execute(args ...string) (errs string, err error) {
	root := &cobra.Command{Use: "wayhouse", SilenceUsage: true}
	for _, c := range []caddycmd.Command{showCommand, setCommand, addCommand, delCommand, drainCommand, undrainCommand, closeCommand, overlayCommand, topCommand, explainCommand, healthCommand} {
		cmd := &cobra.Command{Use: c.Name + " " + c.Usage}
		c.CobraFunc(cmd)
		root.AddCommand(cmd)
	}
	var out, log bytes.Buffer
	root.SetArgs(args)
	root.SetOut(&out)
	root.SetErr(&log)
	err = root.Execute()
	return log.String(), err
}

// TestWrongUse wants mistakes on the command line to be told as such, before
// anybody is asked.
func TestWrongUse(t *testing.T) {
	t.Setenv(envAddress, "localhost:1") // where nobody is
	for _, tc := range []struct{ args, text string }{
		{"show", "pools, sessions, listeners, overlay or hints"},
		{"show pool", `"pool" is none of pools`},
		{"show pools a b", "want: wayhouse show pools [<pool>]"},
		{"show pools ..", `".." cannot be a name`},
		{"show pools --interval 5s", "--interval: needs --watch"},
		{"show pools --watch --interval 1ms", "--interval: 1ms is less"},
		{"show pools --jsno", "unknown flag: --jsno"},
		{"show pools --token abc", "--token: there is no such flag"},
		{"show pools --token=abc", "--token: there is no such flag"},
		{"show --token abc pools", "--token: there is no such flag"},
		{"show pools --address nobody", "none of host:port"},
		{"show sessions --limit -1", "--limit: -1 is negative"},
		{"show sessions --limit many", "invalid argument"},
		{"set", "say what: backend"},
		{"set backend lobby", "want: wayhouse set backend <pool>"},
		{"set backend lobby here enabled", `"here" is not a backend's address`},
		{"set backend lobby 10.0.0.1 enabled", "is not a backend's address"},
		{"set backend lobby 10.0.0.1:0 enabled", "is not a backend's address"},
		{"set backend lobby 10.0.0.1:1 off", `"off" is none of enabled, draining or disabled`},
		{"add backend lobby 10.0.0.1:1 --weight 0", "--weight: 0"},
		{"add backend lobby 10.0.0.1:1 --weight -1", "invalid argument"},
		{"add hint nowhere lobby", `"nowhere" is not an IP address`},
		{"add hint fe80::1%eth0 lobby", "is not an IP address"},
		{"add hint 10.0.0.1 lobby --ttl 90ms", "--ttl: 90ms"},
		{"add hint 10.0.0.1 lobby --ttl 2h", "--ttl: 2h"},
		{"del hint", "want: wayhouse del hint"},
		{"explain --src 203.0.113.7:5", "--listener: missing"},
		{"explain --listener game", "--src: missing"},
		{"explain --listener game --src 203.0.113.7:5 --tcp --udp", "--tcp: not with --udp"},
		{"explain --listener game --src 203.0.113.7:5 --bytes @/nowhere", "--bytes: open /nowhere"},
		{"explain --token abc", "--token: there is no such flag"},
		{"drain 5m", `"5m"`},
		{"drain --wait=soon", `--wait: "soon" is not a duration`},
		{"drain --wait -5s", "unknown shorthand flag"},
		{"drain --wait=-5s", "is not a duration"},
		{"undrain now", "want: wayhouse undrain"},
		{"close", "say what: session"},
		{"close session", "say which"},
		{"close session u-1 --pool lobby", "one too many"},
		{"close session u-1 --yes", "--yes"},
		{"overlay promoted", "want: wayhouse overlay"},
		{"overlay drop --pool=", "--pool: is empty"},
		{"health now", "want: wayhouse health"},
		{"health --token abc", "--token: there is no such flag"},
		{"top --interval 1ms", "--interval: 1ms"},
		{"top --sort name", `--sort: "name" is none of`},
		{"top --sessions -1", "--sessions: -1"},
	} {
		errs, err := execute(strings.Fields(tc.args)...)
		if err == nil || err.Error() != "exiting with status 2" || !strings.Contains(errs, tc.text) {
			t.Errorf("%s ends with %v and says %q, want %q", tc.args, err, errs, tc.text)
		}
		if strings.Contains(errs, "abc") || strings.Count(errs, "\n") != 1 {
			t.Errorf("%s says %q: not one line without secrets", tc.args, errs)
		}
	}
}
