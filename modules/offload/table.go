package offload

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
)

// A table is the nftables table of this process. Its one base chain sees every
// packet that arrives on the host before anything else does, and sends those for
// a guarded address, and no others, to the chain of their listener:
//
//	chain arrive { type filter hook prerouting priority raw
//		protocol . daddr . dport vmap @at4      (and at6: addresses)
//		protocol . dport         vmap @any4     (and any6: wildcards)
//	}
//	chain l1_4 {                                    (and l1_6)
//		fib daddr type != local                  accept
//		tcp flags & (syn|ack) != syn             accept
//		saddr @l1_denied4     saddr . sport != @l1_kept4                              counter drop
//		saddr @l1_ip4         saddr . sport != @l1_kept4  update @l1_ipmeter4 {limit}  counter drop
//		saddr & /24 @l1_net4  saddr . sport != @l1_kept4  update @l1_netmeter4 {limit} counter drop
//	}
//
// Every jump is a goto: what a chain lets through meets no other. The table
// belongs to the netlink socket that has made it, where the kernel knows that (5.12):
// nobody else can change or flush it, and it is gone when the process is,
// however that ends.
//
// A table is for one goroutine.
type table struct {
	c     *nftables.Conn
	nl    *netlink.Conn // of c
	t     *nftables.Table
	owned bool

	base   *nftables.Chain
	at     [2]*nftables.Set // by family
	any    [2]*nftables.Set
	to     map[target]int // what is in the maps, by the listener's id; 0: nobody guards it
	guards map[int]*guard
}

// Families.
const (
	v4 = iota
	v6
)

func familyOf(a netip.Addr) int {
	if a.Is4() {
		return v4
	}
	return v6
}

// target is a local address and port, on which the first chain decides.
type target struct {
	family int
	proto  uint8
	addr   netip.Addr // none: every local one of the family
	port   uint16
}

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

// Kinds of sources.
const (
	anIP  = iota // one address
	aNet         // a /24 or /64
	kinds = 2
)

// Causes of a drop in the kernel.
const (
	byList = iota
	byLimit
	causes = 2
)

// Sizes that are the kernel's business.
const (
	maxKept   = 1 << 17
	perAdd    = 500     // elements in a message, whose attributes hold 64 KiB
	perFlush  = 10      // messages in a transaction
	sndBuffer = 4 << 20 // which has to hold one
	opTimeout = 20 * time.Second
	meterIdle = time.Minute // after which a source's meter is forgotten, and full again
)

const tablePrefix = "wayhouse_"

var tables atomic.Int64

// tableName is unlike that of any other table, of this process, one before it
// with the same number, or one in a container that shares the network.
func tableName() string {
	return fmt.Sprintf("%s%d_%d_%d", tablePrefix, os.Getpid(), startOf(os.Getpid()), tables.Add(1))
}

// startOf is when a process has started, in clock ticks, or 0 when it is gone.
func startOf(pid int) uint64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	rest := string(b[strings.LastIndexByte(string(b), ')')+1:]) // the name may have anything in it
	fields := strings.Fields(rest)
	if len(fields) < 20 {
		return 0
	}
	start, _ := strconv.ParseUint(fields[19], 10, 64)
	return start
}

// stale reports whether a table was left behind by a process of ours that is
// gone.
func stale(name string) bool {
	rest, ours := strings.CutPrefix(name, tablePrefix)
	if !ours {
		return false
	}
	parts := strings.Split(rest, "_")
	if len(parts) != 3 {
		return false
	}
	pid, err := strconv.Atoi(parts[0])
	if err != nil || pid <= 0 {
		return false
	}
	start, err := strconv.ParseUint(parts[1], 10, 64)
	return err == nil && startOf(pid) != start
}

// newTable makes the table with nothing guarded. With plain it belongs to
// nobody, as on a kernel that knows no owners.
func newTable(plain bool) (*table, error) {
	t := &table{
		t:      &nftables.Table{Name: tableName(), Family: nftables.TableFamilyINet},
		to:     make(map[target]int),
		guards: make(map[int]*guard),
	}
	var err error
	t.c, err = nftables.New(nftables.AsLasting(), nftables.WithSockOptions(func(c *netlink.Conn) error {
		t.nl = c
		return errors.Join(c.SetWriteBuffer(sndBuffer), c.SetReadBuffer(sndBuffer))
	}))
	if err != nil {
		return nil, explained(err)
	}
	if err := t.create(plain); err != nil {
		t.c.CloseLasting()
		return nil, explained(err)
	}
	if err := t.layOut(); err != nil {
		t.close()
		return nil, explained(err)
	}
	return t, nil
}

