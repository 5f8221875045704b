package filter

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
	"github.com/wayhouse-proxy/wayhouse/internal/strictjson"
)

func init() { caddy.RegisterModule(new(ACL)) }

// ACL lets flows in by the client's address. Whoever is denied stays outside;
// when anything is said about allowing, whoever is not allowed does too.
type ACL struct {
	// Networks and single addresses that are allowed. An IPv6 address that
	// carries an IPv4 address is that address. Placeholders are replaced at load.
	Allow []string `json:"allow,omitempty"`

	// Networks and single addresses that are denied, whatever is allowed.
	Deny []string `json:"deny,omitempty"`

	// Files with networks that are denied, one on each line; what follows # or ;
	// is a comment. They are read at load and again whenever they change; one that
	// is gone or wrong by then leaves the list as it was. Placeholders are replaced
	// at load.
	Files []string `json:"files,omitempty"`

	// URLs of such files, https:// or, on loopback, http://. They are asked when
	// the config starts and after each refresh_interval; a failure leaves the list
	// as it was, which is kept for a restart of the process too. A config whose list
	// has never been fetched is not loaded while it cannot be. Placeholders are
	// replaced at load.
	URLs []string `json:"urls,omitempty"`

	// Files with networks that are allowed.
	AllowFiles []string `json:"allow_files,omitempty"`

	// URLs of networks that are allowed.
	AllowURLs []string `json:"allow_urls,omitempty"`

	// How often a URL is asked, from 10s to 24h. Default: 1h.
	RefreshInterval *caddy.Duration `json:"refresh_interval,omitempty"`

	allow, deny           *cidr.Set
	allowLists, denyLists []*list
	remote                []remote
	closed                bool // who is not allowed is refused
	interval              time.Duration
	logger                *zap.Logger
	started               []*list
}

const (
	defaultRefresh = time.Hour
	minRefresh     = 10 * time.Second
	maxRefresh     = 24 * time.Hour
)

// CaddyModule returns the Caddy module information.
func (*ACL) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse.filters.acl",
		New: func() caddy.Module { return new(ACL) },
	}
}

// UnmarshalJSON decodes the filter with errors that name the key.
func (a *ACL) UnmarshalJSON(b []byte) error {
	type plain ACL
	return strictjson.Unmarshal(b, (*plain)(a))
}

// Provision reads networks and files.
func (a *ACL) Provision(ctx caddy.Context) error {
	a.logger = ctx.Logger()
	a.interval = defaultRefresh
	if a.RefreshInterval != nil {
		a.interval = time.Duration(*a.RefreshInterval)
	}
	repl := caddy.NewReplacer()
	var err error
	if a.allow, err = networks(repl, a.Allow); err != nil {
		return fmt.Errorf("allow%w", err)
	}
	if a.deny, err = networks(repl, a.Deny); err != nil {
		return fmt.Errorf("deny%w", err)
	}
	for _, part := range []struct {
		key   string
		names []string
		kind  listKind
		to    *[]*list
	}{
		{"files", a.Files, fileList, &a.denyLists},
		{"urls", a.URLs, urlList, &a.denyLists},
		{"allow_files", a.AllowFiles, fileList, &a.allowLists},
		{"allow_urls", a.AllowURLs, urlList, &a.allowLists},
	} {
		for i, name := range part.names {
			path := fmt.Sprintf("%s[%d]", part.key, i)
			l, err := takeList(part.kind, repl.ReplaceAll(name, ""))
			if l != nil {
				*part.to = append(*part.to, l)
			}
			if err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
			if part.kind == urlList {
				a.remote = append(a.remote, remote{path, l})
			}
		}
	}
	a.closed = len(a.Allow)+len(a.allowLists) > 0
	return nil
}

func networks(repl *caddy.Replacer, from []string) (*cidr.Set, error) {
	set := new(cidr.Set)
	for i, n := range from {
		if err := set.Add(repl.ReplaceAll(n, "")); err != nil {
			return nil, fmt.Errorf("[%d]: %w", i, err)
		}
	}
	return set, nil
}

// Validate checks what Provision has left.
func (a *ACL) Validate() error {
	switch {
	case len(a.Allow)+len(a.Deny)+len(a.allowLists)+len(a.denyLists) == 0:
		return errors.New("allow, deny, files, urls, allow_files and allow_urls are all empty: it would let everybody in; give a network, such as 203.0.113.0/24")
	case a.interval < minRefresh || a.interval > maxRefresh:
		return fmt.Errorf("refresh_interval: %v is not from %v to %v", a.interval, minRefresh, maxRefresh)
	case a.RefreshInterval != nil && len(a.URLs)+len(a.AllowURLs) == 0:
		return errors.New("refresh_interval: there is no URL to ask again; files are watched")
	}
	return nil
}

