// Package native has the native sniffers, wayhouse.sniffers.NAME. Each protocol
// is a file of pure functions over bytes; here they become modules.
//
// None of them allocates, except quic for the keys of a new client, and none
// says more of bytes than they prove: a datagram is judged whole, a stream only
// when no byte that may come could change the verdict.
package native

import (
	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/clienthello"
	"github.com/wayhouse-proxy/wayhouse/internal/quicinitial"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

func init() {
	caddy.RegisterModule(new(A2S))
	caddy.RegisterModule(new(Quake3))
	caddy.RegisterModule(new(RakNet))
	caddy.RegisterModule(new(WireGuard))
	caddy.RegisterModule(new(OpenVPN))
	caddy.RegisterModule(new(TeamSpeak3))
	caddy.RegisterModule(new(ENet))
	caddy.RegisterModule(new(STUN))
	caddy.RegisterModule(new(DTLS))
	caddy.RegisterModule(new(QUIC))
	caddy.RegisterModule(new(Minecraft))
}

// answer is what a parser of a stream says.
type answer uint8

const (
	no answer = iota
	yes
	more // it may be the beginning of a yes
)

// verdict sets the key of a yes.
func verdict(a answer, key string, h *sniff.Hint) sniff.Verdict {
	switch a {
	case yes:
		h.SetKey(key)
		return sniff.Recognised
	case more:
		return sniff.Undecided
	}
	return sniff.Unrecognised
}

// datagram is the verdict of a protocol that is spoken over UDP alone.
func datagram(in *sniff.Input, is func([]byte) bool, key string, h *sniff.Hint) sniff.Verdict {
	if in.UDP() && is(in.Bytes) {
		return verdict(yes, key, h)
	}
	return sniff.Unrecognised
}

// plain is a sniffer without options.
type plain struct{}

// NeverRejects implements sniff.NeverRejects.
func (plain) NeverRejects() {}

// UnmarshalCaddyfile reads the sniffer's name.
func (plain) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume sniffer name
	return caddyopt.None(d)
}

func info(name string, m func() caddy.Module) caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: caddy.ModuleID("wayhouse.sniffers." + name), New: m}
}

// A2S recognises Valve server queries.
type A2S struct{ plain }

// CaddyModule returns the Caddy module information.
func (*A2S) CaddyModule() caddy.ModuleInfo {
	return info("a2s", func() caddy.Module { return new(A2S) })
}

// Sniff implements sniff.Sniffer.
func (*A2S) Sniff(in *sniff.Input, h *sniff.Hint) sniff.Verdict {
	return datagram(in, isA2S, "a2s", h)
}

// Quake3 recognises queries and connects of idTech 3 games and of FiveM.
type Quake3 struct{ plain }

// CaddyModule returns the Caddy module information.
func (*Quake3) CaddyModule() caddy.ModuleInfo {
	return info("quake3", func() caddy.Module { return new(Quake3) })
}

// Sniff implements sniff.Sniffer.
func (*Quake3) Sniff(in *sniff.Input, h *sniff.Hint) sniff.Verdict {
	return datagram(in, isQuake3, "quake3", h)
}

// RakNet recognises the offline messages of RakNet games, such as Minecraft
// Bedrock.
type RakNet struct{ plain }

// CaddyModule returns the Caddy module information.
func (*RakNet) CaddyModule() caddy.ModuleInfo {
	return info("raknet", func() caddy.Module { return new(RakNet) })
}

// Sniff implements sniff.Sniffer.
func (*RakNet) Sniff(in *sniff.Input, h *sniff.Hint) sniff.Verdict {
	return datagram(in, isRakNet, "raknet", h)
}

// WireGuard recognises a handshake initiation.
type WireGuard struct{ plain }

// CaddyModule returns the Caddy module information.
func (*WireGuard) CaddyModule() caddy.ModuleInfo {
	return info("wireguard", func() caddy.Module { return new(WireGuard) })
}

// Sniff implements sniff.Sniffer.
func (*WireGuard) Sniff(in *sniff.Input, h *sniff.Hint) sniff.Verdict {
	return datagram(in, isWireGuard, "wireguard", h)
}

// OpenVPN recognises a client's hard reset, over UDP and over TCP. That is one
// byte and a length: about 2 in 256 random datagrams look like it, so it is to
// be the last of several.
type OpenVPN struct{ plain }

// CaddyModule returns the Caddy module information.
func (*OpenVPN) CaddyModule() caddy.ModuleInfo {
	return info("openvpn", func() caddy.Module { return new(OpenVPN) })
}

// Sniff implements sniff.Sniffer.
func (*OpenVPN) Sniff(in *sniff.Input, h *sniff.Hint) sniff.Verdict {
	if in.UDP() {
		return datagram(in, isOpenVPN, "openvpn", h)
	}
	return verdict(openVPNStream(in.Bytes), "openvpn", h)
}

// TeamSpeak3 recognises a client's first packet.
type TeamSpeak3 struct{ plain }

