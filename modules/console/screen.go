package console

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/term"
)

// errNoScreen says that there is no terminal to draw on and to read keys from.
var errNoScreen = errors.New("no terminal")

// screen is a terminal that belongs to us until restore.
type screen struct {
	out  *os.File
	in   *os.File
	was  *term.State
	once sync.Once
}

const (
	enterScreen = "\x1b[?1049h\x1b[?25l" // another page, no cursor
	leaveScreen = "\x1b[?25h\x1b[?1049l"
	topLeft     = "\x1b[H"
	restOfLine  = "\x1b[K"
	restOfPage  = "\x1b[J"
)

// openScreen takes the terminal over.
func openScreen(out io.Writer) (*screen, error) {
	f, ok := out.(*os.File)
	if !ok || !terminal(out) || !terminal(os.Stdin) || os.Getenv("TERM") == "dumb" {
		return nil, errNoScreen
	}
	was, err := term.MakeRaw(int(os.Stdin.Fd()))
	if err != nil {
		return nil, fmt.Errorf("setting the terminal up: %w", err)
	}
	s := &screen{out: f, in: os.Stdin, was: was}
	if _, err := f.WriteString(enterScreen); err != nil {
		s.restore()
		return nil, err
	}
	return s, nil
}

// restore gives the terminal back as it was.
func (s *screen) restore() {
	s.once.Do(func() {
		s.out.WriteString(leaveScreen)
		term.Restore(int(s.in.Fd()), s.was)
	})
}

// run shows the view until a key or a signal ends it. The keys are read in a
// goroutine of their own, and so is the instance asked, so that one that does
// not answer keeps nobody from leaving.
func (s *screen) run(c *console, v *view, sessions int) error {
	v.keys = true
	keys := make(chan byte)
	go s.read(c.ctx, keys)
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, syscall.SIGWINCH)
	defer signal.Stop(resized)

	type answer struct {
		s   *sample
		err error
	}
	answers := make(chan answer, 1)
	ctx, cancel := context.WithCancel(c.ctx)
	defer cancel()
	asking := false
	due := time.NewTimer(v.interval)
	defer due.Stop()
	for {
		if err := s.draw(v); err != nil {
			return err
		}
		select {
		case <-c.ctx.Done():
			return context.Cause(c.ctx)
		case k, ok := <-keys:
			if !ok || !v.press(k) {
				return nil
			}
			due.Reset(v.interval)
		case <-resized:
		case a := <-answers:
			asking = false
			v.take(a.s, a.err)
		case <-due.C:
			due.Reset(v.interval)
			if asking || v.paused {
				continue
			}
			asking = true
			go func() {
				s, err := c.take(ctx, sessions)
				answers <- answer{s, err}
			}()
		}
	}
}

// read passes keys on until the terminal is gone.
func (s *screen) read(ctx context.Context, keys chan<- byte) {
	defer close(keys)
	var b [64]byte
	var esc escapes
	for {
		n, err := s.in.Read(b[:])
		if err != nil || n == 0 {
			return
		}
		for _, k := range b[:n] {
			if esc.has(k) {
				continue
			}
			select {
			case keys <- k:
			case <-ctx.Done():
				return
			}
		}
	}
}

// escapes finds the bytes of keys that send several, such as arrows.
type escapes struct{ last byte }

// The parts of such a sequence: ESC [ parameters letter, or ESC O letter.
const (
	escKey = 0x1b
	escCSI = '['
	escSS3 = 'O'
)

// has reports whether the next byte is one of them.
func (e *escapes) has(b byte) bool {
	was := e.last
	e.last = 0
	switch {
	case b == escKey, was == escKey && (b == escCSI || b == escSS3):
		e.last = b
	case was == escCSI:
		if b < 0x40 || b > 0x7e { // not its end
			e.last = escCSI
		}
	case was != escSS3:
		return false
	}
	return true
}

// press does what a key is for, and reports whether to go on.
func (v *view) press(key byte) bool {
	const ctrlC, ctrlD = 3, 4
	switch key {
	case 'q', 'Q', ctrlC, ctrlD:
		return false
	case 's':
		v.by = (v.by + 1) % orders
	case 'p', ' ':
		v.paused = !v.paused
	case '+':
		v.interval = min(2*v.interval, longestTop)
	case '-':
		v.interval = max(v.interval/2, shortestTop)
	}
	return true
}

// draw writes the view over what is there.
func (s *screen) draw(v *view) error {
	width, height, err := term.GetSize(int(s.out.Fd()))
	if err != nil || width <= 0 || height <= 0 {
		width, height = 80, 24
	}
	var b strings.Builder
	b.WriteString(topLeft)
	for i, l := range v.lines(width, height) {
		if i > 0 {
			b.WriteString("\r\n")
		}
		b.WriteString(l + restOfLine)
	}
	b.WriteString(restOfPage)
	_, err = s.out.WriteString(b.String())
	return err
}
