package listener

import (
	"bytes"
	"encoding/json"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

// Which matchers a worker may ask. It has to be known that one cannot block:
// one that nothing is known of may look something up or read a file, and is asked
// in a goroutine.

// promptMatchers are caddy-l4's that only compare what they were provisioned with
// to bytes and addresses. Left out are those that replace placeholders as they
// match, since {file.…} reads a file, and those with guests or state.
var promptMatchers = map[string]bool{
	"local_ip": true, "postgres": true, "proxy_protocol": true, "regexp": true, "remote_ip": true,
	"socks4": true, "socks5": true, "ssh": true, "xmpp": true,
}

// promptHandshakes are the same among Caddy's matchers of TLS handshakes. The
// value tells whether a placeholder would be replaced as it matches.
var promptHandshakes = map[string]bool{"alpn": true, "local_ip": false, "remote_ip": false, "sni": true, "sni_regexp": false}

// promptSets reports whether a worker may ask all matchers of the sets, as the
// config has them. Whether the sniffers they ask are prompt is another question;
// sniffers are those of a listener's plan, which has no nested ones.
func promptSets(sets []caddy.ModuleMap, sniffers bool) bool {
	for _, set := range sets {
		for name, raw := range set {
			if !promptMatcher(name, raw, sniffers) {
				return false
			}
		}
	}
	return true
}

func promptMatcher(name string, raw json.RawMessage, sniffers bool) bool {
	switch {
	case promptMatchers[name]:
		return true
	case name == "not":
		var nested []caddy.ModuleMap
		return json.Unmarshal(raw, &nested) == nil && promptSets(nested, false)
	case name == "tls":
		var guests caddy.ModuleMap
		if json.Unmarshal(raw, &guests) != nil {
			return false
		}
		for guest, raw := range guests {
			replaces, ok := promptHandshakes[guest]
			if !ok || replaces && bytes.IndexByte(raw, '{') >= 0 {
				return false
			}
		}
		return true
	}
	info, err := caddy.GetModule("layer4.matchers." + name)
	if err != nil {
		return false
	}
	switch m := info.New().(type) {
	case sniff.User:
		_, ok := m.(FlowMatcher)
		return ok && sniffers
	case FlowMatcher, AddrMatcher:
		return true
	}
	return false
}
