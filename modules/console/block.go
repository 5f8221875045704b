package console

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

var errBlock = errors.New("the pool has options that cannot be written as a Caddyfile here")

// block writes a pool as a Caddyfile has it. It knows how options are written in
// general, not which there are; that what it has written means the pool is
// found out by adapting it.
func block(name string, pool json.RawMessage) (string, error) {
	var options map[string]any
	d := json.NewDecoder(bytes.NewReader(pool))
	d.UseNumber()
	if err := d.Decode(&options); err != nil {
		return "", err
	}
	var b strings.Builder
	fmt.Fprintf(&b, "wayhouse {\npool %s {\n", quote(name))
	w := blockWriter{&b}
	w.pool(maps.Clone(options))
	b.WriteString("}\n}\n")
	text := caddyfile.Format([]byte("{\n" + b.String() + "}\n"))
	out, _, err := caddyconfig.GetAdapter("caddyfile").Adapt(text, nil)
	if err != nil {
		return "", errBlock
	}
	var got struct {
		Apps struct {
			Wayhouse struct {
				Pools map[string]map[string]any `json:"pools"`
			} `json:"wayhouse"`
		} `json:"apps"`
	}
	d = json.NewDecoder(bytes.NewReader(out))
	d.UseNumber()
	if err := d.Decode(&got); err != nil {
		return "", err
	}
	if !reflect.DeepEqual(normal(got.Apps.Wayhouse.Pools[name]), normal(options)) {
		return "", errBlock
	}
	return inner(string(text)), nil
}

// inner is the pool of a whole Caddyfile, as it stands in the block wayhouse.
func inner(text string) string {
	lines := strings.SplitAfter(text, "\n")
	var b strings.Builder
	for _, l := range lines {
		if strings.HasPrefix(l, "\t\t") {
			b.WriteString(l[2:])
		}
	}
	return b.String()
}

// blockWriter writes options, a line each.
type blockWriter struct{ b *strings.Builder }

func (w blockWriter) line(key string, args ...any) {
	w.b.WriteString(key)
	for _, a := range args {
		if a == nil {
			continue
		}
		w.b.WriteByte(' ')
		w.b.WriteString(scalar(key, a))
	}
	w.b.WriteByte('\n')
}

// pool writes the options of a pool. Those that a Caddyfile writes otherwise
// than JSON are taken out of the rest first.
func (w blockWriter) pool(o map[string]any) {
	take := func(key string) any {
		v := o[key]
		delete(o, key)
		return v
	}
	list := func(key, as string) {
		if v, ok := take(key).([]any); ok {
			w.line(as, v...)
		}
	}
	list("targets", "to")
	w.module("balancer", "policy", take("balancer"))
	w.module("health", "check", take("health"))
	if limits, ok := take("per_backend").(map[string]any); ok {
		maps.Copy(o, limits)
	}
	for key, second := range map[string]string{"on_backend_down": "hold", "on_backend_removed": "drain_deadline", "proxy_protocol": "proxy_protocol_udp"} {
		first, wait := take(key), take(second)
		if second != "proxy_protocol_udp" && wait != nil {
			wait = duration(wait)
			if first == nil { // the one that waits is the default
				first = strings.TrimSuffix(second, "_deadline")
			}
		}
		if first != nil {
			w.line(key, first, wait)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(o)) {
		if v, ok := o[key].([]any); ok {
			w.line(key, v...)
			continue
		}
		w.line(key, o[key])
	}
}

// module writes a guest with its options in a block.
func (w blockWriter) module(key, inline string, v any) {
	o, ok := v.(map[string]any)
	if !ok {
		return
	}
	o = maps.Clone(o)
	kind := o[inline]
	delete(o, inline)
	hash := o["hash_on"]
	delete(o, "hash_on")
	weights, _ := o["weights"].(map[string]any)
	delete(o, "weights")
	w.b.WriteString(key)
	for _, a := range []any{kind, hash} {
		if a != nil {
			w.b.WriteString(" " + scalar(key, a))
		}
	}
	if len(o)+len(weights) == 0 {
		w.b.WriteByte('\n')
		return
	}
	w.b.WriteString(" {\n")
	for _, k := range slices.Sorted(maps.Keys(o)) {
		w.line(k, o[k])
	}
	for _, k := range slices.Sorted(maps.Keys(weights)) {
		w.line("weight", k, weights[k])
	}
	w.b.WriteString("}\n")
}

// durations are the options whose numbers are nanoseconds.
var durations = map[string]bool{
	"connect_timeout": true, "idle_timeout": true, "max_lifetime": true, "keepalive": true,
	"hold": true, "drain_deadline": true, "interval": true, "timeout": true,
}

// duration writes nanoseconds as people do.
func duration(v any) any {
	n, ok := v.(json.Number)
	if !ok {
		return v
	}
	ns, err := n.Int64()
	if err != nil {
		return v
	}
	s := time.Duration(ns).String()
	for _, zero := range []string{"m0s", "h0m"} { // 10m0s, 2h0m
		if strings.HasSuffix(s, zero) {
			s = strings.TrimSuffix(s, zero[1:])
		}
	}
	return s
}

func scalar(key string, v any) string {
	switch v := v.(type) {
	case json.Number:
		if durations[key] {
			return fmt.Sprint(duration(v))
		}
		return v.String()
	case bool:
		if v {
			return "on"
		}
		return "off"
	case string:
		return quote(v)
	}
	return "?" // which no adapter takes for what it was
}

// quote writes a word so that a Caddyfile reads it as it is.
func quote(s string) string {
	if s != "" && !strings.ContainsAny(s, " \t\n\r\"`\\#{}") {
		return s
	}
	if !strings.Contains(s, "`") && !strings.Contains(s, "\\") {
		return "`" + s + "`"
	}
	return `"` + strings.ReplaceAll(s, `"`, `\"`) + `"`
}

// normal is a pool with its durations as numbers, in whichever way they were
// written.
func normal(v any) any {
	switch v := v.(type) {
	case map[string]any:
		m := make(map[string]any, len(v))
		for k, e := range v {
			m[k] = normal(e)
			s, ok := e.(string)
			if !ok || !durations[k] {
				continue
			}
			if d, err := time.ParseDuration(s); err == nil {
				m[k] = json.Number(fmt.Sprint(int64(d)))
			} else if s == "off" {
				m[k] = json.Number("0")
			}
		}
		return m
	case []any:
		l := make([]any, len(v))
		for i, e := range v {
			l[i] = normal(e)
		}
		return l
	}
	return v
}
