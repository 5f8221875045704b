// Package portrange reads ports and ranges of ports as configs have them.
package portrange

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
)

// Range is a port or several in a row, in JSON a number or a string.
type Range struct{ First, Last uint16 }

// Parse reads a port or a range of ports.
func Parse(s string) (Range, error) {
	first, last, ranged := strings.Cut(s, "-")
	if !ranged {
		last = first
	}
	lo, err := strconv.ParseUint(first, 10, 16)
	if err != nil || lo == 0 {
		return Range{}, fmt.Errorf("%q is neither a port from 1 to 65535 nor a range such as 30000-30099", s)
	}
	hi, err := strconv.ParseUint(last, 10, 16)
	if err != nil {
		return Range{}, fmt.Errorf("%q is neither a port from 1 to 65535 nor a range such as 30000-30099", s)
	}
	if hi < lo {
		return Range{}, fmt.Errorf("%q runs backwards: %s-%s is the range", s, last, first)
	}
	return Range{uint16(lo), uint16(hi)}, nil
}

// UnmarshalJSON reads a number or a string.
func (r *Range) UnmarshalJSON(b []byte) (err error) {
	s := string(b)
	if len(b) > 0 && b[0] == '"' {
		if err := json.Unmarshal(b, &s); err != nil {
			return err
		}
	}
	*r, err = Parse(s)
	return err
}

// MarshalJSON writes a number for one port and a string for several.
func (r Range) MarshalJSON() ([]byte, error) {
	if r.First == r.Last {
		return json.Marshal(r.First)
	}
	return json.Marshal(r.String())
}

func (r Range) String() string {
	if r.First == r.Last {
		return strconv.Itoa(int(r.First))
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}
