package offload

import (
	"encoding/binary"
	"errors"
	"fmt"
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

// Usable says why a table could not be made, as far as that can be told without
// making one.
func Usable() error {
	c, err := nftables.New()
	if err == nil {
		_, err = c.ListTablesOfFamily(nftables.TableFamilyINet)
	}
	return explained(err)
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