// CaddyModule returns the Caddy module information.
func (*TeamSpeak3) CaddyModule() caddy.ModuleInfo {
	return info("teamspeak3", func() caddy.Module { return new(TeamSpeak3) })
}

// Sniff implements sniff.Sniffer.
func (*TeamSpeak3) Sniff(in *sniff.Input, h *sniff.Hint) sniff.Verdict {
	return datagram(in, isTeamSpeak3, "teamspeak3", h)
}

// ENet recognises a connect of ENet games.
type ENet struct{ plain }

// CaddyModule returns the Caddy module information.
func (*ENet) CaddyModule() caddy.ModuleInfo {
	return info("enet", func() caddy.Module { return new(ENet) })
}

// Sniff implements sniff.Sniffer.
func (*ENet) Sniff(in *sniff.Input, h *sniff.Hint) sniff.Verdict {
	return datagram(in, isENet, "enet", h)
}

// STUN recognises a request of STUN or TURN, over UDP and over TCP.
type STUN struct{ plain }

// CaddyModule returns the Caddy module information.
func (*STUN) CaddyModule() caddy.ModuleInfo {
	return info("stun", func() caddy.Module { return new(STUN) })
}

// Sniff implements sniff.Sniffer.
func (*STUN) Sniff(in *sniff.Input, h *sniff.Hint) sniff.Verdict {
	if in.UDP() {
		return datagram(in, isSTUN, "stun", h)
	}
	return verdict(stunStream(in.Bytes), "stun", h)
}

// DTLS recognises a ClientHello over UDP and reads its server name.
type DTLS struct{ plain }

// CaddyModule returns the Caddy module information.
func (*DTLS) CaddyModule() caddy.ModuleInfo {
	return info("dtls", func() caddy.Module { return new(DTLS) })
}

// Sniff implements sniff.Sniffer.
func (*DTLS) Sniff(in *sniff.Input, h *sniff.Hint) sniff.Verdict {
	if !in.UDP() {
		return sniff.Unrecognised
	}
	name, state := appendDTLSName(h.Host[:0], in.Datagrams)
	return named(name, "dtls", h, state != clienthello.NotTLS, state == clienthello.Done)
}

// QUIC recognises a client's Initial and reads its server name.
type QUIC struct{ plain }

// CaddyModule returns the Caddy module information.
func (*QUIC) CaddyModule() caddy.ModuleInfo {
	return info("quic", func() caddy.Module { return new(QUIC) })
}

// Sniff implements sniff.Sniffer.
func (*QUIC) Sniff(in *sniff.Input, h *sniff.Hint) sniff.Verdict {
	if !in.UDP() {
		return sniff.Unrecognised
	}
	name, state := quicinitial.AppendName(h.Host[:0], in.Datagrams)
	return named(name, "quic", h, state != quicinitial.NotQUIC, state == quicinitial.Done)
}

// named is the verdict of a protocol that brings the name in a hello. name is
// made of the hint's buffer.
func named(name []byte, key string, h *sniff.Hint, recognised, whole bool) sniff.Verdict {
	h.Host = name
	switch {
	case !recognised:
		return sniff.Unrecognised
	case !whole:
		h.SetKey(key)
		return sniff.Partial
	}
	h.HasHost = len(name) > 0
	return verdict(yes, key, h)
}

// Minecraft recognises the handshake of Minecraft Java and the server list
// pings before it, and reads the host, what the client wants and the protocol
// version.
type Minecraft struct{ plain }

// CaddyModule returns the Caddy module information.
func (*Minecraft) CaddyModule() caddy.ModuleInfo {
	return info("minecraft", func() caddy.Module { return new(Minecraft) })
}

// Sniff implements sniff.Sniffer.
func (*Minecraft) Sniff(in *sniff.Input, h *sniff.Hint) sniff.Verdict {
	if in.UDP() {
		return sniff.Unrecognised
	}
	var hs handshake
	a := hs.parse(in.Bytes, in.Final)
	if a != yes {
		return verdict(a, "", h)
	}
	if len(hs.host) > 0 {
		h.SetHost(hs.host)
	} else if len(hs.wide) > 0 {
		h.Host, h.HasHost = appendNarrow(h.Host[:0], hs.wide), true
	}
	h.AddPart("state", hs.state())
	if hs.versioned {
		h.AddNumber("protocol", int64(hs.protocol))
	}
	return verdict(yes, "minecraft", h)
}

// Interface guards
var (
	_ sniff.Native = (*A2S)(nil)
	_ sniff.Native = (*Quake3)(nil)
	_ sniff.Native = (*RakNet)(nil)
	_ sniff.Native = (*WireGuard)(nil)
	_ sniff.Native = (*OpenVPN)(nil)
	_ sniff.Native = (*TeamSpeak3)(nil)
	_ sniff.Native = (*ENet)(nil)
	_ sniff.Native = (*STUN)(nil)
	_ sniff.Native = (*DTLS)(nil)
	_ sniff.Native = (*QUIC)(nil)
	_ sniff.Native = (*Minecraft)(nil)
)
