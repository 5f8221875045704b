package doctor

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Filter is what is known of the packet filter of a host, be it told by nft or
// by iptables. It says that something is done, not for which packets: what leads
// to a chain, and addresses, are not followed.
type Filter struct {
	Tproxy  []Tproxy
	Marked  [families]Protos // of transparent sockets, what is marked
	NoTrack Protos           // what some rule takes out of connection tracking
	Tracked bool             // a rule needs connections tracked
}

// Tproxy is a rule that redirects.
type Tproxy struct {
	Family string // ip, ip6, or "" for both
	Protos Protos
	Port   uint16
	Mark   uint64 // 0: none
}

// Families of addresses.
const (
	v4 = iota
	v6
	families
)

func (t *Tproxy) of(v6 bool) bool { return t.Family == "" || (t.Family == "ip6") == v6 }

// Protos are transport protocols.
type Protos uint8

// The protocols that can be redirected.
const (
	TCP Protos = 1 << iota
	UDP
	both = TCP | UDP
)

func (p Protos) String() string { return [both + 1]string{"nothing", "TCP", "UDP", "TCP and UDP"}[p] }

// list is as nft has it in a set.
func (p Protos) list() string { return [both + 1]string{"", "tcp", "udp", "tcp, udp"}[p] }

// protoNamed is the protocol of a name or number, 0 for one that is never
// redirected.
func protoNamed(s string) Protos {
	switch s {
	case "tcp", "6":
		return TCP
	case "udp", "17":
		return UDP
	}
	return 0
}

// rule is one rule of a chain, as far as it matters here.
type rule struct {
	chain       string
	family      string // that it is for, "" for both
	protos      Protos // that it is for
	transparent bool   // it is for transparent sockets alone
	to          string // chain it leads to, "" for none
	mark        uint64 // that it sets, 0 for none
	redirects   []uint16
	noTrack     bool
}

// take adds what rules do. A mark may be set by the rule that needs it, before
// it in the same chain, or, for transparent sockets, in the chain that the rule
// leads to.
func (f *Filter) take(rules []rule) {
	marking := make(map[string]bool)
	for _, r := range rules {
		marking[r.chain] = marking[r.chain] || r.mark != 0 && !r.transparent && len(r.redirects) == 0
	}
	before := make(map[string]uint64)
	for _, r := range rules {
		if r.mark != 0 && !r.transparent {
			before[r.chain] = r.mark
		}
		for _, port := range r.redirects {
			f.Tproxy = add(f.Tproxy, Tproxy{r.family, r.protos, port, before[r.chain]})
		}
		if r.transparent && (r.mark != 0 || marking[r.to]) {
			for i, not := range []string{v4: "ip6", v6: "ip"} {
				if r.family != not {
					f.Marked[i] |= r.protos
				}
			}
		}
		if r.noTrack {
			f.NoTrack |= r.protos
		}
	}
}

// legacyTables are the files in which the kernel names the tables that
// iptables-legacy has made.
var legacyTables = []string{"/proc/net/ip_tables_names", "/proc/net/ip6_tables_names"}

// filter asks nft and iptables, each for the rules that it has made.
func (s *State) filter() {
	out, err := output("nft", "-j", "list", "ruleset")
	if err == nil {
		err = s.Filter.readNft(out)
	}
	legacy := false
	for _, v6 := range []bool{false, true} {
		for _, kind := range []string{"", "-nft", "-legacy"} { // the first is one of the others
			command := "iptables" + kind + "-save"
			if v6 {
				command = "ip6tables" + kind + "-save"
			}
			out, saveErr := output(command)
			if saveErr != nil {
				continue
			}
			s.Filter.readIptables(out, v6)
			path, _ := exec.LookPath(command)
			path, _ = filepath.EvalSymlinks(path)
			legacy = legacy || !strings.Contains(path, "nft")
			if errors.Is(err, exec.ErrNotFound) {
				err = nil // iptables alone is as good
			}
		}
	}
	for _, f := range legacyTables {
		if names, _ := os.ReadFile(f); err == nil && !legacy && len(names) > 0 {
			err = errors.New("there are rules of iptables-legacy, and no iptables-legacy-save that would tell them")
		}
	}
	s.NoFilter = err
}
