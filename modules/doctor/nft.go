package doctor

import (
	"encoding/json"
	"strconv"
)

// nftItem is one of the things that "nft -j list ruleset" has: a chain, a map or
// a rule, or something of no interest.
type nftItem struct {
	Chain struct {
		Type string
	}
	Map struct {
		Family, Table, Name string
		Elem                []json.RawMessage // pairs
	}
	Rule struct {
		Family, Table, Chain string
		Expr                 []map[string]json.RawMessage
	}
}

// readNft reads the JSON of nft. What is not understood is passed over: it is
// another program's, and changes with its versions.
func (f *Filter) readNft(b []byte) error {
	var set struct{ Nftables []json.RawMessage }
	if len(b) == 0 { // nothing to tell
		return nil
	}
	if err := json.Unmarshal(b, &set); err != nil {
		return err
	}
	items := make([]nftItem, len(set.Nftables))
	maps := make(map[string][]json.RawMessage)
	for i, raw := range set.Nftables {
		json.Unmarshal(raw, &items[i])
		if m := &items[i].Map; m.Name != "" {
			maps[m.Family+" "+m.Table+" @"+m.Name] = m.Elem
		}
	}
	var rules []rule
	for i := range items {
		f.Tracked = f.Tracked || items[i].Chain.Type == "nat"
		r := &items[i].Rule
		if len(r.Expr) == 0 {
			continue
		}
		where := r.Family + " " + r.Table + " "
		read := nftRule{rule: rule{chain: where + r.Chain, protos: both}, where: where, maps: maps}
		if r.Family == "ip" || r.Family == "ip6" {
			read.family = r.Family
		}
		for _, e := range r.Expr {
			read.statement(e)
			f.Tracked = f.Tracked || mentions(e, "ct")
		}
		rules = append(rules, read.rule)
	}
	f.take(rules)
	return nil
}

// nftRule is a rule that is being read.
type nftRule struct {
	rule
	where string // family and table
	maps  map[string][]json.RawMessage
}

func (r *nftRule) statement(e map[string]json.RawMessage) {
	if raw, ok := e["match"]; ok {
		r.match(raw)
	}
	for _, verdict := range []string{"jump", "goto"} {
		var v struct{ Target string }
		if json.Unmarshal(e[verdict], &v) == nil && v.Target != "" {
			r.to = r.where + v.Target
		}
	}
	if raw, ok := e["mangle"]; ok {
		var m struct {
			Key   struct{ Meta struct{ Key string } }
			Value json.RawMessage
		}
		if json.Unmarshal(raw, &m); m.Key.Meta.Key == "mark" {
			r.mark = markOf(m.Value)
		}
	}
	if _, ok := e["notrack"]; ok {
		r.noTrack = true
	}
	if raw, ok := e["tproxy"]; ok {
		var t struct {
			Family string
			Port   json.RawMessage
		}
		json.Unmarshal(raw, &t)
		r.redirects = r.ports(t.Port)
		if t.Family == "ip" || t.Family == "ip6" {
			r.family = t.Family
		}
	}
}

// match narrows the rule to what a match lets through.
func (r *nftRule) match(raw json.RawMessage) {
	var m struct {
		Op   string
		Left struct {
			Socket  struct{ Key string }
			Payload struct{ Protocol, Field string }
			Meta    struct{ Key string }
		}
		Right json.RawMessage
	}
	json.Unmarshal(raw, &m)
	r.transparent = r.transparent || m.Left.Socket.Key == "transparent"
	if m.Op == "!=" {
		return
	}
	switch p := &m.Left.Payload; {
	case p.Protocol == "tcp", p.Protocol == "udp":
		r.protos &= protoNamed(p.Protocol)
	case p.Field == "protocol", p.Field == "nexthdr", m.Left.Meta.Key == "l4proto":
		r.protos &= protosOf(m.Right)
	}
	switch {
	case m.Left.Payload.Protocol == "ip", m.Left.Payload.Protocol == "ip6":
		r.family = m.Left.Payload.Protocol
	case m.Left.Meta.Key == "nfproto", m.Left.Meta.Key == "protocol":
		var name string
		json.Unmarshal(m.Right, &name)
		switch name {
		case "ipv4", "ip":
			r.family = "ip"
		case "ipv6", "ip6":
			r.family = "ip6"
		}
	}
}

// protosOf are the protocols of a value or a set of them. A set that has a name
// may have any.
func protosOf(raw json.RawMessage) Protos {
	var set struct{ Set []json.RawMessage }
	if json.Unmarshal(raw, &set); len(set.Set) > 0 {
		var all Protos
		for _, one := range set.Set {
			all |= protosOf(one)
		}
		return all
	}
	var name string
	if json.Unmarshal(raw, &name) != nil {
		name = string(raw) // a number
	}
	if len(name) > 0 && name[0] == '@' {
		return both
	}
	return protoNamed(name)
}

// ports are those that a rule redirects to: one, or those of a map.
func (r *nftRule) ports(raw json.RawMessage) (all []uint16) {
	var one uint16
	if json.Unmarshal(raw, &one) == nil {
		return []uint16{one}
	}
	var by struct {
		Map struct{ Data json.RawMessage }
	}
	json.Unmarshal(raw, &by)
	var set struct{ Set []json.RawMessage }
	json.Unmarshal(by.Map.Data, &set)
	var name string
	if json.Unmarshal(by.Map.Data, &name) == nil {
		set.Set = r.maps[r.where+name]
	}
	for _, raw := range set.Set {
		var pair [2]json.RawMessage
		if json.Unmarshal(raw, &pair) == nil && json.Unmarshal(pair[1], &one) == nil {
			all = append(all, one)
		}
	}
	return all
}

// markOf is the mark that a value sets: a number, or one that is added to what
// the packet has.
func markOf(raw json.RawMessage) uint64 {
	if n, err := strconv.ParseUint(string(raw), 10, 64); err == nil {
		return n
	}
	var or map[string]json.RawMessage
	json.Unmarshal(raw, &or)
	var sides []json.RawMessage
	json.Unmarshal(or["|"], &sides)
	for _, side := range sides {
		if n, err := strconv.ParseUint(string(side), 10, 64); err == nil {
			return n
		}
	}
	return 0
}

// mentions reports whether a key is anywhere in a statement.
func mentions(e map[string]json.RawMessage, key string) bool {
	for k, raw := range e {
		var v any
		if k == key || json.Unmarshal(raw, &v) == nil && has(v, key) {
			return true
		}
	}
	return false
}

func has(v any, key string) bool {
	switch v := v.(type) {
	case map[string]any:
		for k, of := range v {
			if k == key || has(of, key) {
				return true
			}
		}
	case []any:
		for _, of := range v {
			if has(of, key) {
				return true
			}
		}
	}
	return false
}
