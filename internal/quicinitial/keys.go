package quicinitial

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/sha256"
	"encoding/binary"
)

// The versions whose Initial packets can be opened. Drafts are 0xff000000 and
// their number.
const (
	v1      = 1
	v2      = 0x6b3343cf
	draft   = 0xff000000
	draft23 = draft + 23 // from here on Initials look like those of version 1
	draft29 = draft + 29
	draft33 = draft + 33 // from here on the salt is that of version 1
	draft34 = draft + 34
	keyLen  = 16
	ivLen   = 12
	tagLen  = 16
)

// suite is what the keys of a version are made with.
type suite struct {
	salt        mac
	key, iv, hp []byte // labels
}

var (
	clientIn     = label("client in", sha256.Size)
	suiteDraft29 = newSuite("\xaf\xbf\xec\x28\x99\x93\xd2\x4c\x9e\x97\x86\xf1\x9c\x61\x11\xe0\x43\x90\xa8\x99", "quic ")
	suiteV1      = newSuite("\x38\x76\x2c\xf7\xf5\x59\x34\xb3\x4d\x17\x9a\xe6\xa4\xc8\x0c\xad\xcc\xbb\x7f\x0a", "quic ")
	suiteV2      = newSuite("\x0d\xed\xe3\xde\xf7\x00\xa6\xdb\x81\x93\x81\xbe\x6e\x26\x9d\xcb\xf9\xbd\x2e\xd9", "quicv2 ")
)

func newSuite(salt, prefix string) *suite {
	s := &suite{key: label(prefix+"key", keyLen), iv: label(prefix+"iv", ivLen), hp: label(prefix+"hp", keyLen)}
	newHasher().setKey(&s.salt, []byte(salt))
	return s
}

func suiteOf(version uint32) *suite {
	switch {
	case version == v2:
		return suiteV2
	case version >= draft29 && version < draft33:
		return suiteDraft29
	}
	return suiteV1
}

// label is what HKDF-Expand-Label of TLS 1.3 hashes for a label without
// context and no more than one block.
func label(name string, n int) []byte {
	b := []byte{byte(n >> 8), byte(n), byte(len("tls13 ") + len(name))}
	return append(append(append(b, "tls13 "...), name...), 0, 1)
}

// keys opens the client's Initial packets of one connection (RFC 9001, 5.2).
// They are made of the first connection ID and a public salt: whoever sees the
// packet can make them, and nothing here is secret.
type keys struct {
	version uint32 // of the connection, and its ID; no version: none yet
	dcidLen int
	dcid    [maxCID]byte

	aead   cipher.AEAD
	header cipher.Block
	iv     [ivLen]byte

	// Scratch space, here because it would escape.
	hasher *hasher
	client mac
	mask   [aes.BlockSize]byte
	nonce  [ivLen]byte
}

// make sets k up. That takes most of the time of a look at a packet, so that
// keys which were of the same connection before are left as they are: it is
// looked at again for each datagram that comes, and by each who asks.
func (k *keys) make(version uint32, dcid []byte) error {
	if k.version == version && bytes.Equal(k.dcid[:k.dcidLen], dcid) {
		return nil
	}
	k.version = 0
	if k.hasher == nil {
		k.hasher = newHasher()
	}
	s := suiteOf(version)
	k.hasher.setKey(&k.client, k.hasher.sum(&s.salt, dcid))
	k.hasher.setKey(&k.client, k.hasher.sum(&k.client, clientIn))
	block, err := aes.NewCipher(k.hasher.sum(&k.client, s.key)[:keyLen])
	if err != nil {
		return err
	}
	if k.aead, err = cipher.NewGCM(block); err != nil {
		return err
	}
	if k.header, err = aes.NewCipher(k.hasher.sum(&k.client, s.hp)[:keyLen]); err != nil {
		return err
	}
	copy(k.iv[:], k.hasher.sum(&k.client, s.iv))
	k.version, k.dcidLen = version, copy(k.dcid[:], dcid)
	return nil
}

// open takes the protection off a packet: b is from its first byte to its end,
// and pnAt where its packet number is. The plaintext is written behind dst[:0],
// which needs room for len(b).
func (k *keys) open(dst, b []byte, pnAt int) ([]byte, bool) {
	const maxPN = 4
	if len(b) < pnAt+maxPN+aes.BlockSize {
		return nil, false
	}
	k.header.Encrypt(k.mask[:], b[pnAt+maxPN:][:aes.BlockSize])
	first := b[0] ^ k.mask[0]&0x0f
	pnLen := int(first&3) + 1
	head := append(dst[:0], b[:pnAt+pnLen]...)
	head[0] = first
	var pn [8]byte
	for i := range pnLen {
		head[pnAt+i] ^= k.mask[1+i]
		pn[len(pn)-pnLen+i] = head[pnAt+i]
	}
	k.nonce = k.iv
	binary.BigEndian.PutUint64(k.nonce[4:], binary.BigEndian.Uint64(k.iv[4:])^binary.BigEndian.Uint64(pn[:]))
	plain, err := k.aead.Open(head[len(head):], k.nonce[:], b[pnAt+pnLen:], head)
	return plain, err == nil
}
