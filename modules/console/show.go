package console

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
)

var showCommand = caddycmd.Command{
	Name:  "show",
	Usage: "pools|sessions|listeners|overlay|hints [--json] [--watch]",
	Short: "Shows what a running instance has and does",
	Long: `
Asks a running instance for its pools and their backends, its live connections
and UDP sessions, its listeners, what operators have changed at run time, or its
route hints.

The exit status is 0, 1 when the instance refuses or cannot be reached, and 2
when the command line is wrong.
`,
	CobraFunc: func(cmd *cobra.Command) {
		pools := &cobra.Command{Use: "pools [<pool>]", Short: "Shows pools and their backends", ValidArgsFunction: completing(poolNames)}
		command(shown(pools), 0, 1, showPools)

		sessions := &cobra.Command{Use: "sessions", Short: "Shows live connections and UDP sessions"}
		selecting(sessions)
		sessions.Flags().Int("limit", 0, "How many at the most; 0 is all")
		command(shown(sessions), 0, 0, showSessions)

		listeners := &cobra.Command{Use: "listeners", Short: "Shows listeners and what they have moved"}
		command(shown(listeners), 0, 0, showListeners)

		overlay := &cobra.Command{Use: "overlay", Short: "Shows what operators have changed at run time"}
		command(shown(overlay), 0, 0, showOverlay)

		hints := &cobra.Command{Use: "hints", Short: "Shows the route hints there are"}
		command(shown(hints), 0, 0, showHints)

		group(cmd, pools, sessions, listeners, overlay, hints)
	},
}

// shown adds the flags of whatever shows something.
func shown(cmd *cobra.Command) *cobra.Command {
	where(cmd)
	cmd.Flags().Bool("json", false, "Print the API's JSON")
	cmd.Flags().BoolP("watch", "w", false, "Show it again and again")
	cmd.Flags().Duration("interval", 2*time.Second, "How often, with --watch")
	return cmd
}

// selecting adds the flags that select sessions.
func selecting(cmd *cobra.Command) {
	for flag, what := range map[string]string{
		"listener": "Only those of a listener",
		"pool":     "Only those of a pool",
		"backend":  "Only those of a backend, ip:port",
		"proto":    "Only tcp or udp",
		"src":      "Only those of a client address or prefix",
	} {
		cmd.Flags().String(flag, "", what)
	}
	cmd.RegisterFlagCompletionFunc("pool", completing(poolNames))
	cmd.RegisterFlagCompletionFunc("proto", cobra.FixedCompletions([]string{"tcp", "udp"}, cobra.ShellCompDirectiveNoFileComp))
}

// selection is the query that the flags of selecting mean.
func selection(cmd *cobra.Command) url.Values {
	q := url.Values{}
	for _, key := range []string{"listener", "pool", "backend", "proto", "src"} {
		if v, _ := cmd.Flags().GetString(key); cmd.Flags().Changed(key) {
			q.Set(key, v)
		}
	}
	return q
}

// show prints the answer to a GET, once or with --watch until a signal. write
// does it for people.
func (c *console) show(path string, query url.Values, write func(ctx context.Context, w io.Writer) error) error {
	once := func(w io.Writer) error {
		if c.json {
			return c.copyJSON(w, path, query)
		}
		return write(c.ctx, w)
	}
	if watch, _ := c.cmd.Flags().GetBool("watch"); !watch {
		if c.cmd.Flags().Changed("interval") {
			return misused("--interval: needs --watch")
		}
		return once(c.out)
	}
	interval, _ := c.cmd.Flags().GetDuration("interval")
	if interval < minInterval {
		return misused("--interval: %v is less than %v", interval, minInterval)
	}
	screen := terminal(c.out)
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for n := 0; ; n++ {
		var page strings.Builder
		to := c.out
		if screen {
			to = &page // or it would flicker
		}
		err := once(to)
		var wrong *misuse
		switch {
		case err == nil:
		case n == 0 || errors.As(err, &wrong) || context.Cause(c.ctx) != nil:
			return ended(err)
		default: // it may be starting again
			fmt.Fprintf(c.errs, "%s: %s\n", c.cmd.CommandPath(), clean(err.Error()))
		}
		if screen && err == nil {
			fmt.Fprintf(c.out, "\x1b[H\x1b[2J%s", page.String())
		} else if !screen && !c.json && err == nil {
			fmt.Fprintln(c.out)
		}
		select {
		case <-c.ctx.Done():
			return ended(context.Cause(c.ctx))
		case <-tick.C:
		}
	}
}

// minInterval keeps a typing error from keeping an instance busy.
const minInterval = 100 * time.Millisecond

// ended is err, or nil for the key that everybody ends a watch with.
func ended(err error) error {
	var by *stopped
	if errors.As(err, &by) {
		return nil
	}
	return err
}

// copyJSON prints an answer as it is, and fails when it is not whole.
func (c *console) copyJSON(w io.Writer, path string, query url.Values) error {
	res, err := c.ask(c.ctx, http.MethodGet, path, query, nil)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	return c.writeJSON(w, res.Body)
}