// Cleanup gives back what Provision took.
func (a *ACL) Cleanup() error {
	var errs []error
	for l := range a.lists {
		errs = append(errs, giveList(l))
	}
	a.allowLists, a.denyLists, a.remote = nil, nil, nil
	return errors.Join(errs...)
}

func (a *ACL) lists(yield func(*list) bool) {
	for _, of := range [][]*list{a.denyLists, a.allowLists} {
		for _, l := range of {
			if !yield(l) {
				return
			}
		}
	}
}

// remote is a list that is fetched, and where the config has it.
type remote struct {
	path string
	*list
}

// Start implements Starter: it has the lists followed, and waits a while for
// the first answers of URLs. One of which nothing is known at all is an error: as an
// empty list it would let in whom it is to keep out.
func (a *ACL) Start() error {
	for l := range a.lists {
		l.follow(a.interval, a.logger)
		a.started = append(a.started, l)
	}
	wait := time.NewTimer(firstAnswer)
	defer wait.Stop()
	for _, l := range a.remote {
		select {
		case <-l.tried:
		case <-wait.C:
			wait.Reset(0) // nor is there any time for the others
		}
		if l.set.Load() != nil {
			continue
		}
		a.Stop()
		err := fmt.Errorf("no answer within %v", firstAnswer)
		if why := l.failed.Load(); why != nil {
			err = *why
		}
		return fmt.Errorf("%s: %s cannot be fetched, and no earlier answer is kept: %w", l.path, l.name, err)
	}
	return nil
}

// Stop implements Starter.
func (a *ACL) Stop() {
	for _, l := range a.started {
		l.leave()
	}
	a.started = nil
}

// Check implements Filter.
func (a *ACL) Check(f Flow) string {
	if a.deny.Contains(f.Source) {
		return RuleACL
	}
	for _, l := range a.denyLists {
		if l.has(f.Source) {
			return RuleACL
		}
	}
	if !a.closed || a.allow.Contains(f.Source) {
		return ""
	}
	for _, l := range a.allowLists {
		if l.has(f.Source) {
			return ""
		}
	}
	return RuleACL
}

// Explain implements Explainer.
func (a *ACL) Explain(f Flow) (rule, reason string) {
	in := func(set *cidr.Set, lists []*list) string {
		if set.Contains(f.Source) {
			return "the config"
		}
		for _, l := range lists {
			if l.has(f.Source) {
				return l.name
			}
		}
		return ""
	}
	if where := in(a.deny, a.denyLists); where != "" {
		return RuleACL, fmt.Sprintf("%s is denied by %s", f.Source, where)
	}
	if !a.closed {
		return "", fmt.Sprintf("%s is not denied", f.Source)
	}
	if where := in(a.allow, a.allowLists); where != "" {
		return "", fmt.Sprintf("%s is allowed by %s", f.Source, where)
	}
	return RuleACL, fmt.Sprintf("%s is not allowed", f.Source)
}

// UnmarshalCaddyfile sets up the filter from Caddyfile tokens. Syntax:
//
//	acl {
//		allow            <networks...>
//		deny             <networks...>
//		files            <paths...>
//		urls             <urls...>
//		allow_files      <paths...>
//		allow_urls       <urls...>
//		refresh_interval <duration>
//	}
func (a *ACL) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume the name of the kind
	return caddyopt.Block(d, caddyopt.Options{
		"allow":            caddyopt.Strings(&a.Allow),
		"deny":             caddyopt.Strings(&a.Deny),
		"files":            caddyopt.Strings(&a.Files),
		"urls":             caddyopt.Strings(&a.URLs),
		"allow_files":      caddyopt.Strings(&a.AllowFiles),
		"allow_urls":       caddyopt.Strings(&a.AllowURLs),
		"refresh_interval": caddyopt.Ptr(&a.RefreshInterval, caddyopt.Duration),
	})
}

// has reports whether an address is in the list as it is now.
func (l *list) has(a netip.Addr) bool {
	set := l.set.Load()
	return set != nil && set.Contains(a)
}

// Interface guards
var (
	_ caddy.Provisioner     = (*ACL)(nil)
	_ caddy.Validator       = (*ACL)(nil)
	_ caddy.CleanerUpper    = (*ACL)(nil)
	_ caddyfile.Unmarshaler = (*ACL)(nil)
	_ Filter                = (*ACL)(nil)
	_ Explainer             = (*ACL)(nil)
	_ Starter               = (*ACL)(nil)
)