// explained says what has to be done about an error of the set-up.
func explained(err error) error {
	switch {
	case errors.Is(err, os.ErrPermission):
		return fmt.Errorf("%w: nftables needs the capability CAP_NET_ADMIN in the network namespace of the process (systemd: AmbientCapabilities=CAP_NET_ADMIN)", err)
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EPROTONOSUPPORT):
		return fmt.Errorf("%w: this kernel has no nftables for the family inet (modules nf_tables, nft_fib_inet)", err)
	}
	return err
}

// create makes the table itself, and removes those of processes that are gone.
func (t *table) create(plain bool) error {
	var err error
	if !plain {
		if err = t.add(tableOwner); err == nil {
			t.owned = true
		}
	}
	if plain || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		err = t.add(0)
	}
	if err != nil {
		return err
	}
	t.deadline()
	all, err := t.c.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return err
	}
	for _, other := range all {
		if stale(other.Name) {
			t.c.DelTable(other)
			if err := t.flush(); err != nil && !errors.Is(err, os.ErrPermission) && !errors.Is(err, unix.ENOENT) {
				return err // but not when it has an owner, or somebody was faster
			}
		}
	}
	return nil
}

// tableOwner is NFT_TABLE_F_OWNER.
const tableOwner = 2

// add adds the table with flags, which the library has none of.
func (t *table) add(flags uint32) error {
	attrs, err := netlink.MarshalAttributes([]netlink.Attribute{
		{Type: unix.NFTA_TABLE_NAME, Data: []byte(t.t.Name + "\x00")},
		{Type: unix.NFTA_TABLE_FLAGS, Data: binary.BigEndian.AppendUint32(nil, flags)},
	})
	if err != nil {
		return err
	}
	const subsystem = unix.NFNL_SUBSYS_NFTABLES
	message := func(typ uint16, flags netlink.HeaderFlags, family uint8, resource uint16, data []byte) netlink.Message {
		head := binary.BigEndian.AppendUint16([]byte{family, unix.NFNETLINK_V0}, resource)
		return netlink.Message{Header: netlink.Header{Type: netlink.HeaderType(typ), Flags: netlink.Request | flags}, Data: append(head, data...)}
	}
	t.deadline()
	_, err = t.nl.SendMessages([]netlink.Message{
		message(unix.NFNL_MSG_BATCH_BEGIN, 0, 0, subsystem, nil),
		message(subsystem<<8|unix.NFT_MSG_NEWTABLE, netlink.Acknowledge|netlink.Create|netlink.Excl, unix.NFPROTO_INET, 0, attrs),
		message(unix.NFNL_MSG_BATCH_END, 0, 0, subsystem, nil),
	})
	if err != nil {
		return err
	}
	_, err = t.nl.Receive()
	return err
}

func (t *table) deadline() { t.nl.SetDeadline(time.Now().Add(opTimeout)) }

func (t *table) flush() error {
	t.deadline()
	return t.c.Flush()
}

// close removes the table.
func (t *table) close() error {
	t.c.DelTable(t.t)
	err := t.flush()
	if errors.Is(err, unix.ENOENT) {
		err = nil
	}
	return errors.Join(err, t.c.CloseLasting())
}

var (
	addrTypes = [2]nftables.SetDatatype{nftables.TypeIPAddr, nftables.TypeIP6Addr}
	protos    = [2]byte{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6}
	// Where a header has the addresses, and how long they are.
	saddrAt = [2]uint32{12, 8}
	daddrAt = [2]uint32{16, 24}
	addrLen = [2]uint32{4, 16}
	netMask = [2][]byte{{255, 255, 255, 0}, {255, 255, 255, 255, 255, 255, 255, 255, 0, 0, 0, 0, 0, 0, 0, 0}}
)

// The first register, as 16 bytes and as four of four; what follows an
// address of a family in it.
const first = unix.NFT_REG_1

func after(words uint32) uint32 { return unix.NFT_REG32_00 + words }

// layOut makes the first chain and its maps.
func (t *table) layOut() error {
	accept := nftables.ChainPolicyAccept
	t.base = t.c.AddChain(&nftables.Chain{
		Table: t.t, Name: "arrive", Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRaw, Policy: &accept,
	})
	for f := range 2 {
		exact := nftables.MustConcatSetType(nftables.TypeInetProto, addrTypes[f], nftables.TypeInetService)
		wild := nftables.MustConcatSetType(nftables.TypeInetProto, nftables.TypeInetService)
		t.at[f] = &nftables.Set{Table: t.t, Name: "at" + family(f), KeyType: exact, Concatenation: true, IsMap: true, DataType: nftables.TypeVerdict}
		t.any[f] = &nftables.Set{Table: t.t, Name: "any" + family(f), KeyType: wild, Concatenation: true, IsMap: true, DataType: nftables.TypeVerdict}
		for _, s := range []*nftables.Set{t.at[f], t.any[f]} {
			if err := t.c.AddSet(s, nil); err != nil {
				return err
			}
		}
		isFamily := []expr.Any{
			&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: first},
			&expr.Cmp{Op: expr.CmpOpEq, Register: first, Data: protos[f : f+1]},
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: first},
		}
		decide := func(s *nftables.Set) *expr.Lookup {
			return &expr.Lookup{SourceRegister: first, IsDestRegSet: true, SetName: s.Name, SetID: s.ID}
		}
		t.c.AddRule(&nftables.Rule{Table: t.t, Chain: t.base, Exprs: append(isFamily[:3:3],
			&expr.Payload{DestRegister: after(1), Base: expr.PayloadBaseNetworkHeader, Offset: daddrAt[f], Len: addrLen[f]},
			&expr.Payload{DestRegister: after(1 + addrLen[f]/4), Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
			decide(t.at[f]),
		)})
		t.c.AddRule(&nftables.Rule{Table: t.t, Chain: t.base, Exprs: append(isFamily[:3:3],
			&expr.Payload{DestRegister: after(1), Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
			decide(t.any[f]),
		)})
	}
	return t.flush()
}

