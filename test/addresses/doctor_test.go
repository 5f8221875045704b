package addresses

import (
	"encoding/json"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

type finding struct{ Check, Level, Text, Fix string }

// doctor runs wayhouse doctor in the proxy's namespace.
func (w *world) doctor(t *testing.T, p *kit.Process, wrap ...string) (found []finding, code int) {
	t.Helper()
	argv := append([]string{"netns", "exec", w.proxy.Name}, wrap...)
	cmd := exec.Command("ip", append(argv, kit.Binary(t, ""), "doctor", "--config", p.Config, "--json")...)
	cmd.Env = append(cmd.Environ(), "HOME="+p.Dir)
	out, _ := cmd.Output()
	if err := json.Unmarshal(out, &found); err != nil {
		t.Fatalf("doctor answers %q: %v", out, err)
	}
	return found, cmd.ProcessState.ExitCode()
}

// patient is a world whose proxy doctor finds nothing wrong with.
type patient struct {
	*world
	p *kit.Process
}

func newPatient(t *testing.T) *patient {
	t.Helper()
	for command, of := range map[string]string{"setpriv": "util-linux", "prlimit": "util-linux", "iptables-legacy": "iptables"} {
		_, err := exec.LookPath(command)
		kit.Require(t, err, command+" command (package "+of+")")
	}
	w := newWorld(t)
	w.redirect(t)
	w.proxy.Run(t, "ip", "route", "add", "local", "203.0.113.0/24", "dev", "lo")
	for _, a := range []string{"192.0.2.5", "192.0.2.6"} {
		w.proxy.Run(t, "ip", "addr", "add", a+"/32", "dev", "lo")
	}
	w.proxy.Run(t, "sh", "-c", "for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 > $f; done")
	pools := w.pools()
	pools["four"] = kit.With(kit.Pool("10.2.0.2:9000"), kit.M{"source_addresses": kit.A{"192.0.2.6"}})
	listeners := kit.M{
		"seen":  kit.With(kit.ToPool("four", "tcp/:7777", "udp/:7777"), kit.M{"transparent": true}),
		"wide":  kit.With(kit.ToPool("four", "udp/0.0.0.0:7778"), kit.M{"prefix": "203.0.113.0/24"}),
		"fixed": kit.ToPool("four", "tcp/192.0.2.5:443"),
		"later": kit.With(kit.ToPool("four", "tcp/192.0.2.7:7779"), kit.M{"freebind": true}),
	}
	return &patient{w, kit.Prepare(t, kit.App(listeners, pools, kit.M{
		"offload": "nftables", "limits": kit.M{"max_connections": 1000, "max_udp_sessions": 10_000},
	}), kit.Options{Netns: w.proxy})}
}

// finds wants doctor to find these things, as "level check: text" as far as
// it is written, and nothing else, and returns the commands that mend them.
func (w *patient) finds(t *testing.T, wrap []string, want ...string) (fixes []string) {
	t.Helper()
	found, code := w.doctor(t, w.p, wrap...)
	found = slices.DeleteFunc(found, func(f finding) bool { // of the whole machine, which is as it is
		return strings.HasPrefix(f.Text, "net.core.rmem_max") || strings.HasPrefix(f.Text, "net.core.wmem_max")
	})
	wrong := 0
	for i, f := range found {
		got := f.Level + " " + f.Check + ": " + f.Text
		if i < len(want) && !strings.HasPrefix(got, want[i]) || f.Fix == "" {
			t.Errorf("it finds %q and says %q, want %q", got, f.Fix, want[i])
		}
		if f.Level == "wrong" {
			wrong = 1
		}
		fixes = append(fixes, f.Fix)
	}
	if code != wrong || len(found) != len(want) {
		t.Errorf("it ends with %d and finds %d things, want %d: %v", code, len(found), len(want), found)
	}
	return fixes
}

// TestDoctor breaks a sound set-up in many ways. The commands that doctor prints
// mend it again, where nothing has to be filled in.
func TestDoctor(t *testing.T) {
	w := newPatient(t)
	w.finds(t, nil)
	for name, tc := range map[string]struct {
		broken string // a command
		wrap   []string
		want   []string
		mended string // by this, not by what is printed
	}{
		"no policy rule":      {broken: "ip rule del fwmark 1 lookup 100", want: []string{"wrong policy route: no rule looks up what is marked 1"}},
		"one for IPv4 alone":  {broken: "ip -6 rule del fwmark 1 lookup 100", want: []string{"wrong policy route: no rule looks up what is marked 1"}},
		"another mark":        {broken: "ip rule del fwmark 1 lookup 100; ip rule add fwmark 1/0x2 lookup 100", want: []string{"wrong policy route: no rule looks up"}},
		"no local route":      {broken: "ip route del local 0.0.0.0/0 dev lo table 100", want: []string{"wrong policy route: table 100"}},
		"prefix not local":    {broken: "ip route del local 203.0.113.0/24 dev lo", want: []string{"wrong prefix: the host does not take"}},
		"strict reverse path": {broken: "sysctl -qw net.ipv4.conf.all.rp_filter=1", want: []string{"wrong return path: net.ipv4.conf.all.rp_filter"}},
		"no address to bind":  {broken: "ip addr del 192.0.2.5/32 dev lo", want: []string{"wrong address: a listener is bound to 192.0.2.5"}},
		"no source address":   {broken: "ip addr del 192.0.2.6/32 dev lo", want: []string{"wrong address: source_addresses has 192.0.2.6"}},
		"bound to any address": {
			broken: "ip addr del 192.0.2.5/32 dev lo; sysctl -qw net.ipv4.ip_nonlocal_bind=1",
			mended: "ip addr add 192.0.2.5/32 dev lo; sysctl -qw net.ipv4.ip_nonlocal_bind=0",
		},
		"few local ports": {broken: `sysctl -qw net.ipv4.ip_local_port_range="40000 41999"`, want: []string{"tight ports: max_udp_sessions is 10000, and there are 2000"}},
		"a short backlog": {broken: "sysctl -qw net.core.somaxconn=128", want: []string{"tight buffers: net.core.somaxconn is 128"}},
		"no capability": {
			wrap: []string{"setpriv", "--bounding-set", "-net_raw,-net_admin"},
			want: []string{"wrong capabilities: transparent listeners", "wrong nftables: offload: ", "tight redirection: the rules that redirect cannot be looked at"},
		},
		"no low ports":     {wrap: []string{"setpriv", "--bounding-set", "-net_bind_service"}, want: []string{"wrong capabilities: port 443"}},
		"few descriptors":  {wrap: []string{"prlimit", "--nofile=10000:10000"}, want: []string{"wrong files: the limits let in flows with 12128"}},
		"no segmentation":  {wrap: []string{"env", "WAYHOUSE_UDP_OFFLOAD=off"}, want: []string{"tight offload: UDP segmentation", "tight offload: UDP coalescing"}},
		"redirected alone": {broken: "nft delete rule inet wayhouse prerouting handle $(nft -a list table inet wayhouse | sed -n 's/.*socket.*handle //p')", want: []string{"wrong return path: no rule marks what backends answer to the clients' addresses over TCP and UDP"}},
	} {
		t.Run(name, func(t *testing.T) {
			if tc.broken != "" {
				w.proxy.Run(t, "sh", "-c", tc.broken)
			}
			fixes := w.finds(t, tc.wrap, tc.want...)
			if tc.wrap != nil {
				return
			}
			if tc.mended != "" {
				fixes = []string{tc.mended}
			}
			for _, fix := range fixes {
				w.proxy.Run(t, "sh", "-c", fix)
			}
			w.finds(t, nil)
		})
	}
}

// TestDoctorTracking has the kernel track connections, by a rule of nftables and
// by NAT of iptables.
func TestDoctorTracking(t *testing.T) {
	for name, rules := range map[string]string{
		"nftables": "nft 'table inet t { chain c { type filter hook input priority 0; ct state established accept; }; }'",
		"iptables": "iptables-legacy -t nat -A POSTROUTING -o nowhere -j MASQUERADE",
	} {
		t.Run(name, func(t *testing.T) {
			w := newPatient(t)
			w.proxy.Run(t, "sh", "-c", rules)
			for _, fix := range w.finds(t, nil, "tight conntrack: the kernel tracks UDP here") {
				w.proxy.Run(t, "sh", "-c", fix)
			}
			w.finds(t, nil)
		})
	}
}

// TestDoctorXDP attaches a program that lets every packet pass.
func TestDoctorXDP(t *testing.T) {
	w := newPatient(t)
	link := -1
	w.proxy.Do(t, func() {
		code, license := [2]uint64{0x2_0000_00b7, 0x95}, []byte("GPL\x00") // r0 = XDP_PASS; exit
		load := struct {
			kind, n       uint32
			code, license unsafe.Pointer
			_             [10]uint32
		}{unix.BPF_PROG_TYPE_XDP, 2, unsafe.Pointer(&code), unsafe.Pointer(&license[0]), [10]uint32{}}
		prog := bpf(t, unix.BPF_PROG_LOAD, unsafe.Pointer(&load), unsafe.Sizeof(load))
		defer unix.Close(prog)
		create := [4]uint32{uint32(prog), 1, unix.BPF_XDP, unix.XDP_FLAGS_SKB_MODE} // 1 is lo
		link = bpf(t, unix.BPF_LINK_CREATE, unsafe.Pointer(&create), unsafe.Sizeof(create))
	})
	fixes := w.finds(t, nil, "tight bpf: on lo an XDP program (")
	if len(fixes) == 1 && !strings.HasPrefix(fixes[0], "ip link set dev lo xdpgeneric off ") {
		t.Errorf("it is mended by %q", fixes[0])
	}
	unix.Close(link) // which takes it away, as the command does where it has no link
	w.finds(t, nil)
}

func bpf(t *testing.T, command int, attr unsafe.Pointer, size uintptr) (fd int) {
	t.Helper()
	n, _, errno := unix.Syscall(unix.SYS_BPF, uintptr(command), uintptr(attr), size)
	if errno != 0 {
		kit.Require(t, errno, "right to load BPF programs")
	}
	return int(n)
}

// TestDoctorRules has the same redirection written in other ways, whole and with
// a part missing.
func TestDoctorRules(t *testing.T) {
	w := newPatient(t)
	iptables := func(kind string) string {
		var lines []string
		for _, command := range []string{"iptables-" + kind, "ip6tables-" + kind} {
			lines = append(lines, command+" -t mangle -N DIVERT", command+" -t mangle -A DIVERT -j MARK --set-mark 1", command+" -t mangle -A DIVERT -j ACCEPT")
			for _, proto := range []string{"tcp", "udp"} {
				lines = append(lines, command+" -t mangle -A PREROUTING -p "+proto+" -m socket --transparent -j DIVERT",
					command+" -t mangle -A PREROUTING -p "+proto+" --dport 7777 -j TPROXY --on-port 7777 --tproxy-mark 1/1")
			}
		}
		return strings.Join(lines, " && ")
	}
	const answers = "meta l4proto { tcp, udp } socket transparent 1 meta mark set 1 accept; "
	nft := func(rules string) string {
		return "nft 'table inet other { set ports { type inet_service; elements = { 7777, 9999 }; }; " +
			"map to { type inet_service : inet_service; elements = { 8000 : 7777 }; }; chain divert { meta mark set mark or 1; accept; }; " +
			"chain prerouting { type filter hook prerouting priority mangle; " + rules + "; }; }'"
	}
	for name, tc := range map[string]struct {
		rules string
		want  []string
	}{
		"iptables-legacy":                   {rules: iptables("legacy")},
		"iptables-nft":                      {rules: iptables("nft")},
		"iptables-legacy, no UDP over IPv6": {iptables("legacy") + " && ip6tables-legacy -t mangle -D PREROUTING 4", []string{"wrong redirection: no rule redirects ip6 traffic over UDP to port 7777"}},
		"iptables-nft, no mark":             {iptables("nft") + " && iptables-nft -t mangle -D DIVERT 1", []string{"wrong return path: no rule marks what backends answer to the clients' addresses over TCP and UDP"}},
		"sets and maps":                     {rules: nft(answers + "tcp dport @ports tproxy to :7777 meta mark set 1; udp dport 8000 tproxy to :udp dport map @to meta mark set 1")},
		"a chain":                           {rules: nft("socket transparent 1 jump divert; meta mark set 1; meta l4proto { tcp, udp } tproxy to :7777")},
		"another map": {
			nft(answers + "tcp dport 7777 tproxy to :7777 meta mark set 1; udp dport 8000 tproxy to :udp dport map { 8000 : 7776 } meta mark set 1"),
			[]string{"wrong redirection: no rule redirects ip traffic over UDP", "wrong redirection: no rule redirects ip6 traffic over UDP"},
		},
		"no mark": {nft(answers + "meta l4proto { tcp, udp } tproxy to :7777"), []string{"wrong redirection: the rule that redirects to port 7777 sets no mark", "wrong redirection: the rule that redirects to port 7777 sets no mark"}},
		"nothing": {"true", []string{"wrong redirection: no rule redirects ip traffic over TCP and UDP", "wrong redirection: no rule redirects ip6 traffic over TCP and UDP", "wrong return path"}},
	} {
		t.Run(name, func(t *testing.T) {
			w.proxy.Run(t, "nft", "flush", "ruleset")
			w.proxy.Run(t, "sh", "-c", "for c in iptables-legacy ip6tables-legacy; do $c -t mangle -F; $c -t mangle -X; done")
			w.proxy.Run(t, "sh", "-c", tc.rules)
			w.finds(t, nil, tc.want...)
		})
	}
}

// TestDoctorBare begins with no rules at all: the commands that doctor prints
// make the table too.
func TestDoctorBare(t *testing.T) {
	w := newPatient(t)
	w.proxy.Run(t, "nft", "flush", "ruleset")
	for _, fix := range w.finds(t, nil, "wrong redirection: no rule redirects ip ", "wrong redirection: no rule redirects ip6 ", "wrong return path") {
		network := "198.51.100.0/24"
		if strings.Contains(fix, "ip6 daddr") {
			network = "2001:db8:ace:1::/64"
		}
		w.proxy.Run(t, "sh", "-c", strings.ReplaceAll(fix, "NETWORK", network))
	}
	w.finds(t, nil)
}
