package adminapi

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
)

// sessionJSON is a live connection or UDP session as operators see it.
type sessionJSON struct {
	ID            string  `json:"id"`
	Proto         string  `json:"proto"`
	Listener      string  `json:"listener"`
	Peer          string  `json:"peer"`
	Local         string  `json:"local"`
	Pool          string  `json:"pool"`
	Backend       string  `json:"backend"`
	Upstream      string  `json:"upstream,omitempty"` // where a backend whose port is mapped is reached
	UpstreamLocal string  `json:"upstream_local"`
	Route         *int    `json:"route"` // null while it is being decided
	AgeMS         int64   `json:"age_ms"`
	IdleMS        int64   `json:"idle_ms"`
	BytesC2S      uint64  `json:"bytes_c2s"`
	BytesS2C      uint64  `json:"bytes_s2c"`
	PacketsC2S    *uint64 `json:"packets_c2s,omitempty"` // UDP
	PacketsS2C    *uint64 `json:"packets_s2c,omitempty"`
}

func viewSession(i *relay.Info) sessionJSON {
	v := sessionJSON{
		ID: i.ID.String(), Proto: proto(i.ID), Peer: i.Client.String(), Local: i.Local.String(),
		AgeMS: i.Age.Milliseconds(), IdleMS: i.Idle.Milliseconds(), BytesC2S: i.BytesC2S, BytesS2C: i.BytesS2C,
	}
	if p := i.Path; p != nil {
		v.Listener, v.Pool = p.Listener, p.Pool
		if p.Backend.IsValid() {
			v.Backend = p.Backend.String()
		}
		if p.Route >= 0 {
			v.Route = &p.Route
		}
	}
	if i.Upstream.IsValid() {
		v.Upstream = i.Upstream.String()
	}
	if i.UpstreamLocal.IsValid() {
		v.UpstreamLocal = i.UpstreamLocal.String()
	}
	if i.ID.UDP() {
		v.PacketsC2S, v.PacketsS2C = &i.PacketsC2S, &i.PacketsS2C
	}
	return v
}

func proto(id relay.ID) string {
	if id.UDP() {
		return "udp"
	}
	return "tcp"
}

func (v sessionJSON) text() string {
	return fmt.Sprintf("id=%s proto=%s listener=%s peer=%s local=%s pool=%s backend=%s age_ms=%d idle_ms=%d bytes_c2s=%d bytes_s2c=%d\n",
		v.ID, v.Proto, v.Listener, v.Peer, v.Local, v.Pool, v.Backend, v.AgeMS, v.IdleMS, v.BytesC2S, v.BytesS2C)
}

// selection is what the query parameters ask for.
type selection struct {
	listener, pool, proto string
	backend               netip.AddrPort
	src                   netip.Prefix
	limit                 int
}

func parseSelection(q url.Values) (selection, error) {
	s := selection{listener: q.Get("listener"), pool: q.Get("pool"), proto: q.Get("proto")}
	if err := knownParams(q, "listener", "pool", "backend", "proto", "src", "limit"); err != nil {
		return s, err
	}
	bad := func(key, want string) error {
		return &problem{http.StatusBadRequest, fmt.Sprintf("%s: %q is not %s", key, q.Get(key), want)}
	}
	if s.proto != "" && s.proto != "tcp" && s.proto != "udp" {
		return s, bad("proto", "tcp or udp")
	}
	var err error
	if v := q.Get("backend"); v != "" {
		if s.backend, err = netip.ParseAddrPort(v); err != nil {
			return s, bad("backend", "ip:port")
		}
		s.backend = netip.AddrPortFrom(s.backend.Addr().Unmap(), s.backend.Port())
	}
	if v := q.Get("src"); v != "" {
		if s.src, err = cidr.Parse(v); err != nil {
			return s, &problem{http.StatusBadRequest, "src: " + err.Error()}
		}
	}
	if v := q.Get("limit"); v != "" {
		if s.limit, err = strconv.Atoi(v); err != nil || s.limit < 1 {
			return s, bad("limit", "a number from 1")
		}
	}
	return s, nil
}

func (s *selection) has(i *relay.Info) bool {
	p := i.Path
	if p == nil {
		p = new(relay.Path)
	}
	return (s.listener == "" || p.Listener == s.listener) &&
		(s.pool == "" || p.Pool == s.pool) &&
		(s.proto == "" || proto(i.ID) == s.proto) &&
		(!s.backend.IsValid() || p.Backend == s.backend) &&
		(!s.src.IsValid() || s.src.Contains(i.Client.Addr()))
}

