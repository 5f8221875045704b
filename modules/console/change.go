package console

import (
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"time"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
)

// states are what an operator may want of a backend.
var states = []string{"enabled", "draining", "disabled"}

var setCommand = caddycmd.Command{
	Name:  "set",
	Usage: "backend <pool> <ip:port> enabled|draining|disabled",
	Short: "Sets the state of a backend of a running instance",
	Long: `
A backend that is draining or disabled is given no new clients. Those it has
stay; those of one that is draining until the pool's drain_deadline. The state
survives reloads and, with a state directory, restarts.
`,
	CobraFunc: func(cmd *cobra.Command) {
		backend := &cobra.Command{Use: "backend <pool> <ip:port> enabled|draining|disabled", Short: "Sets the state of a backend", ValidArgsFunction: completing(poolBackendState)}
		command(changing(backend), 3, 3, setBackend)
		group(cmd, backend)
	},
}

var addCommand = caddycmd.Command{
	Name:  "add",
	Usage: "backend <pool> <ip:port> | hint <client> <pool>",
	Short: "Adds a backend or a route hint to a running instance",
	Long: `
A backend that is added survives reloads and, with a state directory, restarts;
it gets clients when its checks have passed. A route hint sends a client's next
connections and sessions to a pool, for as long as --ttl says.
`,
	CobraFunc: func(cmd *cobra.Command) {
		backend := &cobra.Command{Use: "backend <pool> <ip:port>", Short: "Adds a backend to a pool", ValidArgsFunction: completing(poolNames)}
		backend.Flags().Uint32("weight", 1, "Its weight, from 1, for balancers that have weights")
		command(changing(backend), 2, 2, addBackend)

		hint := &cobra.Command{Use: "hint <client> <pool>", Short: "Adds a route hint for a client's address", ValidArgsFunction: completing(poolSecond)}
		hint.Flags().Duration("ttl", 30*time.Second, "How long it holds, from 1s to 1h, in whole seconds")
		command(changing(hint), 2, 2, addHint)
		group(cmd, backend, hint)
	},
}

var delCommand = caddycmd.Command{
	Name:  "del",
	Usage: "backend <pool> <ip:port> | hint <client>",
	Short: "Removes a backend or a route hint from a running instance",
	Long: `
A backend that is removed stays away over reloads and, with a state directory,
restarts, also when the config or a source names it. What becomes of its clients
is what the pool's on_backend_removed says.
`,
	CobraFunc: func(cmd *cobra.Command) {
		backend := &cobra.Command{Use: "backend <pool> <ip:port>", Short: "Removes a backend from a pool", ValidArgsFunction: completing(poolThenBackend)}
		command(changing(backend), 2, 2, delBackend)

		hint := &cobra.Command{Use: "hint <client>", Short: "Forgets the route hint for a client's address", ValidArgsFunction: cobra.NoFileCompletions}
		command(changing(hint), 1, 1, delHint)
		group(cmd, backend, hint)
	},
}

// changing adds the flags of whatever changes something.
func changing(cmd *cobra.Command) *cobra.Command {
	where(cmd)
	cmd.Flags().Bool("json", false, "Print the API's JSON, if it answers any, instead of a line")
	return cmd
}

// change sends a request, and tells in a line what it has done.
func (c *console) change(method, path string, body any, format string, args ...any) error {
	res, err := c.ask(c.ctx, method, path, nil, body)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if c.json {
		if res.StatusCode == http.StatusNoContent {
			return nil
		}
		return c.writeJSON(c.out, res.Body)
	}
	if _, err := io.Copy(io.Discard, res.Body); err != nil {
		return c.garbled(c.ctx, err)
	}
	_, err = fmt.Fprintln(c.out, clean(fmt.Sprintf(format, args...)))
	return err
}

// backendAddr reads the address of a backend as the API writes it.
func backendAddr(s string) (string, error) {
	a, err := netip.ParseAddrPort(s)
	if err != nil || a.Port() == 0 || a.Addr().Zone() != "" {
		return "", misused("%q is not a backend's address, ip:port", s)
	}
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()).String(), nil
}

func clientAddr(s string) (string, error) {
	a, err := netip.ParseAddr(s)
	if err != nil || a.Zone() != "" {
		return "", misused("%q is not an IP address", s)
	}
	return a.Unmap().String(), nil
}

func setBackend(c *console, args []string) error {
	addr, err := backendAddr(args[1])
	if err != nil {
		return err
	}
	if !slices.Contains(states, args[2]) {
		return misused("%q is none of %s", args[2], alternatives(states))
	}
	path, err := at("pools", args[0], "backends", addr)
	if err != nil {
		return err
	}
	return c.change(http.MethodPatch, path, map[string]string{"state": args[2]}, "pool %s: %s is %s", args[0], addr, args[2])
}

func addBackend(c *console, args []string) error {
	addr, err := backendAddr(args[1])
	if err != nil {
		return err
	}
	weight, _ := c.cmd.Flags().GetUint32("weight")
	if weight == 0 {
		return misused("--weight: 0 is not from 1")
	}
	path, err := at("pools", args[0], "backends")
	if err != nil {
		return err
	}
	body := map[string]any{"addr": addr}
	if c.cmd.Flags().Changed("weight") {
		body["weight"] = weight
	}
	return c.change(http.MethodPost, path, body, "pool %s: %s is added", args[0], addr)
}

func delBackend(c *console, args []string) error {
	addr, err := backendAddr(args[1])
	if err != nil {
		return err
	}
	path, err := at("pools", args[0], "backends", addr)
	if err != nil {
		return err
	}
	return c.change(http.MethodDelete, path, nil, "pool %s: %s is removed", args[0], addr)
}

func addHint(c *console, args []string) error {
	src, err := clientAddr(args[0])
	if err != nil {
		return err
	}
	ttl, _ := c.cmd.Flags().GetDuration("ttl")
	if ttl < time.Second || ttl > time.Hour || ttl%time.Second != 0 {
		return misused("--ttl: %v is not from 1s to 1h in whole seconds", ttl)
	}
	return c.change(http.MethodPost, "/route-hint", map[string]any{"src_ip": src, "pool": args[1], "ttl_sec": int(ttl / time.Second)},
		"%s goes to pool %s for %v", src, args[1], ttl)
}

func delHint(c *console, args []string) error {
	src, err := clientAddr(args[0])
	if err != nil {
		return err
	}
	path, err := at("route-hints", src)
	if err != nil {
		return err
	}
	return c.change(http.MethodDelete, path, nil, "the hint for %s is gone", src)
}
