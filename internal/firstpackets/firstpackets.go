// Package firstpackets has the first packets of connections and sessions of
// many programs, with what a reader of first packets has to say about each.
// Only tests import it. The file testdata/first-packets.json explains itself.
package firstpackets

import (
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"testing"
)

//go:embed testdata/first-packets.json
var data []byte

// Case is what a client sends first.
type Case struct {
	ID, Protocol, Transport string

	Segments []string `json:"segments_hex"`

	Expect struct {
		Recognised, More bool
		Key, Host        string
		HostOptional     bool     `json:"host_optional"`
		Tolerance        string   // either, early-match or nothing
		Steps            []string // more, partial or match, after each segment
	}
}

// All are the cases of the protocols given, or of every one.
func All(t testing.TB, protocols ...string) []Case {
	t.Helper()
	var file struct{ Cases []Case }
	if err := json.Unmarshal(data, &file); err != nil {
		t.Fatal(err)
	}
	var cases []Case
	for _, c := range file.Cases {
		wanted := len(protocols) == 0
		for _, p := range protocols {
			wanted = wanted || c.Protocol == p
		}
		if wanted {
			cases = append(cases, c)
		}
	}
	if len(cases) == 0 {
		t.Fatalf("no case of %v", protocols)
	}
	return cases
}

// One is the case of that ID.
func One(t testing.TB, id string) Case {
	t.Helper()
	for _, c := range All(t) {
		if c.ID == id {
			return c
		}
	}
	t.Fatalf("no case %s", id)
	return Case{}
}

// Data is the TCP segments or UDP datagrams.
func (c *Case) Data(t testing.TB) [][]byte {
	t.Helper()
	all := make([][]byte, len(c.Segments))
	for i, s := range c.Segments {
		b, err := hex.DecodeString(s)
		if err != nil {
			t.Fatalf("%s: %v", c.ID, err)
		}
		all[i] = b
	}
	return all
}

// UDP reports whether the data are datagrams.
func (c *Case) UDP() bool { return c.Transport == "udp" }
