package listener

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// WriteText writes the explanation for people: a line for every step, and what
// belongs to a step below it.
func (e *Explanation) WriteText(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s → %s on listener %s\n", e.Network, e.Src, e.Dst, e.Listener)
	for i := range e.Steps {
		e.Steps[i].text(&b)
	}
	fmt.Fprintf(&b, "end      %s\n", e.End.text())
	_, err := io.WriteString(w, b.String())
	return err
}

func (s *Step) text(b *strings.Builder) {
	fmt.Fprintf(b, "%-8s ", s.Kind)
	switch s.Kind {
	case "bytes":
		fmt.Fprintf(b, "%d seen", s.Bytes)
		if s.Datagrams > 0 {
			fmt.Fprintf(b, " in %d datagrams", s.Datagrams)
		}
	case "route":
		fmt.Fprintf(b, "%d %s", *s.Route, s.Verdict)
	case "handler":
		fmt.Fprintf(b, "%s of route %d", s.Name, *s.Route)
	default:
		b.WriteString(strings.TrimSpace(s.Name + " " + s.Verdict))
	}
	s.hint(b)
	if s.Account != nil {
		s.Account.text(b)
	}
	if s.Reason != "" {
		fmt.Fprintf(b, " (%s)", s.Reason)
	}
	b.WriteByte('\n')
	for _, m := range s.Matchers {
		fmt.Fprintf(b, "           %s: %s", m.Name, m.Verdict)
		if m.Set > 0 {
			fmt.Fprintf(b, ", set %d", m.Set)
		}
		if m.Reason != "" {
			fmt.Fprintf(b, " (%s)", m.Reason)
		}
		b.WriteByte('\n')
	}
	if s.Account == nil {
		return
	}
	for _, c := range s.Backends {
		c.text(b)
	}
}

// hint writes what a sniffer has read. It is from the client: quoted.
func (s *Step) hint(b *strings.Builder) {
	if s.Host != "" {
		fmt.Fprintf(b, " host=%q", s.Host)
	}
	if s.Key != "" {
		fmt.Fprintf(b, " key=%q", s.Key)
	}
	for _, name := range slices.Sorted(maps.Keys(s.Parts)) {
		fmt.Fprintf(b, " %s=%q", name, s.Parts[name])
	}
	if s.Reject {
		b.WriteString(" reject")
	}
}

func (a *Account) text(b *strings.Builder) {
	switch {
	case a.Asks != "":
		fmt.Fprintf(b, ": would ask %s", a.Asks)
	case a.Server != "":
		fmt.Fprintf(b, ": to the server on %s", a.Server)
	case a.Next:
		b.WriteString(": on to the next route")
	case a.Rejects:
		b.WriteString(": closed or dropped")
	case a.Backend != "":
		fmt.Fprintf(b, ": pool %s, backend %s", a.Pool, a.Backend)
		if a.Target != "" {
			fmt.Fprintf(b, " at %s", a.Target)
		}
	default:
		fmt.Fprintf(b, ": pool %s", a.Pool)
	}
	if a.Header != "" {
		fmt.Fprintf(b, ", header %s", a.Header)
	}
}

func (c *Backend) text(b *strings.Builder) {
	health := "healthy"
	if !c.Healthy {
		health = "down"
	}
	fmt.Fprintf(b, "           %s %s %s weight=%d active=%d", c.Addr, health, c.State, c.Weight, c.Active)
	if c.Full {
		b.WriteString(", at a limit")
	}
	if !c.Candidate {
		b.WriteString(", takes no new flows")
	}
	b.WriteByte('\n')
}

func (o *Outcome) text() string {
	var parts []string
	switch o.What {
	case EndPool:
		parts = append(parts, "goes to pool "+o.Pool)
		if o.Backend != "" {
			parts = append(parts, "backend "+o.Backend)
		}
	default:
		parts = append(parts, strings.ReplaceAll(o.What, "_", " "))
	}
	if o.Route != nil {
		parts = append(parts, fmt.Sprintf("route %d", *o.Route))
	}
	s := strings.Join(parts, ", ")
	if o.Reason != "" {
		s += " (" + o.Reason + ")"
	}
	return s
}
