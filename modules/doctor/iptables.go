package doctor

import (
	"slices"
	"strconv"
	"strings"
)

// readIptables reads what iptables-save prints, of either kind of iptables.
func (f *Filter) readIptables(b []byte, v6 bool) {
	family := "ip"
	if v6 {
		family = "ip6"
	}
	table := ""
	var rules []rule
	for line := range strings.Lines(string(b)) {
		line = strings.TrimSpace(line)
		if name, ok := strings.CutPrefix(line, "*"); ok {
			table = name
			continue
		}
		if w := words(line); len(w) > 2 && w[0] == "-A" {
			r, tracks := iptablesRule(table, w[1], w[2:])
			r.family = family
			rules = append(rules, r)
			f.Tracked = f.Tracked || tracks || table == "nat"
		}
	}
	f.take(rules)
}

// iptablesRule reads the words of one rule, and tells whether it needs
// connections tracked.
func iptablesRule(table, chain string, w []string) (r rule, tracks bool) {
	r = rule{chain: table + " " + chain, protos: both}
	var port, mark, target string
	for i, option := range w {
		if option == "--notrack" {
			r.noTrack = true
		}
		if i+1 == len(w) {
			break
		}
		switch v := w[i+1]; option {
		case "-p":
			if i == 0 || w[i-1] != "!" {
				r.protos = protoNamed(v)
			}
		case "-m":
			r.transparent = r.transparent || v == "socket"
			tracks = tracks || slices.Contains(tracking, v)
		case "-j", "-g":
			target = v
		case "--on-port":
			port = v
		case "--tproxy-mark", "--set-xmark", "--set-mark", "--or-mark":
			mark, _, _ = strings.Cut(v, "/")
		}
	}
	r.mark, _ = strconv.ParseUint(mark, 0, 64)
	switch target {
	case "TPROXY":
		if n, err := strconv.ParseUint(port, 10, 16); err == nil {
			r.redirects = []uint16{uint16(n)}
		}
	case "NOTRACK":
		r.noTrack = true
	case "CONNMARK":
		tracks = true
	default:
		r.to = table + " " + target
	}
	return r, tracks
}

// tracking are the matches that need connections tracked.
var tracking = []string{"conntrack", "state", "connmark", "connlimit", "connbytes", "helper", "cluster"}

// words splits a line at blanks that are not within quotes.
func words(line string) (all []string) {
	var word strings.Builder
	open, quoted := false, false
	for i := 0; i < len(line); i++ {
		switch c := line[i]; {
		case c == '\\' && quoted && i+1 < len(line):
			i++
			word.WriteByte(line[i])
		case c == '"':
			quoted, open = !quoted, true
		case c == ' ' && !quoted:
			if open {
				all = append(all, word.String())
			}
			word.Reset()
			open = false
		default:
			word.WriteByte(c)
			open = true
		}
	}
	if open {
		all = append(all, word.String())
	}
	return all
}
