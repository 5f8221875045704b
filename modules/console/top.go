package console

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
)

var topCommand = caddycmd.Command{
	Name:  "top",
	Usage: "[--interval <duration>] [--sessions <number>] [--once]",
	Short: "Watches a running instance on the terminal",
	Long: `
Shows how much passes through an instance, by listener, by backend and by session,
and how much of it in a second. Backends that get no new clients come first.

Keys: q ends, s sorts the sessions by something else, p or space pauses, + and -
change the interval. Without a terminal, and with --once, it prints what has
happened within one interval and ends.
`,
	CobraFunc: func(cmd *cobra.Command) {
		where(cmd)
		cmd.Flags().Duration("interval", 2*time.Second, "How often to ask")
		cmd.Flags().Int("sessions", 5000, "How many sessions to look at; 0 is none")
		cmd.Flags().String("sort", orderNames[byRate], "What to sort the sessions by: "+alternatives(orderNames[:]))
		cmd.Flags().Bool("once", false, "Print once and end")
		cmd.RegisterFlagCompletionFunc("sort", cobra.FixedCompletions(orderNames[:], cobra.ShellCompDirectiveNoFileComp))
		command(cmd, 0, 0, top)
	},
}

// The bounds of the interval, which keys double and halve.
const (
	shortestTop = 250 * time.Millisecond
	longestTop  = time.Minute
)

// view is what top shows and how.
type view struct {
	name        string // of the instance
	before, now *sample
	failed      error // of the last time it was asked
	by          order
	interval    time.Duration
	paused      bool
	colours     bool
	keys        bool // there is somebody to press them
}

// take takes another sample. One that fails leaves the last one shown.
func (v *view) take(s *sample, err error) {
	if v.failed = err; err == nil {
		v.before, v.now = v.now, s
	}
}

func top(c *console, _ []string) error {
	v := &view{name: c.name}
	v.interval, _ = c.cmd.Flags().GetDuration("interval")
	if v.interval < shortestTop || v.interval > longestTop {
		return misused("--interval: %v is not from %v to %v", v.interval, shortestTop, longestTop)
	}
	sessions, _ := c.cmd.Flags().GetInt("sessions")
	if sessions < 0 {
		return misused("--sessions: %d is negative", sessions)
	}
	sort, _ := c.cmd.Flags().GetString("sort")
	by := slices.Index(orderNames[:], sort)
	if by < 0 {
		return misused("--sort: %q is none of %s", sort, alternatives(orderNames[:]))
	}
	v.by = order(by)
	v.colours = colourful(c.out)
	first, err := c.take(c.ctx, sessions) // whoever cannot be asked is told of on an ordinary screen
	if err != nil {
		return err
	}
	v.take(first, nil)
	if once, _ := c.cmd.Flags().GetBool("once"); !once {
		switch s, err := openScreen(c.out); {
		case err == nil:
			defer s.restore()
			return s.run(c, v, sessions)
		case !errors.Is(err, errNoScreen):
			return err
		}
	}
	wait := time.NewTimer(v.interval)
	defer wait.Stop()
	select {
	case <-wait.C:
	case <-c.ctx.Done():
		return ended(c.ctx.Err())
	}
	second, err := c.take(c.ctx, sessions)
	if err != nil {
		return err
	}
	v.take(second, nil)
	for _, l := range v.lines(0, 0) {
		fmt.Fprintln(c.out, l)
	}
	return nil
}

