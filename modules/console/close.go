package console

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
)

var closeCommand = caddycmd.Command{
	Name:  "close",
	Usage: "session <id>... | session --pool|--backend|--src|--listener|--proto <value> --yes",
	Short: "Ends sessions of a running instance",
	Long: `
Ends connections and UDP sessions with the reason admin, by their IDs or all that
flags select. Without --yes the latter only says how many that would be. They
may come back at once: that is what set backend ... draining is for.
`,
	CobraFunc: func(cmd *cobra.Command) {
		session := &cobra.Command{Use: "session [<id>...]", Short: "Ends connections and UDP sessions", ValidArgsFunction: cobra.NoFileCompletions}
		selecting(session)
		session.Flags().Bool("yes", false, "End all that the flags select")
		where(session)
		command(session, 0, -1, closeSessions)
		group(cmd, session)
	},
}

// closers is how many sessions are ended at a time.
const closers = 8

func closeSessions(c *console, ids []string) error {
	q := selection(c.cmd)
	yes, _ := c.cmd.Flags().GetBool("yes")
	switch {
	case len(ids) == 0 && len(q) == 0:
		return misused("say which: IDs, as in u-3f2a, or --pool, --backend, --src, --listener, --proto")
	case len(ids) > 0 && len(q) > 0:
		return misused("IDs and flags that select are one too many")
	case len(ids) > 0 && yes:
		return misused("--yes: goes with flags that select; IDs need no confirmation")
	}
	selected := len(ids) == 0
	if selected {
		err := each(c.ctx, c.client, "/sessions", q, func(s *sessionView) error {
			ids = append(ids, s.ID)
			return nil
		})
		if err != nil {
			return err
		}
		if !yes && len(ids) > 0 {
			return misused("sessions that this would end: %d; say --yes to end them", len(ids))
		}
	}
	slices.Sort(ids)
	ids = slices.Compact(ids)
	ended, gone, err := c.end(ids)
	if selected { // who has left meanwhile is what was wanted
		gone = nil
	}
	fmt.Fprintf(c.out, "ended: %d\n", ended)
	return errors.Join(append(gone, err)...)
}

// end ends sessions. gone are answers that there is none of an ID; another
// error ends it all.
func (c *console) end(ids []string) (ended int, gone []error, err error) {
	work := make(chan string)
	var mu sync.Mutex // guards the results
	var workers sync.WaitGroup
	for range min(closers, len(ids)) {
		workers.Go(func() {
			for id := range work {
				oneErr := c.closeOne(id)
				mu.Lock()
				var no *refusal
				switch {
				case oneErr == nil:
					ended++
				case errors.As(oneErr, &no) && (no.status == http.StatusNotFound || no.status == http.StatusBadRequest):
					gone = append(gone, oneErr)
				case err == nil:
					err = oneErr
				}
				mu.Unlock()
			}
		})
	}
	for _, id := range ids {
		mu.Lock()
		failed := err != nil
		mu.Unlock()
		if failed {
			break
		}
		work <- id
	}
	close(work)
	workers.Wait()
	return ended, gone, err
}

func (c *console) closeOne(id string) error {
	path, err := at("sessions", id)
	if err != nil {
		return err
	}
	res, err := c.ask(c.ctx, http.MethodDelete, path, nil, nil)
	if err != nil {
		return err
	}
	return res.Body.Close()
}