func (c *console) writeJSON(w io.Writer, body io.Reader) error {
	check, feed := io.Pipe()
	whole := make(chan error, 1)
	go func() {
		err := wholeJSON(check)
		check.CloseWithError(err)
		whole <- err
	}()
	body = io.TeeReader(body, feed)
	var err error
	if terminal(c.out) {
		err = escaper{bufio.NewWriter(w)}.escapeFrom(body)
	} else {
		_, err = io.Copy(w, body)
	}
	feed.CloseWithError(err) // nil: the end
	if broken := <-whole; broken != nil {
		err = broken
	}
	if err != nil {
		return c.garbled(c.ctx, err)
	}
	return nil
}

// wholeJSON reads JSON to its end, and fails when that comes too early.
func wholeJSON(r io.Reader) error {
	d := json.NewDecoder(r)
	for depth, n := 0, 0; ; n++ {
		t, err := d.Token()
		switch {
		case err == io.EOF && depth == 0 && n > 0:
			return nil
		case err == io.EOF:
			return io.ErrUnexpectedEOF
		case err != nil:
			return err
		}
		switch t {
		case json.Delim('['), json.Delim('{'):
			depth++
		case json.Delim(']'), json.Delim('}'):
			depth--
		}
	}
}

func showPools(c *console, args []string) error {
	path := "/pools"
	if len(args) == 1 {
		name, err := at(args[0])
		if err != nil {
			return err
		}
		path += name
	}
	return c.show(path, nil, func(ctx context.Context, w io.Writer) error {
		var list []poolView
		var err error
		if len(args) == 1 {
			list = make([]poolView, 1)
			err = c.get(ctx, path, nil, &list[0])
		} else {
			list, err = c.pools(ctx)
		}
		if err != nil {
			return err
		}
		t := newTable(w, colourful(c.out), "POOL", "BACKEND", "STATE", "HEALTH", ">WEIGHT", ">ACTIVE", ">TOTAL", "FROM", "BALANCER", ">CHECKED", "LAST ERROR")
		for _, p := range list {
			for _, b := range p.Backends {
				checked := "-"
				if b.LastCheck != nil {
					checked = age(time.Since(*b.LastCheck)) + " ago"
				}
				t.row(p.Name, b.Addr, b.State, b.health(), fmt.Sprint(b.Weight), fmt.Sprint(b.Active), fmt.Sprint(b.Total), or(b.Origin), p.Balancer, checked, or(b.LastError))
			}
			if len(p.Backends) == 0 {
				t.row(p.Name, "none", "-", "-", "-", "-", "-", or(p.Source), p.Balancer, "-", "-")
			}
		}
		return t.end()
	})
}

func showSessions(c *console, _ []string) error {
	q := selection(c.cmd)
	switch limit, _ := c.cmd.Flags().GetInt("limit"); {
	case limit < 0:
		return misused("--limit: %d is negative", limit)
	case limit > 0:
		q.Set("limit", strconv.Itoa(limit))
	}
	return c.show("/sessions", q, func(ctx context.Context, w io.Writer) error {
		t := newTable(w, colourful(c.out), "ID", "PROTO", "LISTENER", "CLIENT", "POOL", "BACKEND", ">AGE", ">IDLE", ">C2S", ">S2C")
		err := each(ctx, c.client, "/sessions", q, func(s *sessionView) error {
			t.row(s.ID, s.Proto, or(s.Listener), s.Peer, or(s.Pool), or(s.Backend), age(s.age()), age(s.idle()), amount(float64(s.BytesC2S)), amount(float64(s.BytesS2C)))
			return nil
		})
		return errors.Join(t.end(), err)
	})
}

func showListeners(c *console, _ []string) error {
	return c.show("/listeners", nil, func(ctx context.Context, w io.Writer) error {
		list, err := c.listeners(ctx)
		if err != nil {
			return err
		}
		t := newTable(w, colourful(c.out), "LISTENER", ">TCP", ">UDP", ">TCP TOTAL", ">UDP TOTAL", ">C2S", ">S2C", ">DROPPED", "BOUND")
		for _, l := range list {
			bound := strings.Join(l.Bound, " ")
			if !l.Configured {
				bound = "not in the config"
			}
			t.row(l.Name, fmt.Sprint(l.Connections), fmt.Sprint(l.Sessions), fmt.Sprint(l.ConnectionsTotal), fmt.Sprint(l.SessionsTotal),
				amount(float64(l.BytesC2S)), amount(float64(l.BytesS2C)), fmt.Sprint(l.Dropped), or(bound))
		}
		return t.end()
	})
}

func showHints(c *console, _ []string) error {
	return c.show("/route-hints", nil, func(ctx context.Context, w io.Writer) error {
		t := newTable(w, colourful(c.out), "CLIENT", "POOL", ">LEFT")
		err := each(ctx, c.client, "/route-hints", nil, func(h *hintView) error {
			t.row(h.SrcIP, h.Pool, age(time.Duration(h.TTLSec)*time.Second))
			return nil
		})
		return errors.Join(t.end(), err)
	})
}
