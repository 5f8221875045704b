package offload

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
)

// guard is what the table has for one listener.
type guard struct {
	id       int
	rates    [2]Rate // by kind
	chain    [2]*nftables.Chain
	denied   [2]*nftables.Set
	over     [2][2]*nftables.Set // by kind and family
	meter    [2][2]*nftables.Set
	kept     [2]*nftables.Set
	counters [2]*nftables.CounterObj // by cause
}

// guardSpec is what a guard is made of.
type guardSpec struct {
	listener   string
	rates      [2]Rate
	maxBlocked int
}

func (t *table) addGuard(id int, spec guardSpec) error {
	g := &guard{id: id, rates: spec.rates}
	name := func(what string, f int) string { return fmt.Sprintf("l%d_%s%s", id, what, family(f)) }
	add := func(s nftables.Set) (*nftables.Set, error) {
		s.Table, s.Comment = t.t, spec.listener
		return &s, t.c.AddSet(&s, nil)
	}
	for cause, what := range []string{byList: "denied", byLimit: "limited"} {
		g.counters[cause] = &nftables.CounterObj{Table: t.t, Name: fmt.Sprintf("l%d_%s", id, what)}
		t.c.AddObj(g.counters[cause])
	}
	for f := range 2 {
		var err error
		if g.denied[f], err = add(nftables.Set{Name: name("denied", f), KeyType: addrTypes[f], Interval: true}); err != nil {
			return err
		}
		if g.kept[f], err = add(nftables.Set{
			Name: name("kept", f), KeyType: nftables.MustConcatSetType(addrTypes[f], nftables.TypeInetService), Concatenation: true, Size: maxKept,
		}); err != nil {
			return err
		}
		for kind, what := range []string{anIP: "ip", aNet: "net"} {
			if g.over[kind][f], err = add(nftables.Set{Name: name(what, f), KeyType: addrTypes[f], HasTimeout: true, Size: uint32(spec.maxBlocked)}); err != nil {
				return err
			}
			if g.meter[kind][f], err = add(nftables.Set{
				Name: name(what+"meter", f), KeyType: addrTypes[f], HasTimeout: true, Timeout: meterIdle, Dynamic: true, Size: uint32(spec.maxBlocked),
			}); err != nil {
				return err
			}
		}
		g.chain[f] = t.c.AddChain(&nftables.Chain{Table: t.t, Name: chainName(id, f)})
	}
	t.rules(g, false)
	t.guards[id] = g
	return nil
}

// rules makes the rules of a listener's chains, again when rates have changed:
// meters then begin anew.
func (t *table) rules(g *guard, again bool) {
	for f := range 2 {
		if again {
			t.c.FlushChain(g.chain[f])
			for kind := range kinds {
				t.c.FlushSet(g.meter[kind][f])
			}
		}
		rule := func(parts ...[]expr.Any) {
			var all []expr.Any
			for _, p := range parts {
				all = append(all, p...)
			}
			t.c.AddRule(&nftables.Rule{Table: t.t, Chain: g.chain[f], Exprs: all})
		}
		verdict := func(k expr.VerdictKind) []expr.Any { return []expr.Any{&expr.Verdict{Kind: k}} }
		source := []expr.Any{&expr.Payload{DestRegister: first, Base: expr.PayloadBaseNetworkHeader, Offset: saddrAt[f], Len: addrLen[f]}}
		network := append(source[:1:1], &expr.Bitwise{SourceRegister: first, DestRegister: first, Len: addrLen[f], Mask: netMask[f], Xor: make([]byte, addrLen[f])})
		in := func(s *nftables.Set, not bool) []expr.Any {
			return []expr.Any{&expr.Lookup{SourceRegister: first, SetName: s.Name, SetID: s.ID, Invert: not}}
		}
		notKept := append(append(source[:1:1],
			&expr.Payload{DestRegister: after(addrLen[f] / 4), Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 2},
		), in(g.kept[f], true)...)
		drop := func(cause int) []expr.Any {
			return append([]expr.Any{&expr.Objref{Type: unix.NFT_OBJECT_COUNTER, Name: g.counters[cause].Name}}, verdict(expr.VerdictDrop)...)
		}
		rule([]expr.Any{
			&expr.Fib{Register: first, FlagDADDR: true, ResultADDRTYPE: true},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: first, Data: binary.NativeEndian.AppendUint32(nil, unix.RTN_LOCAL)},
		}, verdict(expr.VerdictAccept))
		const syn, ack = 0x02, 0x10
		rule([]expr.Any{
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: first},
			&expr.Cmp{Op: expr.CmpOpEq, Register: first, Data: []byte{unix.IPPROTO_TCP}},
			&expr.Payload{DestRegister: first, Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1},
			&expr.Bitwise{SourceRegister: first, DestRegister: first, Len: 1, Mask: []byte{syn | ack}, Xor: []byte{0}},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: first, Data: []byte{syn}},
		}, verdict(expr.VerdictAccept))
		rule(source, in(g.denied[f], false), notKept, drop(byList))
		for kind, key := range [][]expr.Any{anIP: source, aNet: network} {
			rule(key, in(g.over[kind][f], false), notKept, key, []expr.Any{&expr.Dynset{
				SrcRegKey: first, SetName: g.meter[kind][f].Name, SetID: g.meter[kind][f].ID, Operation: unix.NFT_DYNSET_OP_UPDATE,
				Exprs: []expr.Any{g.rates[kind].limit()},
			}}, drop(byLimit))
		}
	}
}

