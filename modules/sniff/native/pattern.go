package native

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/wayhouse-proxy/wayhouse/internal/literal"
)

const (
	maxPatterns = 32
	maxOffset   = 512
	defaultKey  = "firstbytes"
)

// patterns are literals at offsets, of which one has to be there.
type patterns struct {
	key string
	all []pattern
}

type pattern struct {
	offset  int
	literal []byte
}

// parsePatterns reads [key:NAME|] PATTERN {|PATTERN}.
func parsePatterns(s string) (patterns, error) {
	p := patterns{key: defaultKey}
	if strings.TrimSpace(s) == "" {
		return p, errors.New("nothing to look for: give at least one pattern, as in hex:ffffffff or @4 ascii:getstatus")
	}
	parts := strings.Split(s, "|")
	if name, ok := strings.CutPrefix(strings.TrimSpace(parts[0]), "key:"); ok {
		if name = strings.TrimSpace(name); name == "" {
			return p, errors.New("key: the name is empty")
		}
		p.key, parts = name, parts[1:]
	}
	if len(parts) == 0 || len(parts) > maxPatterns {
		return p, fmt.Errorf("%d patterns: from 1 to %d are allowed", len(parts), maxPatterns)
	}
	for i, part := range parts {
		one, err := parsePattern(strings.TrimSpace(part))
		if err != nil {
			return p, fmt.Errorf("pattern %d, %q: %w", i+1, part, err)
		}
		p.all = append(p.all, one)
	}
	return p, nil
}

// parsePattern reads [@OFFSET ](hex:DIGITS|ascii:TEXT).
func parsePattern(s string) (p pattern, err error) {
	if rest, ok := strings.CutPrefix(s, "@"); ok {
		number, after, _ := strings.Cut(rest, " ")
		if p.offset, err = strconv.Atoi(number); err != nil || p.offset < 0 || p.offset > maxOffset {
			return p, fmt.Errorf("the offset %q is not a number from 0 to %d", number, maxOffset)
		}
		s = strings.TrimSpace(after)
	}
	p.literal, err = literal.Parse(s)
	return p, err
}

// match looks for the patterns in the first datagram, or in a stream so far.
func (p *patterns) match(b []byte, whole bool) answer {
	result := no
	for i := range p.all {
		switch a := p.all[i].match(b, whole); a {
		case yes:
			return yes
		case more:
			result = more
		}
	}
	return result
}

func (p *pattern) match(b []byte, whole bool) answer {
	b = b[min(p.offset, len(b)):]
	if len(b) >= len(p.literal) {
		if bytes.Equal(b[:len(p.literal)], p.literal) {
			return yes
		}
		return no
	}
	if whole || !bytes.Equal(b, p.literal[:len(b)]) {
		return no
	}
	return more
}
