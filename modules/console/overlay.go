package console

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
)

// entryView is something that operators want of a backend.
type entryView struct {
	Pool   string    `json:"pool"`
	Addr   string    `json:"addr"`
	Change string    `json:"change"` // added, removed or state
	Weight uint32    `json:"weight"`
	State  string    `json:"state"`
	Actor  string    `json:"actor"`
	At     time.Time `json:"at"`
	Unused bool      `json:"unused"`
}

// what says what the entry has done to the backend.
func (e *entryView) what() string {
	switch {
	case e.Change == "state":
		return e.State
	case e.Change == "added" && e.Weight > 1:
		return fmt.Sprintf("added with weight %d", e.Weight)
	}
	return e.Change
}

var overlayCommand = caddycmd.Command{
	Name:  "overlay",
	Usage: "[promote|drop]",
	Short: "Shows what operators have changed, makes a config of it, or drops it",
	Long: `
Without more it is show overlay. The overlay is what set, add and del have done to
backends since; it lies over the config and survives reloads.

promote prints the config that makes the overlay permanent: for a Caddyfile the
pools that change, to be pasted over what is there; with --json the whole config.
What it starts from is the file of --config, or else the running config, which
only an admin endpoint tells. What a config cannot say is told on standard
error, and the status is 1 then: an overlay that is dropped after that would
lose it.

drop forgets the overlay: backends that were added go, those that were removed
come back, and all are enabled.
`,
	CobraFunc: func(cmd *cobra.Command) {
		promote := &cobra.Command{Use: "promote", Short: "Prints the config that makes the overlay permanent"}
		where(promote)
		promote.Flags().Bool("json", false, "Print the whole config as JSON, not the pools as a Caddyfile")
		command(promote, 0, 0, promoteOverlay)

		drop := &cobra.Command{Use: "drop", Short: "Forgets what operators have changed"}
		drop.Flags().String("pool", "", "Only for a pool")
		drop.RegisterFlagCompletionFunc("pool", completing(poolNames))
		command(changing(drop), 0, 0, dropOverlay)

		cmd.AddCommand(promote, drop)
		command(shown(cmd), 0, 0, showOverlay)
	},
}

func showOverlay(c *console, _ []string) error {
	return c.show("/overlay", nil, func(ctx context.Context, w io.Writer) error {
		return c.overlayTable(w, func(row func(*entryView) error) error {
			return each(ctx, c.client, "/overlay", nil, row)
		})
	})
}

func (c *console) overlayTable(w io.Writer, rows func(row func(*entryView) error) error) error {
	t := newTable(w, colourful(c.out), "POOL", "BACKEND", "CHANGE", "BY", "AT", "")
	err := rows(func(e *entryView) error {
		note := ""
		if e.Unused {
			note = "no config has the pool"
		}
		t.row(e.Pool, e.Addr, e.what(), or(e.Actor), e.At.Local().Format(time.DateTime), note)
		return nil
	})
	return errors.Join(t.end(), err)
}

func dropOverlay(c *console, _ []string) error {
	var q url.Values
	if pool, _ := c.cmd.Flags().GetString("pool"); c.cmd.Flags().Changed("pool") {
		if pool == "" {
			return misused("--pool: is empty; leave it out for all pools")
		}
		q = url.Values{"pool": {pool}}
	}
	res, err := c.ask(c.ctx, http.MethodDelete, "/overlay", q, nil)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if c.json {
		return c.writeJSON(c.out, res.Body)
	}
	var dropped []entryView
	if err := json.NewDecoder(res.Body).Decode(&dropped); err != nil {
		return c.garbled(c.ctx, err)
	}
	fmt.Fprintf(c.out, "dropped: %d\n", len(dropped))
	if len(dropped) == 0 {
		return nil
	}
	return c.overlayTable(c.out, func(row func(*entryView) error) error {
		for i := range dropped {
			row(&dropped[i])
		}
		return nil
	})
}

func promoteOverlay(c *console, _ []string) error {
	var overlay []entryView
	if err := c.get(c.ctx, "/overlay", nil, &overlay); err != nil {
		return err
	}
	config, err := c.config()
	if err != nil {
		return err
	}
	p, err := promote(config, overlay)
	if err != nil {
		return err
	}
	if c.json {
		var b bytes.Buffer
		if err := json.Indent(&b, p.config, "", "\t"); err != nil {
			return err
		}
		b.WriteByte('\n')
		if err := c.writeJSON(c.out, &b); err != nil {
			return err
		}
	} else {
		for i, name := range p.changed {
			text, err := block(name, p.pools[name])
			if err != nil {
				p.leave("%s: %v; take --json", name, err)
				continue
			}
			if i > 0 {
				fmt.Fprintln(c.out)
			}
			fmt.Fprint(c.out, cleanLines(text))
		}
	}
	if len(p.left) == 0 {
		return nil
	}
	for _, l := range p.left {
		fmt.Fprintln(c.errs, clean(l))
	}
	return fmt.Errorf("changes that are not in this config: %d", len(p.left))
}

// cleanLines is clean that leaves the ends of lines and tabs as they are.
func cleanLines(s string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && r != '\t' && unsafe(r) {
			return '?'
		}
		return r
	}, s)
}

// config is the file of --config, or the running config.
func (c *console) config() (json.RawMessage, error) {
	if file, _ := c.cmd.Flags().GetString("config"); file != "" {
		adapter, _ := c.cmd.Flags().GetString("adapter")
		doc, _, _, err := caddycmd.LoadConfig(file, adapter)
		if err != nil {
			return nil, misused("--config: %v", err)
		}
		return doc, nil
	}
	if c.site {
		return nil, misused("--config: missing; a site does not tell the config that runs")
	}
	var doc json.RawMessage
	return doc, c.get(c.ctx, "/config/", nil, &doc)
}
