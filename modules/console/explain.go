package console

import (
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
)

// maxExplanation bounds what an instance has to say, in bytes.
const maxExplanation = 16 << 20

var explainCommand = caddycmd.Command{
	Name:  "explain",
	Usage: "--listener <name> --src <ip:port> [--dst <ip:port>] [--bytes <bytes>...] [--tcp | --udp] [--open] [--json]",
	Short: "Tells what a running instance would do with a client, and why",
	Long: `
Asks a running instance which sniffers and routes a client's first bytes would
meet, which pool it would get and which backend. Nothing is sent to anybody,
and nothing is counted.

The bytes are hex:DIGITS, ascii:TEXT or @FILE. Given again, they are the next
segment of the connection or the next datagram. Without them a TCP client says
nothing. What is given is all that the client sends, unless --open is.
`,
	CobraFunc: func(cmd *cobra.Command) {
		where(cmd)
		cmd.Flags().String("listener", "", "Name of the listener")
		cmd.Flags().String("src", "", "Address and port of the client")
		cmd.Flags().String("dst", "", "Address and port of ours that it speaks to; needed when the listener has several")
		cmd.Flags().StringArray("bytes", nil, "What it sends: hex:..., ascii:... or @file; may be repeated")
		cmd.Flags().Bool("tcp", false, "It is a TCP connection; needed when the listener has both")
		cmd.Flags().Bool("udp", false, "It is a UDP session; needed when the listener has both")
		cmd.Flags().Bool("open", false, "It may send more after these bytes")
		cmd.Flags().Bool("json", false, "Print the answer as JSON")
		command(cmd, 0, 0, explain)
	},
}

// flow is what POST /explain takes.
type flow struct {
	Listener string   `json:"listener"`
	Network  string   `json:"network,omitempty"`
	Src      string   `json:"src"`
	Dst      string   `json:"dst,omitempty"`
	Bytes    []string `json:"bytes,omitempty"`
	Final    bool     `json:"final"`
}

func explain(c *console, _ []string) error {
	fl := c.cmd.Flags()
	text := func(name string) string { s, _ := fl.GetString(name); return s }
	is := func(name string) bool { b, _ := fl.GetBool(name); return b }
	f := flow{Listener: text("listener"), Src: text("src"), Dst: text("dst"), Final: !is("open")}
	switch {
	case f.Listener == "":
		return misused("--listener: missing")
	case f.Src == "":
		return misused("--src: missing: the client's address and port, as in 203.0.113.7:51343")
	case is("tcp") && is("udp"):
		return misused("--tcp: not with --udp")
	case is("tcp"):
		f.Network = "tcp"
	case is("udp"):
		f.Network = "udp"
	}
	// GetStringArray writes and reads CSV, which makes "\r\n" a "\n".
	for _, s := range fl.Lookup("bytes").Value.(interface{ GetSlice() []string }).GetSlice() {
		if file, ok := strings.CutPrefix(s, "@"); ok {
			b, err := os.ReadFile(file)
			if err != nil {
				return misused("--bytes: %v", err)
			}
			s = "hex:" + hex.EncodeToString(b)
		}
		f.Bytes = append(f.Bytes, s)
	}
	query := url.Values{"format": {"text"}}
	if c.json {
		query = nil
	}
	res, err := c.ask(c.ctx, http.MethodPost, "/explain", query, f)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if c.json {
		return c.writeJSON(c.out, res.Body)
	}
	b, err := io.ReadAll(io.LimitReader(res.Body, maxExplanation))
	if err != nil {
		return c.garbled(c.ctx, err)
	}
	_, err = fmt.Fprint(c.out, cleanLines(string(b)))
	return err
}
