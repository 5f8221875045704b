package resolver

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"
)

// keyPart is a part of a flow that an answer depends on.
type keyPart struct {
	kind     Part
	from, to int // of PartFirstBytes
}

// Part is a kind of part of a cache's key.
type Part uint8

// The parts.
const (
	PartSrcIP Part = iota
	PartSrcIPPort
	PartSNI
	PartRoutingKey
	PartFirstBytes
)

var partNames = [...]string{"src_ip", "src_ip_port", "sni", "routing_key"}

func parseKeyPart(s string) (keyPart, error) {
	for k, name := range partNames {
		if s == name {
			return keyPart{kind: Part(k)}, nil
		}
	}
	name, span, _ := strings.Cut(s, ":")
	a, b, ok := strings.Cut(span, ":")
	if name != "first_bytes" || !ok {
		return keyPart{}, fmt.Errorf("%q is none of %s, first_bytes:A:B", s, strings.Join(partNames[:], ", "))
	}
	from, err1 := strconv.ParseUint(a, 10, 16)
	to, err2 := strconv.ParseUint(b, 10, 16)
	if err1 != nil || err2 != nil || from >= to || to > mostFirstBytes {
		return keyPart{}, fmt.Errorf("%q: from byte A up to B, with A below B and B at most %d, as in first_bytes:0:16", s, mostFirstBytes)
	}
	return keyPart{kind: PartFirstBytes, from: int(from), to: int(to)}, nil
}

// cacheKey stands for the parts of a flow: their hash, so that an entry's size
// does not depend on what clients send.
type cacheKey [sha256.Size]byte

// key is the cache key of a flow. ok is false when it lacks a part.
func key(parts []keyPart, r *Request) (k cacheKey, ok bool) {
	if len(parts) == 0 {
		return k, false
	}
	var b []byte
	add := func(p []byte) {
		b = binary.BigEndian.AppendUint32(b, uint32(len(p)))
		b = append(b, p...)
	}
	for _, p := range parts {
		switch p.kind {
		case PartSrcIP:
			add(r.Client.Addr().Unmap().AsSlice())
		case PartSrcIPPort:
			add(r.Client.Addr().Unmap().AsSlice())
			b = binary.BigEndian.AppendUint16(b, r.Client.Port())
		case PartSNI:
			if r.SNI == "" {
				return k, false
			}
			add([]byte(r.SNI))
		case PartRoutingKey:
			if r.RoutingKey == "" {
				return k, false
			}
			add([]byte(r.RoutingKey))
		case PartFirstBytes:
			if len(r.FirstBytes) < p.to {
				return k, false
			}
			add(r.FirstBytes[p.from:p.to])
		}
	}
	return sha256.Sum256(b), true
}
