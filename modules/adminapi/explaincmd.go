package adminapi

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
)

func init() {
	caddycmd.RegisterCommand(caddycmd.Command{
		Name:  "explain",
		Usage: "--listener <name> --src <ip:port> [--dst <ip:port>] [--bytes <bytes>...] [--tcp | --udp] [--open] [--address <address>] [--json]",
		Short: "Tells what the running process would do with a client, and why",
		Long: `
Asks the running process which sniffers and routes a client's first bytes would
meet, which pool it would get and which backend. Nothing is sent to anybody,
and nothing is counted.

The bytes are hex:DIGITS, ascii:TEXT or @FILE. Given again, they are the next
segment of the connection or the next datagram. Without them a TCP client says
nothing. What is given is all that the client sends, unless --open is.
`,
		CobraFunc: func(cmd *cobra.Command) {
			cmd.Flags().String("listener", "", "Name of the listener")
			cmd.Flags().String("src", "", "Address and port of the client")
			cmd.Flags().String("dst", "", "Address and port of ours that it speaks to; needed when the listener has several")
			cmd.Flags().StringArray("bytes", nil, "What it sends: hex:..., ascii:... or @file; may be repeated")
			cmd.Flags().Bool("tcp", false, "It is a TCP connection; needed when the listener has both")
			cmd.Flags().Bool("udp", false, "It is a UDP session; needed when the listener has both")
			cmd.Flags().Bool("open", false, "It may send more after these bytes")
			cmd.Flags().String("address", caddy.DefaultAdminListen, "Address of the admin API")
			cmd.Flags().Bool("json", false, "Print the answer as JSON")
			cmd.MarkFlagsMutuallyExclusive("tcp", "udp")
			cmd.Args = cobra.NoArgs
			cmd.RunE = caddycmd.WrapCommandFuncForCobra(runExplain)
		},
	})
}

func runExplain(fl caddycmd.Flags) (int, error) {
	j := flowJSON{Listener: fl.String("listener"), Src: fl.String("src"), Dst: fl.String("dst")}
	switch {
	case j.Listener == "":
		return caddy.ExitCodeFailedStartup, errors.New("--listener: missing")
	case j.Src == "":
		return caddy.ExitCodeFailedStartup, errors.New("--src: missing: the client's address and port, as in 203.0.113.7:51343")
	case fl.Bool("tcp"):
		j.Network = "tcp"
	case fl.Bool("udp"):
		j.Network = "udp"
	}
	given, err := fl.GetStringArray("bytes")
	if err != nil {
		return caddy.ExitCodeFailedStartup, err
	}
	for _, s := range given {
		if file, ok := strings.CutPrefix(s, "@"); ok {
			b, err := os.ReadFile(file)
			if err != nil {
				return caddy.ExitCodeFailedStartup, fmt.Errorf("--bytes: %w", err)
			}
			s = "hex:" + hex.EncodeToString(b)
		}
		j.Bytes = append(j.Bytes, s)
	}
	if final := !fl.Bool("open"); !final {
		j.Final = &final
	}
	body, err := json.Marshal(j)
	if err != nil {
		return caddy.ExitCodeFailedStartup, err
	}
	uri := "/explain?format=text"
	if fl.Bool("json") {
		uri = "/explain"
	}
	resp, err := caddycmd.AdminAPIRequest(fl.String("address"), "POST", uri, nil, bytes.NewReader(body))
	if err != nil {
		return caddy.ExitCodeFailedStartup, err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(os.Stdout, resp.Body); err != nil {
		return caddy.ExitCodeFailedStartup, err
	}
	return caddy.ExitCodeSuccess, nil
}