// lines are what is to be seen on a screen of that size; 0 is no bound. None is
// wider, and none has anything in it that a terminal obeys but colours.
func (v *view) lines(width, height int) []string {
	now, before := v.now, v.before
	var over time.Duration
	if before != nil {
		over = now.at.Sub(before.at)
	}
	var list []string
	add := func(format string, args ...any) { list = append(list, clean(fmt.Sprintf(format, args...))) }

	status := "every " + v.interval.String()
	switch {
	case v.paused:
		status = "paused"
	case v.failed != nil:
		status = "not answered: " + v.failed.Error()
	}
	add("%s  %s  %s  %s", v.name, now.at.Format(time.TimeOnly), now.ready, status)

	was := map[string]*listenerView{}
	if before != nil {
		for i := range before.listeners {
			was[before.listeners[i].Name] = &before.listeners[i]
		}
	}
	var sum rates
	var conns, sessions int64
	listeners := v.table("LISTENER", ">TCP", ">UDP", ">NEW/S", ">C2S/S", ">S2C/S", ">PACKETS/S", ">DROPPED/S")
	for i := range now.listeners {
		l := &now.listeners[i]
		r := listenerRates(was[l.Name], l, over)
		sum = sum.plus(r)
		conns, sessions = conns+l.Connections, sessions+l.Sessions
		listeners.row(l.Name, fmt.Sprint(l.Connections), fmt.Sprint(l.Sessions), amount(r.opened), amount(r.c2s), amount(r.s2c), amount(r.packets), amount(r.dropped))
	}
	add("%d connections  %d sessions  %s new/s  %s B/s in  %s B/s out  %s packets/s  %s dropped/s",
		conns, sessions, amount(sum.opened), amount(sum.c2s), amount(sum.s2c), amount(sum.packets), amount(sum.dropped))

	backends := v.table("POOL", "BACKEND", "STATE", "HEALTH", ">ACTIVE", ">NEW/S", "LAST ERROR")
	for _, b := range troubled(before, now) {
		backends.row(b.pool, b.Addr, b.State, b.health(), fmt.Sprint(b.Active), amount(b.opened), or(b.LastError))
	}
	players := v.table("ID", "LISTENER", "CLIENT", "POOL", "BACKEND", ">AGE", ">IDLE", ">C2S/S", ">S2C/S", ">BYTES")
	all := busiest(before, now, v.by)
	for _, b := range all[:min(len(all), mostPlayers)] {
		players.row(b.ID, or(b.Listener), b.Peer, or(b.Pool), or(b.Backend), age(b.age()), age(b.idle()), amount(b.c2s), amount(b.s2c), amount(float64(b.BytesC2S+b.BytesS2C)))
	}
	players.absent = len(all) - len(players.rows)
	room := 0
	if height > 0 {
		room = max(height-len(list), 1)
	}
	list = append(list, v.fit(room, now.cut, listeners, backends, players)...)
	if height > 0 {
		list = list[:min(len(list), height)]
	}
	for i, l := range list {
		list[i] = clip(l, width)
	}
	return list
}

// mostPlayers is how many sessions are written at all.
const mostPlayers = 100

func (v *view) table(names ...string) *table {
	t := newTable(nil, v.colours, names...)
	t.whole = true
	return t
}

// fit shares the height between the tables: a quarter for listeners, half of
// what is left for backends, and the rest for sessions.
func (v *view) fit(height int, cut bool, listeners, backends, players *table) []string {
	footer := "sorted by " + orderNames[v.by]
	if cut {
		footer += fmt.Sprintf("; of the first %d sessions", len(v.now.sessions))
	}
	if v.keys {
		footer = "q quit  s sort  p pause  + - interval   " + footer
	}
	most := []int{-1, -1, -1} // rows of each; -1: all
	if height > 0 {
		room := max(height-1-2*3, 0) // without the footer and, of each, a blank line and the head
		for i, t := range []*table{listeners, backends, players} {
			share := room
			if i < 2 {
				share = max(room/(4-2*i), 1)
			}
			most[i] = min(len(t.rows), share)
			room -= most[i]
		}
	}
	var lines []string
	for i, t := range []*table{listeners, backends, players} {
		lines = append(lines, "")
		lines = append(lines, t.lines(most[i])...)
	}
	if height > 0 && len(lines) > height-1 {
		lines = lines[:max(height-1, 0)]
	}
	return append(lines, footer)
}

// lines are a table's with the first most rows; of what is left out there is a
// word in the head.
func (t *table) lines(most int) []string {
	total := len(t.rows) + t.absent
	if most >= 0 && most < len(t.rows) {
		t.rows = t.rows[:most]
	}
	if n := len(t.rows); n < total {
		t.cols[0].name = fmt.Sprintf("%s (%d of %d)", t.cols[0].name, n, total)
	}
	var b bytes.Buffer
	t.w.Reset(&b)
	t.end()
	return strings.Split(strings.TrimRight(b.String(), "\n"), "\n")
}

// clip cuts a line to a width, 0 for any. Colours take no room.
func clip(line string, width int) string {
	if width <= 0 || utf8.RuneCountInString(line) <= width {
		return line
	}
	var b strings.Builder
	n, coloured := 0, false
	for i := 0; i < len(line); {
		if line[i] == '\x1b' {
			end := i + strings.IndexByte(line[i:], 'm') + 1
			b.WriteString(line[i:end])
			coloured = line[i:end] != plain
			i = end
			continue
		}
		r, size := utf8.DecodeRuneInString(line[i:])
		if n++; n > width {
			break
		}
		b.WriteRune(r)
		i += size
	}
	if coloured {
		b.WriteString(plain)
	}
	return b.String()
}