// flushEvery is after how many sessions the answer so far is sent.
const flushEvery = 256

// sessions streams: a hundred thousand sessions are never in memory at once.
func (a *API) sessions(w http.ResponseWriter, r *http.Request) error {
	sel, err := parseSelection(r.URL.Query())
	if err != nil {
		return err
	}
	plain := text(r)
	if plain {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	} else {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, "[")
	}
	n := 0
	flusher, _ := w.(http.Flusher)
	if e := listener.Running(); e != nil {
		e.Flows(func(i *relay.Info) bool {
			if !sel.has(i) {
				return true
			}
			v := viewSession(i)
			if plain {
				_, err = fmt.Fprint(w, v.text())
			} else {
				err = writeElement(w, n, v)
			}
			if n++; n%flushEvery == 0 && flusher != nil {
				flusher.Flush()
			}
			return err == nil && r.Context().Err() == nil && n != sel.limit
		})
	}
	if !plain && err == nil {
		fmt.Fprintln(w, "]")
	}
	return nil // the answer has begun: an error can only cut it short
}

func writeElement(w http.ResponseWriter, n int, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	sep := "\n"
	if n > 0 {
		sep = ",\n"
	}
	_, err = fmt.Fprintf(w, "%s%s", sep, b)
	return err
}

// found is the engines and the session that the path names.
func found(r *http.Request) (*listener.Engines, relay.Info, error) {
	if err := knownParams(r.URL.Query()); err != nil {
		return nil, relay.Info{}, err
	}
	text := r.PathValue("id")
	id, ok := relay.ParseID(text)
	if !ok {
		return nil, relay.Info{}, &problem{http.StatusBadRequest, fmt.Sprintf("%q is not a session's ID, as in u-3f2a", text)}
	}
	if e := listener.Running(); e != nil {
		if i, ok := e.Flow(id); ok {
			return e, i, nil
		}
	}
	return nil, relay.Info{}, &problem{http.StatusNotFound, fmt.Sprintf("no live session has the ID %s", text)}
}

func (a *API) session(w http.ResponseWriter, r *http.Request) error {
	_, i, err := found(r)
	if err != nil {
		return err
	}
	v := viewSession(&i)
	if text(r) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		fmt.Fprint(w, v.text())
		return nil
	}
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(v)
}

func (a *API) closeSession(w http.ResponseWriter, r *http.Request) error {
	e, i, err := found(r)
	if err != nil {
		return err
	}
	if !e.CloseFlow(i.ID, relay.Admin) {
		return &problem{http.StatusNotFound, fmt.Sprintf("session %s has just ended", i.ID)}
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// resolveSession finds the flow that a backend sees at an address of ours.
func (a *API) resolveSession(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	if err := knownParams(q, "backend", "local", "proto"); err != nil {
		return err
	}
	var ends [2]netip.AddrPort
	for i, key := range []string{"backend", "local"} {
		ap, err := netip.ParseAddrPort(q.Get(key))
		if err != nil {
			return &problem{http.StatusBadRequest, fmt.Sprintf("%s: %.60q is not ip:port", key, q.Get(key))}
		}
		ends[i] = netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
	}
	want := q.Get("proto")
	if q.Has("proto") && want != "tcp" && want != "udp" {
		return &problem{http.StatusBadRequest, fmt.Sprintf("proto: %.60q is not tcp or udp", want)}
	}
	var found []sessionJSON
	if e := listener.Running(); e != nil {
		e.Flows(func(i *relay.Info) bool {
			if i.Path == nil || i.UpstreamLocal != ends[1] || want != "" && proto(i.ID) != want {
				return r.Context().Err() == nil
			}
			if to := i.Upstream; to == ends[0] || !to.IsValid() && i.Path.Backend == ends[0] {
				found = append(found, viewSession(i))
			}
			return r.Context().Err() == nil
		})
	}
	switch {
	case len(found) == 0:
		return &problem{http.StatusNotFound, fmt.Sprintf("no live session goes from %s to %s", ends[1], ends[0])}
	case len(found) > 1:
		return &problem{http.StatusConflict, fmt.Sprintf("a connection and a UDP session go from %s to %s: give proto, tcp or udp", ends[1], ends[0])}
	case text(r):
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		fmt.Fprint(w, found[0].text())
		return nil
	}
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(found[0])
}
