package console

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"time"
)

// What the API answers, as far as people are shown it.

type poolView struct {
	Name     string        `json:"name"`
	Balancer string        `json:"balancer"`
	Source   string        `json:"source"`
	Backends []backendView `json:"backends"`
}

type backendView struct {
	Addr       string     `json:"addr"`
	Weight     uint32     `json:"weight"`
	Origin     string     `json:"origin"`
	Healthy    bool       `json:"healthy"`
	DomainDown bool       `json:"domain_down"`
	State      string     `json:"state"`
	Active     int64      `json:"active"`
	Total      uint64     `json:"sessions_total"`
	LastCheck  *time.Time `json:"last_check"`
	LastError  string     `json:"last_error"`
}

func (b *backendView) health() string {
	switch {
	case b.DomainDown:
		return "down"
	case b.Healthy:
		return "healthy"
	}
	return "unhealthy"
}

type sessionView struct {
	ID       string `json:"id"`
	Proto    string `json:"proto"`
	Listener string `json:"listener"`
	Peer     string `json:"peer"`
	Pool     string `json:"pool"`
	Backend  string `json:"backend"`
	AgeMS    int64  `json:"age_ms"`
	IdleMS   int64  `json:"idle_ms"`
	BytesC2S uint64 `json:"bytes_c2s"`
	BytesS2C uint64 `json:"bytes_s2c"`
}

func (s *sessionView) age() time.Duration  { return time.Duration(s.AgeMS) * time.Millisecond }
func (s *sessionView) idle() time.Duration { return time.Duration(s.IdleMS) * time.Millisecond }

type listenerView struct {
	Name             string   `json:"name"`
	Configured       bool     `json:"configured"`
	Bound            []string `json:"bound"`
	Connections      int64    `json:"connections"`
	Sessions         int64    `json:"sessions"`
	ConnectionsTotal uint64   `json:"connections_total"`
	SessionsTotal    uint64   `json:"sessions_total"`
	BytesC2S         uint64   `json:"bytes_c2s"`
	BytesS2C         uint64   `json:"bytes_s2c"`
	PacketsC2S       uint64   `json:"packets_c2s"`
	PacketsS2C       uint64   `json:"packets_s2c"`
	Dropped          uint64   `json:"datagrams_dropped"`
}

type hintView struct {
	SrcIP  string `json:"src_ip"`
	Pool   string `json:"pool"`
	TTLSec int64  `json:"ttl_sec"`
}

// pools is all pools.
func (c *client) pools(ctx context.Context) (list []poolView, err error) {
	return list, c.get(ctx, "/pools", nil, &list)
}

// listeners is all listeners.
func (c *client) listeners(ctx context.Context) (list []listenerView, err error) {
	return list, c.get(ctx, "/listeners", nil, &list)
}

// each calls f with every element of the array that a path answers. It is read
// as it arrives, and never in memory as a whole.
func each[T any](ctx context.Context, c *client, path string, query url.Values, f func(*T) error) error {
	res, err := c.ask(ctx, http.MethodGet, path, query, nil)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	d := json.NewDecoder(res.Body)
	t, err := d.Token()
	if err != nil {
		return c.garbled(ctx, err)
	}
	if t != json.Delim('[') {
		return c.garbled(ctx, fmt.Errorf("%s has no list", path))
	}
	for d.More() {
		var v T
		if err := d.Decode(&v); err != nil {
			return c.garbled(ctx, err)
		}
		if err := f(&v); err != nil {
			return err
		}
	}
	if _, err := d.Token(); err != nil {
		return c.garbled(ctx, err)
	}
	return nil
}
