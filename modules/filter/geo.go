package filter

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/strictjson"
)

func init() { caddy.RegisterModule(new(Geo)) }

// Geo lets flows in by the country of the client's address, or by the
// autonomous system it belongs to. Whoever is denied stays outside; when
// anything is allowed, whoever is not stays outside too.
type Geo struct {
	// Countries that are allowed, by the two letters of ISO 3166-1 in any case.
	// They need the app's geo_db.
	Allow []string `json:"allow,omitempty"`

	// Countries that are denied, whatever is allowed.
	Deny []string `json:"deny,omitempty"`

	// Numbers of autonomous systems that are allowed. They need the app's
	// geo_asn_db.
	ASNAllow []uint32 `json:"asn_allow,omitempty"`

	// Numbers that are denied, whatever is allowed.
	ASNDeny []uint32 `json:"asn_deny,omitempty"`

	country, asn geoLists
	closed       bool // who is not allowed is refused
	logger       *zap.Logger
}

// geoLists are the values of one database that are allowed or denied. Without
// any the database is not asked.
type geoLists struct {
	db          *GeoDB
	allow, deny map[uint32]bool
}

// CaddyModule returns the Caddy module information.
func (*Geo) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse.filters.geo",
		New: func() caddy.Module { return new(Geo) },
	}
}

// UnmarshalJSON decodes the filter with errors that name the key.
func (g *Geo) UnmarshalJSON(b []byte) error {
	type plain Geo
	return strictjson.Unmarshal(b, (*plain)(g))
}

// Provision reads the lists and finds the databases.
func (g *Geo) Provision(ctx caddy.Context) (err error) {
	g.logger = ctx.Logger()
	dbs, _ := ctx.Value(geoDBsKey).(GeoDBs)
	if len(g.Allow)+len(g.Deny)+len(g.ASNAllow)+len(g.ASNDeny) == 0 {
		return errors.New("allow, deny, asn_allow and asn_deny are all empty: it would let everybody in; give a country, such as DE")
	}
	if g.country.allow, err = countries(g.Allow); err != nil {
		return fmt.Errorf("allow%w", err)
	}
	if g.country.deny, err = countries(g.Deny); err != nil {
		return fmt.Errorf("deny%w", err)
	}
	if g.asn.allow, err = systems(g.ASNAllow); err != nil {
		return fmt.Errorf("asn_allow%w", err)
	}
	if g.asn.deny, err = systems(g.ASNDeny); err != nil {
		return fmt.Errorf("asn_deny%w", err)
	}
	g.closed = len(g.Allow)+len(g.ASNAllow) > 0
	g.country.db, g.asn.db = dbs.Country, dbs.ASN
	switch {
	case g.country.used() && dbs.Country == nil:
		return errors.New("allow and deny need a database: give its path in apps.wayhouse.geo_db")
	case g.asn.used() && dbs.ASN == nil:
		return errors.New("asn_allow and asn_deny need a database: give its path in apps.wayhouse.geo_asn_db")
	}
	return nil
}

func countries(codes []string) (map[uint32]bool, error) {
	set := make(map[uint32]bool)
	for i, c := range codes {
		v, ok := country(c)
		if !ok {
			return nil, fmt.Errorf("[%d]: %q is not two letters of ISO 3166-1, such as DE", i, c)
		}
		set[v] = true
	}
	return set, nil
}

func systems(numbers []uint32) (map[uint32]bool, error) {
	set := make(map[uint32]bool)
	for i, n := range numbers {
		if n == 0 {
			return nil, fmt.Errorf("[%d]: 0 is the number of no autonomous system", i)
		}
		set[n] = true
	}
	return set, nil
}

func (l *geoLists) used() bool { return len(l.allow)+len(l.deny) > 0 }

// Start implements Starter: the databases are followed.
func (g *Geo) Start() error {
	for _, l := range []*geoLists{&g.country, &g.asn} {
		if l.used() {
			l.db.follow(g.logger)
		}
	}
	return nil
}

// Stop implements Starter.
func (g *Geo) Stop() {
	for _, l := range []*geoLists{&g.country, &g.asn} {
		if l.used() {
			l.db.leave()
		}
	}
}

// Check implements Filter.
func (g *Geo) Check(f Flow) string {
	allowed := false
	for _, l := range [...]*geoLists{&g.country, &g.asn} {
		if !l.used() {
			continue
		}
		v, ok := l.db.find(f.Source)
		if !ok || l.deny[v] {
			return RuleGeo
		}
		allowed = allowed || l.allow[v]
	}
	if g.closed && !allowed {
		return RuleGeo
	}
	return ""
}

// Explain implements Explainer.
func (g *Geo) Explain(f Flow) (rule, reason string) {
	var is []string
	for _, l := range []*geoLists{&g.country, &g.asn} {
		if !l.used() {
			continue
		}
		v, ok := l.db.find(f.Source)
		switch {
		case !ok:
			is = append(is, "in a database that cannot be asked")
		case v == 0:
			is = append(is, "in no "+map[GeoKind]string{Countries: "country", Systems: "autonomous system"}[l.db.kind])
		default:
			is = append(is, "in "+l.db.kind.say(v))
		}
	}
	rule = g.Check(f)
	verdict := map[bool]string{true: "allowed", false: "not denied"}[g.closed]
	if rule != "" {
		verdict = map[bool]string{true: "denied or not allowed", false: "denied"}[g.closed]
	}
	return rule, fmt.Sprintf("%s is %s: %s", f.Source, strings.Join(is, ", "), verdict)
}

// UnmarshalCaddyfile sets up the filter from Caddyfile tokens. Syntax:
//
//	geo {
//		allow     <countries...>
//		deny      <countries...>
//		asn_allow <numbers...>
//		asn_deny  <numbers...>
//	}
func (g *Geo) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume the name of the kind
	return caddyopt.Block(d, caddyopt.Options{
		"allow":     caddyopt.Strings(&g.Allow),
		"deny":      caddyopt.Strings(&g.Deny),
		"asn_allow": caddyopt.Many(caddyopt.Func(unmarshalSystems(&g.ASNAllow))),
		"asn_deny":  caddyopt.Many(caddyopt.Func(unmarshalSystems(&g.ASNDeny))),
	})
}

func unmarshalSystems(to *[]uint32) func(*caddyfile.Dispenser) error {
	return func(d *caddyfile.Dispenser) error {
		name := d.Val()
		args := d.RemainingArgs()
		if len(args) == 0 {
			return d.Errf("%s: a value is missing", name)
		}
		for _, a := range args {
			digits := a
			if len(a) > 2 && strings.EqualFold(a[:2], "AS") {
				digits = a[2:]
			}
			n, err := strconv.ParseUint(digits, 10, 32)
			if err != nil {
				return d.Errf("%s: %q is no number of an autonomous system, such as 64500 or AS64500", name, a)
			}
			*to = append(*to, uint32(n))
		}
		return nil
	}
}

// Interface guards
var (
	_ caddy.Provisioner     = (*Geo)(nil)
	_ caddyfile.Unmarshaler = (*Geo)(nil)
	_ Filter                = (*Geo)(nil)
	_ Explainer             = (*Geo)(nil)
	_ Starter               = (*Geo)(nil)
)