// limit is true for packets above the rate.
func (r Rate) limit() *expr.Limit {
	l := &expr.Limit{Type: expr.LimitTypePkts, Over: true, Unit: expr.LimitTimeSecond, Rate: uint64(math.Ceil(r.PerSecond)), Burst: uint32(min(max(r.Burst, 1), math.MaxInt32))}
	if r.PerSecond < 1 {
		l.Unit, l.Rate = expr.LimitTimeMinute, max(uint64(math.Ceil(r.PerSecond*60)), 1)
	}
	return l
}

func (t *table) dropGuard(g *guard) {
	for f := range 2 {
		t.c.FlushChain(g.chain[f])
		t.c.DelChain(g.chain[f])
		for _, s := range []*nftables.Set{g.denied[f], g.kept[f], g.over[anIP][f], g.over[aNet][f], g.meter[anIP][f], g.meter[aNet][f]} {
			t.c.DelSet(s)
		}
	}
	for _, o := range g.counters {
		t.c.DeleteObject(o)
	}
	delete(t.guards, g.id)
}

// deny adds ranges to what is dropped for a listener, or takes them from it.
func (t *table) deny(id int, rs cidr.Ranges, gone bool) error {
	var es [2][]nftables.SetElement // used again and again: what is made of all at once would be large
	for some := range slices.Chunk(rs, perAdd*perFlush/2) {
		for f := range 2 {
			es[f] = es[f][:0]
		}
		for _, r := range some {
			f := familyOf(r.First)
			es[f] = append(es[f], nftables.SetElement{Key: r.First.AsSlice()})
			if end := r.Last.Next(); end.IsValid() {
				es[f] = append(es[f], nftables.SetElement{Key: end.AsSlice(), IntervalEnd: true})
			}
		}
		for f := range 2 {
			if err := t.change(t.guards[id].denied[f], es[f], gone, true); err != nil {
				return err
			}
		}
	}
	return nil
}

// keep makes the datagrams of clients pass whatever else is said of their
// source, or no longer.
func (t *table) keep(id int, clients []netip.AddrPort, gone bool) error {
	for some := range slices.Chunk(clients, perAdd*perFlush) { // what is made of all at once would be large
		var es [2][]nftables.SetElement
		for _, c := range some {
			f := familyOf(c.Addr())
			es[f] = append(es[f], nftables.SetElement{Key: append(binary.BigEndian.AppendUint16(c.Addr().AsSlice(), c.Port()), 0, 0)})
		}
		for f := range 2 {
			if err := t.change(t.guards[id].kept[f], es[f], gone, true); err != nil {
				return err
			}
		}
	}
	return nil
}

// block has sources over their limit let through at the rate of their kind
// alone, each for a time.
func (t *table) block(id int, sources map[source]time.Duration) error {
	var es [2][2][]nftables.SetElement
	for s, left := range sources {
		f := familyOf(s.addr)
		es[s.kind][f] = append(es[s.kind][f], nftables.SetElement{Key: s.addr.AsSlice(), Timeout: left})
	}
	for kind := range kinds {
		for f := range 2 {
			if err := t.change(t.guards[id].over[kind][f], es[kind][f], false, true); err != nil {
				return err
			}
		}
	}
	return nil
}

// errGone says that somebody has removed the table, or something in it.
var errGone = errors.New("the table is gone")

// counts are the packets dropped since the table was made, by listener and
// cause.
func (t *table) counts() (map[int][causes]uint64, error) {
	t.deadline()
	objs, err := t.c.GetObjects(t.t)
	if err != nil {
		return nil, err
	}
	byName := make(map[string]uint64, len(objs))
	for _, o := range objs {
		if c, ok := o.(*nftables.CounterObj); ok {
			byName[c.Name] = c.Packets
		}
	}
	all := make(map[int][causes]uint64, len(t.guards))
	for id, g := range t.guards {
		var n [causes]uint64
		for cause, o := range g.counters {
			packets, there := byName[o.Name]
			if !there {
				return nil, errGone
			}
			n[cause] = packets
		}
		all[id] = n
	}
	if len(t.guards) == 0 { // nothing that could be missed
		if _, err := t.c.ListTableOfFamily(t.t.Name, t.t.Family); err != nil {
			return nil, errors.Join(errGone, err)
		}
	}
	return all, nil
}

// forget takes a listener out of the maps, and its guard away with all it has.
// What point does next makes a new one.
func (t *table) forget(id int) error {
	g := t.guards[id]
	if g == nil {
		return nil
	}
	for k, to := range t.to {
		if to != id {
			continue
		}
		s := t.any[k.family]
		if k.addr.IsValid() {
			s = t.at[k.family]
		}
		if err := t.c.SetDeleteElements(s, []nftables.SetElement{k.element(to)}); err != nil {
			return err
		}
		delete(t.to, k)
	}
	t.dropGuard(g)
	return t.flush()
}
