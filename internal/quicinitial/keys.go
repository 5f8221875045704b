package quicinitial

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/sha256"
	"encoding/binary"
)

// The versions whose Initial packets can be opened. Drafts are 0xff000000 and
// their number.
const (
	v1       = 1
	v2       = 0x6b3343cf
	draft    = 0xff000000
	draft23  = draft + 23 // from here on Initials look like those of version 1
	draft29  = draft + 29
	draft33  = draft + 33 // from here on the salt is that of version 1
	draft34  = draft + 34
	keyLen   = 16
	ivLen    = 12
	tagLen   = 16
	blockLen = sha256.BlockSize
)

var (
	saltDraft29 = []byte("\xaf\xbf\xec\x28\x99\x93\xd2\x4c\x9e\x97\x86\xf1\x9c\x61\x11\xe0\x43\x90\xa8\x99")
	saltV1      = []byte("\x38\x76\x2c\xf7\xf5\x59\x34\xb3\x4d\x17\x9a\xe6\xa4\xc8\x0c\xad\xcc\xbb\x7f\x0a")
	saltV2      = []byte("\x0d\xed\xe3\xde\xf7\x00\xa6\xdb\x81\x93\x81\xbe\x6e\x26\x9d\xcb\xf9\xbd\x2e\xd9")
)

// keys opens the client's Initial packets of one connection (RFC 9001, 5.2).
// They are made of the first connection ID and a public salt: whoever sees the
// packet can make them, and nothing here is secret.
type keys struct {
	aead   cipher.AEAD
	header cipher.Block
	iv     [ivLen]byte

	mask  [aes.BlockSize]byte // of open, here because it would escape
	nonce [ivLen]byte
}

// make sets k up.
func (k *keys) make(version uint32, dcid []byte) error {
	salt, prefix := saltV1, "quic "
	switch {
	case version == v2:
		salt, prefix = saltV2, "quicv2 "
	case version >= draft29 && version < draft33:
		salt = saltDraft29
	}
	initial := hmac(salt, dcid)
	client := expand(initial[:], "", "client in", sha256.Size)
	key := expand(client[:], prefix, "key", keyLen)
	iv := expand(client[:], prefix, "iv", ivLen)
	hp := expand(client[:], prefix, "hp", keyLen)
	copy(k.iv[:], iv[:])
	block, err := aes.NewCipher(key[:keyLen])
	if err != nil {
		return err
	}
	if k.aead, err = cipher.NewGCM(block); err != nil {
		return err
	}
	k.header, err = aes.NewCipher(hp[:keyLen])
	return err
}

// expand is HKDF-Expand-Label of TLS 1.3 for a label without context and no
// more than one block.
func expand(secret []byte, prefix, label string, n int) [sha256.Size]byte {
	var info [64]byte
	b := append(info[:0], byte(n>>8), byte(n), byte(len("tls13 ")+len(prefix)+len(label)))
	b = append(append(append(b, "tls13 "...), prefix...), label...)
	return hmac(secret, append(b, 0, 1))
}

// hmac is HMAC-SHA256 of a short key and a short message, without the
// allocations of crypto/hmac.
func hmac(key, msg []byte) [sha256.Size]byte {
	var b [blockLen + 64]byte
	copy(b[:], key)
	for i := range blockLen {
		b[i] ^= 0x36
	}
	n := copy(b[blockLen:], msg)
	inner := sha256.Sum256(b[:blockLen+n])
	for i := range blockLen {
		b[i] ^= 0x36 ^ 0x5c
	}
	copy(b[blockLen:], inner[:])
	return sha256.Sum256(b[:blockLen+sha256.Size])
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