func family(f int) string { return [2]string{"4", "6"}[f] }

// element is the key of a target in its map, each part on four bytes.
func (k target) element(to int) nftables.SetElement {
	b := []byte{k.proto, 0, 0, 0}
	if k.addr.IsValid() {
		b = append(b, k.addr.AsSlice()...)
	}
	b = append(binary.BigEndian.AppendUint16(b, k.port), 0, 0)
	verdict := &expr.Verdict{Kind: expr.VerdictAccept}
	if to != 0 {
		verdict = &expr.Verdict{Kind: expr.VerdictGoto, Chain: chainName(to, k.family)}
	}
	return nftables.SetElement{Key: b, VerdictData: verdict}
}

func chainName(id, f int) string { return fmt.Sprintf("l%d_%s", id, family(f)) }

// point makes the maps what to says, and the guards those of want, each in one
// transaction as far as it fits one. What is gone leaves the maps before its
// chain goes.
func (t *table) point(to map[target]int, want map[int]guardSpec) error {
	for id, spec := range want {
		g := t.guards[id]
		if g == nil {
			if err := t.addGuard(id, spec); err != nil {
				return err
			}
		} else if g.rates != spec.rates {
			g.rates = spec.rates
			t.rules(g, true)
		}
		if err := t.flush(); err != nil {
			return err
		}
	}
	type change struct {
		set  *nftables.Set
		gone bool
	}
	changes := make(map[change][]nftables.SetElement)
	set := func(k target) *nftables.Set {
		if k.addr.IsValid() {
			return t.at[k.family]
		}
		return t.any[k.family]
	}
	for k, id := range t.to {
		if now, there := to[k]; !there || now != id {
			c := change{set(k), true}
			changes[c] = append(changes[c], k.element(id))
		}
	}
	for k, id := range to {
		if was, there := t.to[k]; !there || was != id {
			c := change{set(k), false}
			changes[c] = append(changes[c], k.element(id))
		}
	}
	// What changes hands is unguarded only if it does not fit one transaction.
	for _, gone := range []bool{true, false} {
		for f := range 2 {
			for _, s := range []*nftables.Set{t.at[f], t.any[f]} {
				if err := t.change(s, changes[change{s, gone}], gone, false); err != nil {
					return err
				}
			}
		}
	}
	for id, g := range t.guards {
		if _, wanted := want[id]; !wanted {
			t.dropGuard(g)
		}
	}
	t.to = to
	return t.flush()
}

// change adds elements to a set or takes them from it. It flushes when there
// are more than fit a transaction, and at the end with done.
func (t *table) change(s *nftables.Set, es []nftables.SetElement, gone, done bool) error {
	for n := 1; len(es) > 0; n++ {
		some := es[:min(len(es), perAdd)]
		es = es[len(some):]
		var err error
		if gone {
			err = t.c.SetDeleteElements(s, some)
		} else {
			err = t.c.SetAddElements(s, some)
		}
		if err == nil && n%perFlush == 0 {
			err = t.flush()
		}
		if err != nil {
			return err
		}
	}
	if done {
		return t.flush()
	}
	return nil
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
	var es [2][]nftables.SetElement
	for _, r := range rs {
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
	return nil
}

// keep makes the datagrams of clients pass whatever else is said of their
// source, or no longer.
func (t *table) keep(id int, clients []netip.AddrPort, gone bool) error {
	var es [2][]nftables.SetElement
	for _, c := range clients {
		f := familyOf(c.Addr())
		es[f] = append(es[f], nftables.SetElement{Key: append(binary.BigEndian.AppendUint16(c.Addr().AsSlice(), c.Port()), 0, 0)})
	}
	for f := range 2 {
		if err := t.change(t.guards[id].kept[f], es[f], gone, true); err != nil {
			return err
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
