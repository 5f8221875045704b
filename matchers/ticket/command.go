package ticket

import (
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"time"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/wayhouse-proxy/wayhouse/internal/ticket"
)

func init() {
	caddycmd.RegisterCommand(caddycmd.Command{
		Name:  "ticket",
		Usage: "mint --key-file <file> --pool <name> [--ttl <duration>] [--ip <address>] [--format hex|base64|raw]",
		Short: "Makes tickets, by which clients are sent to a pool",
		CobraFunc: func(cmd *cobra.Command) {
			cmd.Args = cobra.NoArgs
			cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
			cmd.AddCommand(mintCommand())
		},
	})
}

func mintCommand() *cobra.Command {
	m := new(mint)
	cmd := &cobra.Command{
		Use:   "mint --key-file <file> --pool <name> [--ttl <duration>] [--ip <address>] [--format hex|base64|raw]",
		Short: "Makes one ticket and prints it",
		Long: `
Makes a ticket that the matcher layer4.matchers.ticket takes, and prints it. The
key file has hex: or base64: and 16 to 1024 bytes in that form.
`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return m.run(cmd.OutOrStdout(), time.Now()) },
	}
	f := cmd.Flags()
	f.StringVar(&m.keyFile, "key-file", "", "File with the shared key")
	f.StringVar(&m.pool, "pool", "", "Pool that the ticket is for")
	f.StringVar(&m.ttl, "ttl", "5m", "How long the ticket is good, such as 90s, 5m or 2d")
	f.StringVar(&m.ip, "ip", "", "The only client address that may use it; anybody may without")
	f.StringVar(&m.format, "format", "hex", "How to print it: hex, base64 or raw")
	return cmd
}

// mint is what the flags ask for.
type mint struct{ keyFile, pool, ttl, ip, format string }

func (m *mint) run(w io.Writer, now time.Time) error {
	if m.keyFile == "" {
		return errors.New("--key-file: missing")
	}
	if m.pool == "" {
		return errors.New("--pool: missing")
	}
	b, err := os.ReadFile(m.keyFile)
	if err != nil {
		return fmt.Errorf("--key-file: %w", err)
	}
	key, err := ticket.ParseKey(string(b))
	if err != nil {
		return fmt.Errorf("--key-file: %s: %w", m.keyFile, err)
	}
	ttl, err := caddy.ParseDuration(m.ttl)
	if err != nil || ttl < time.Second {
		return fmt.Errorf("--ttl: %q is not a duration of a second or more, such as 5m", m.ttl)
	}
	var client netip.Addr
	if m.ip != "" {
		if client, err = netip.ParseAddr(m.ip); err != nil || client.Zone() != "" {
			return fmt.Errorf("--ip: %q is not an IP address", m.ip)
		}
	}
	t, err := ticket.Mint(key, m.pool, now.Add(ttl), client)
	if err != nil {
		return err
	}
	switch m.format {
	case "hex":
		_, err = fmt.Fprintln(w, hex.EncodeToString(t))
	case "base64":
		_, err = fmt.Fprintln(w, base64.StdEncoding.EncodeToString(t))
	case "raw":
		_, err = w.Write(t)
	default:
		err = fmt.Errorf("--format: %q is none of hex, base64, raw", m.format)
	}
	return err
}
