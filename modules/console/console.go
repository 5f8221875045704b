// Package console has the commands that ask a running instance and change it:
// show, set, add, del, drain, undrain, close, overlay, explain, health and top. They
// speak the admin API, on Caddy's admin endpoint or on a site that serves it, and
// know nothing of the data plane.
//
//	client.go   where the API is, who asks, and what it answers
//	table.go    what people see of an answer
//	show.go     show
//	change.go   set, add, del
//	drain.go    drain, undrain
//	close.go    close
//	overlay.go  overlay; promote.go and block.go make a config of it
//	explain.go  explain
//	health.go   health
//	top.go      top: what there is to see, by interval
//	screen.go   …and the terminal it is seen on
package console

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
)

// The exit statuses.
const (
	exitRefused = 1 // the instance refuses, cannot be reached, or there is something left to do
	exitUsage   = 2 // the command line is wrong; nothing was asked
)

func init() {
	for _, c := range []caddycmd.Command{showCommand, setCommand, addCommand, delCommand, drainCommand, undrainCommand, closeCommand, overlayCommand, topCommand, explainCommand, healthCommand} {
		caddycmd.RegisterCommand(c)
	}
}

// misuse is a mistake on the command line.
type misuse struct{ text string }

func (m *misuse) Error() string { return m.text }

func misused(format string, args ...any) error { return &misuse{fmt.Sprintf(format, args...)} }

// stopped is the end of a command by a signal.
type stopped struct{ signal syscall.Signal }

func (s *stopped) Error() string { return s.signal.String() }

// A console is what a command works with: where it writes, and the instance.
type console struct {
	*client
	ctx  context.Context // ends with a signal
	cmd  *cobra.Command
	out  io.Writer
	errs io.Writer
	json bool // the API's JSON is wanted
}

// action is what a command does with its arguments.
type action func(c *console, args []string) error

// command makes cmd run do with from least to most arguments, most -1 for any
// number. Mistakes are told in one line, without Caddy's logger: these commands
// are for people and for scripts that read the status.
func command(cmd *cobra.Command, least, most int, do action) {
	cmd.Args = cobra.ArbitraryArgs
	cmd.SilenceErrors = true
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return end(cmd, flagError(err)) })
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if n := len(args); n < least || most >= 0 && n > most {
			return end(cmd, misused("want: %s", cmd.UseLine()))
		}
		cl, err := newClient(cmd)
		if err != nil {
			return end(cmd, err)
		}
		ctx, stop := notified()
		defer stop()
		c := &console{client: cl, ctx: ctx, cmd: cmd, out: cmd.OutOrStdout(), errs: cmd.ErrOrStderr()}
		c.json, _ = cmd.Flags().GetBool("json")
		return end(cmd, do(c, args))
	}
}

// group makes cmd the parent of commands, which says which there are.
func group(cmd *cobra.Command, subs ...*cobra.Command) {
	cmd.AddCommand(subs...)
	cmd.SilenceErrors = true
	cmd.Args = cobra.ArbitraryArgs
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return end(cmd, flagError(err)) })
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		var names []string
		for _, s := range subs {
			names = append(names, s.Name())
		}
		if len(args) == 0 {
			return end(cmd, misused("say what: %s", alternatives(names)))
		}
		return end(cmd, misused("%q is none of %s", args[0], alternatives(names)))
	}
}

// notified is a context that ends, with the signal as its cause, when one asks
// the command to.
func notified() (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	ch := make(chan os.Signal, 1)
	signal.Notify(ch, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	go func() {
		select {
		case s := <-ch:
			cancel(&stopped{s.(syscall.Signal)})
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		signal.Stop(ch)
		cancel(nil)
	}
}

// flagError says of a token why there is no such flag.
func flagError(err error) error {
	if err.Error() == "unknown flag: --token" {
		return misused("--token: there is no such flag, for everybody on this host can read a command's arguments; name a file with --token-file or set %s", envToken)
	}
	return &misuse{err.Error()}
}

// end tells of an error and has the process end with the status for it.
func end(cmd *cobra.Command, err error) error {
	if err == nil {
		return nil
	}
	status := exitRefused
	var wrong *misuse
	var by *stopped
	switch {
	case errors.As(err, &by):
		status = 128 + int(by.signal)
	case errors.As(err, &wrong):
		status = exitUsage
		fallthrough
	default:
		for _, e := range list(err) {
			fmt.Fprintf(cmd.ErrOrStderr(), "%s: %s\n", cmd.CommandPath(), clean(e.Error()))
		}
	}
	if status == exitRefused {
		return err
	}
	// Caddy's way to any other status than 1.
	return caddycmd.WrapCommandFuncForCobra(func(caddycmd.Flags) (int, error) { return status, nil })(cmd, nil)
}

// list takes apart what errors.Join has put together.
func list(err error) []error {
	if several, ok := err.(interface{ Unwrap() []error }); ok {
		return several.Unwrap()
	}
	return []error{err}
}
