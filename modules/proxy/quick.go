package proxy

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/pool"
)

func init() {
	caddycmd.RegisterCommand(caddycmd.Command{
		Name:  "quick",
		Usage: "[--udp <address>...] [--tcp <address>...] --to <target>... [--admin <address>] [--print] [--config-out <file>]",
		Short: "Runs a proxy for one game server without a config file",
		Long: `
Listens on the addresses of --udp and --tcp and spreads what arrives over the
targets of --to. The Caddyfile that it runs is printed first, so that it can be
kept and grown: pipe --print to a file, or name one with --config-out.

An address is a port, an address and a port, or a range of ports: 7777, :7777,
192.0.2.1:7777, :30000-30009. A target is ip:port or host:port.

Backends are checked with a TCP connect when there is a --tcp, else by what
becomes of their sessions.
`,
		CobraFunc: func(cmd *cobra.Command) {
			cmd.Flags().StringArray("udp", nil, "Address to take UDP sessions on; may be repeated")
			cmd.Flags().StringArray("tcp", nil, "Address to take TCP connections on; may be repeated")
			cmd.Flags().StringArray("to", nil, "Backend, ip:port or host:port; may be repeated")
			cmd.Flags().String("admin", caddy.DefaultAdminListen, "Address of the admin API and the metrics, or off")
			cmd.Flags().Bool("print", false, "Print the Caddyfile and do not run it")
			cmd.Flags().String("config-out", "", "File to write the Caddyfile to as well")
			cmd.Args = cobra.NoArgs
			cmd.RunE = caddycmd.WrapCommandFuncForCobra(runQuick)
		},
	})
}

// quick is what the flags of the command ask for.
type quick struct {
	udp, tcp, to []string
	admin        string
}

func runQuick(fl caddycmd.Flags) (int, error) {
	caddy.TrapSignals()
	q := quick{admin: fl.String("admin")}
	for name, to := range map[string]*[]string{"udp": &q.udp, "tcp": &q.tcp, "to": &q.to} {
		var err error
		if *to, err = fl.GetStringArray(name); err != nil {
			return caddy.ExitCodeFailedStartup, err
		}
	}
	text, err := q.caddyfile()
	if err != nil {
		return caddy.ExitCodeFailedStartup, err
	}
	fmt.Print(text)
	if file := fl.String("config-out"); file != "" {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			return caddy.ExitCodeFailedStartup, fmt.Errorf("--config-out: %w", err)
		}
	}
	if fl.Bool("print") {
		return caddy.ExitCodeSuccess, nil
	}
	config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), nil)
	if err != nil {
		return caddy.ExitCodeFailedStartup, err
	}
	if config, err = unsaved(config); err != nil {
		return caddy.ExitCodeFailedStartup, err
	}
	if err := caddy.Load(config, true); err != nil {
		return caddy.ExitCodeFailedStartup, err
	}
	select {} // until a signal ends the process
}

// unsaved keeps Caddy from saving a config for "run --resume", in the place of
// the one that the host's real instance has saved there.
func unsaved(config []byte) ([]byte, error) {
	var c caddy.Config
	if err := json.Unmarshal(config, &c); err != nil {
		return nil, err
	}
	if c.Admin == nil {
		c.Admin = new(caddy.AdminConfig)
	}
	c.Admin.Config = &caddy.ConfigSettings{Persist: new(bool)}
	return json.Marshal(c)
}

// caddyfile checks the flags and writes the config that they mean.
func (q *quick) caddyfile() (string, error) {
	if len(q.udp)+len(q.tcp) == 0 {
		return "", errors.New("--udp or --tcp: an address to listen on is missing, as in --udp :7777")
	}
	if len(q.to) == 0 {
		return "", errors.New("--to: a backend is missing, as in --to 10.0.0.5:7777")
	}
	if a, err := caddy.ParseNetworkAddress(q.admin); q.admin != "off" && (err != nil || !a.IsUnixNetwork() && a.StartPort == 0) {
		return "", fmt.Errorf(`--admin: %q is neither an address, as in %s, nor off`, q.admin, caddy.DefaultAdminListen)
	}
	var binds []string
	for _, f := range []struct {
		network string
		values  []string
	}{{"udp", q.udp}, {"tcp", q.tcp}} {
		for _, v := range f.values {
			bind, err := quickBind(f.network, v)
			if err != nil {
				return "", fmt.Errorf("--%s: %w", f.network, err)
			}
			binds = append(binds, bind)
		}
	}
	for _, v := range q.to {
		if err := pool.CheckTarget(v); err != nil {
			return "", fmt.Errorf("--to: %w", err)
		}
	}
	check := "none"
	if len(q.tcp) > 0 {
		check = "tcp_connect"
	}
	return fmt.Sprintf(quickForm, q.admin, strings.Join(q.to, " "), check, strings.Join(binds, " ")), nil
}

const quickForm = `{
	admin %s

	wayhouse {
		state_dir off
		pool game {
			to %s
			health %s
		}
		listener game %s {
			route {
				pool game
			}
		}
	}
}
`

// quickBind is an address of --udp or --tcp as a listener's bind.
func quickBind(network, v string) (string, error) {
	if _, err := strconv.ParseUint(v, 10, 16); err == nil {
		v = ":" + v
	}
	if strings.ContainsAny(v, "/ \t{}\"`") {
		return "", fmt.Errorf("%q is not an address, as in :7777", v)
	}
	bind := network + "/" + v
	_, err := listener.ParseBind(bind)
	return bind, err
}
