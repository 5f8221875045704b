package caddyopt

import (
	"fmt"
	"math/bits"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// Func is an option that f reads: d stands at its name, and f takes the
// arguments and the block. Both being used up is checked after it.
func Func(f func(d *caddyfile.Dispenser) error) Option { return Option{read: f} }

// Nested is an option with a block of options and no arguments.
func Nested(options Options) Option {
	return Func(func(d *caddyfile.Dispenser) error { return Block(d, options) })
}

// Ptr is an option whose field is nil unless it is given.
func Ptr[T any](to **T, kind func(*T) Option) Option {
	v := new(T)
	o := kind(v)
	return Option{many: o.many, read: func(d *caddyfile.Dispenser) error {
		if err := o.read(d); err != nil {
			return err
		}
		*to = v
		return nil
	}}
}

// value is an option with exactly one argument.
func value(set func(string) error) Option {
	return Func(func(d *caddyfile.Dispenser) error {
		name := d.Val()
		if !d.NextArg() {
			return d.Errf("%s: a value is missing", name)
		}
		if err := set(d.Val()); err != nil {
			return d.Errf("%s: %v", name, err)
		}
		return nil
	})
}

// Value is an option with one argument that parse understands.
func Value[T any](to *T, parse func(string) (T, error)) Option {
	return value(func(s string) (err error) {
		v, err := parse(s)
		if err == nil {
			*to = v
		}
		return err
	})
}

// String is an option with any one argument.
func String[T ~string](to *T) Option {
	return value(func(s string) error {
		*to = T(s)
		return nil
	})
}

// Strings is an option with one or more arguments, all of which are appended.
// It may be given more than once.
func Strings(to *[]string) Option {
	return Many(Func(func(d *caddyfile.Dispenser) error {
		name := d.Val()
		args := d.RemainingArgs()
		if len(args) == 0 {
			return d.Errf("%s: a value is missing", name)
		}
		*to = append(*to, args...)
		return nil
	}))
}

// Int is an option with a whole number.
func Int[T ~int | ~int64](to *T) Option {
	return Value(to, func(s string) (T, error) {
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil || int64(T(n)) != n {
			return 0, fmt.Errorf("%q is not a whole number", s)
		}
		return T(n), nil
	})
}

// Float is an option with a number.
func Float(to *float64) Option {
	return Value(to, func(s string) (float64, error) {
		f, err := strconv.ParseFloat(s, 64)
		if err != nil || f-f != 0 { // not NaN, not infinite
			return 0, fmt.Errorf("%q is not a number", s)
		}
		return f, nil
	})
}

// Word is an option without arguments, which is true when it is there.
func Word(to *bool) Option {
	return Func(func(*caddyfile.Dispenser) error {
		*to = true
		return nil
	})
}

// Switch is an option that is on or off.
func Switch(to *bool) Option {
	return Value(to, func(s string) (bool, error) {
		if s != "on" && s != "off" {
			return false, fmt.Errorf("%q is neither on nor off", s)
		}
		return s == "on", nil
	})
}

// Duration is an option with a duration such as 300ms, 90s or 2d.
func Duration[T ~int64](to *T) Option {
	return Value(to, func(s string) (T, error) {
		d, err := caddy.ParseDuration(s)
		if err != nil {
			return 0, fmt.Errorf("%q is not a duration, such as 500ms or 90s", s)
		}
		return T(d), nil
	})
}

// Size is an option with a number of bytes: 4096, 64KiB, 16MiB, 1GB.
func Size(to *int64) Option { return Value(to, ParseSize) }

// Enum is an option with one of a few words.
func Enum[T ~string](to *T, allowed ...T) Option {
	return Value(to, func(s string) (T, error) {
		if slices.Contains(allowed, T(s)) {
			return T(s), nil
		}
		words := make([]string, len(allowed))
		for i, a := range allowed {
			words[i] = string(a)
		}
		return "", fmt.Errorf("%q is none of %s", s, strings.Join(words, ", "))
	})
}

var units = []struct {
	name  string
	bytes uint64
}{
	{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40},
	{"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}, {"B", 1},
}

// ParseSize reads a number of bytes with or without a unit.
func ParseSize(s string) (int64, error) {
	digits, unit := s, uint64(1)
	for _, u := range units {
		if rest, ok := strings.CutSuffix(s, u.name); ok {
			digits, unit = rest, u.bytes
			break
		}
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	over, bytes := bits.Mul64(n, unit)
	if err != nil || over != 0 || int64(bytes) < 0 {
		return 0, fmt.Errorf("%q is not a size, such as 4096, 64KiB or 16MiB", s)
	}
	return int64(bytes), nil
}
