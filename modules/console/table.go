package console

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/term"
)

// clean is s with everything escaped that a terminal could obey: names, errors
// and actors in an answer come from other people, and some from players.
func clean(s string) string {
	if !strings.ContainsFunc(s, unsafe) {
		return s
	}
	var b strings.Builder
	for i, r := range s {
		switch {
		case r == utf8.RuneError && !strings.HasPrefix(s[i:], "\uFFFD"):
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case !unsafe(r):
			b.WriteRune(r)
		case r < 0x10000:
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			fmt.Fprintf(&b, `\U%08x`, r)
		}
	}
	return b.String()
}

// unsafe reports control characters, marks that change the direction of text,
// line separators and bytes that are no UTF-8.
func unsafe(r rune) bool { return r == utf8.RuneError || !unicode.IsPrint(r) }

// escaper passes JSON on to a terminal, with what clean escapes written as JSON
// writes it. Where there is no terminal, JSON is passed on as it is.
type escaper struct{ w *bufio.Writer }

// escapeFrom copies JSON from r.
func (e escaper) escapeFrom(r io.Reader) error {
	in := bufio.NewReader(r)
	for {
		c, n, err := in.ReadRune()
		switch {
		case err == io.EOF:
			return e.w.Flush()
		case err != nil:
			return err
		case c == '\n' || c == '\t' || c != utf8.RuneError && unicode.IsPrint(c):
			_, err = e.w.WriteRune(c)
		case c == utf8.RuneError && n == 1:
			_, err = e.w.WriteString(`\ufffd`)
		case c >= 0x10000:
			hi, lo := (c-0x10000)>>10+0xd800, (c-0x10000)&0x3ff+0xdc00
			_, err = fmt.Fprintf(e.w, `\u%04x\u%04x`, hi, lo)
		default:
			_, err = fmt.Fprintf(e.w, `\u%04x`, c)
		}
		if err != nil {
			return err
		}
	}
}

// terminal reports whether w is one.
func terminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// colourful reports whether w is a terminal that may have colours.
func colourful(w io.Writer) bool {
	return terminal(w) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}

// The colours of words that matter.
const (
	green  = "\x1b[32m"
	yellow = "\x1b[33m"
	red    = "\x1b[31m"
	plain  = "\x1b[0m"
)

var colours = map[string]string{
	"healthy": green, "enabled": green,
	"draining": yellow, "disabled": yellow,
	"unhealthy": red, "down": red,
}

// A column of a table. A right one has numbers.
type column struct {
	name  string
	right bool
}

func columns(names ...string) (list []column) {
	for _, n := range names {
		name, right := strings.CutPrefix(n, ">")
		list = append(list, column{name, right})
	}
	return list
}

// held is how many rows a table looks at to find how wide its columns are.
// Later rows are written as they come.
const held = 512

// table writes rows in columns. It is not kept in memory as a whole.
type table struct {
	w       *bufio.Writer
	colours bool
	whole   bool // all rows are held until the end
	absent  int  // rows there are beside those that were added
	cols    []column
	widths  []int // nil while rows are held
	rows    [][]string
}

func newTable(w io.Writer, colours bool, names ...string) *table {
	return &table{w: bufio.NewWriter(w), colours: colours, cols: columns(names...)}
}

// row adds one. What it has need not be clean.
func (t *table) row(cells ...string) {
	for i := range cells {
		cells[i] = clean(cells[i])
	}
	if t.widths != nil {
		t.write(cells)
		return
	}
	if t.rows = append(t.rows, cells); len(t.rows) == held && !t.whole {
		t.settle()
	}
}

// settle fixes the widths and writes the rows so far.
func (t *table) settle() {
	t.widths = make([]int, len(t.cols))
	head := make([]string, len(t.cols))
	for i, c := range t.cols {
		head[i], t.widths[i] = c.name, len(c.name)
		for _, r := range t.rows {
			t.widths[i] = max(t.widths[i], utf8.RuneCountInString(r[i]))
		}
	}
	t.write(head)
	for _, r := range t.rows {
		t.write(r)
	}
	t.rows = nil
}

func (t *table) write(cells []string) {
	for i, s := range cells {
		pad := strings.Repeat(" ", max(t.widths[i]-utf8.RuneCountInString(s), 0))
		last := i == len(cells)-1
		if t.cols[i].right {
			t.w.WriteString(pad)
		}
		if c := colours[s]; c != "" && t.colours {
			t.w.WriteString(c + s + plain)
		} else {
			t.w.WriteString(s)
		}
		if !t.cols[i].right && !last {
			t.w.WriteString(pad)
		}
		if !last {
			t.w.WriteString("  ")
		}
	}
	t.w.WriteByte('\n')
}

// end writes what is left.
func (t *table) end() error {
	if t.widths == nil {
		t.settle()
	}
	return t.w.Flush()
}

// or is s, or a dash where there is nothing to say.
func or(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// amount writes a number of bytes or packets with three digits: 999, 12.3k,
// 4.56M.
func amount(n float64) string {
	if n < 1000 {
		return strconv.FormatFloat(n, 'f', 0, 64)
	}
	const units = "kMGTPE"
	i := -1
	for n >= 999.5 && i < len(units)-1 {
		n /= 1000
		i++
	}
	digits := 2
	switch {
	case n >= 99.95:
		digits = 0
	case n >= 9.995:
		digits = 1
	}
	return strconv.FormatFloat(n, 'f', digits, 64) + units[i:i+1]
}

// age writes a duration with its two largest units: 12s, 3m05s, 2h07m, 3d04h.
func age(d time.Duration) string {
	s := int64(max(d, 0) / time.Second)
	switch {
	case s < 60:
		return fmt.Sprintf("%ds", s)
	case s < 3600:
		return fmt.Sprintf("%dm%02ds", s/60, s%60)
	case s < 86400:
		return fmt.Sprintf("%dh%02dm", s/3600, s/60%60)
	}
	return fmt.Sprintf("%dd%02dh", s/86400, s/3600%24)
}

// alternatives lists names as a sentence does.
func alternatives(names []string) string {
	if len(names) < 2 {
		return strings.Join(names, "")
	}
	return strings.Join(names[:len(names)-1], ", ") + " or " + names[len(names)-1]
}
