package adminapi

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/modules/intent"
	"github.com/wayhouse-proxy/wayhouse/modules/pool"
)

// wants begins a change: it refuses what no change has and returns who wants it.
func wants(r *http.Request) (intent.By, error) {
	if err := knownParams(r.URL.Query()); err != nil {
		return intent.By{}, err
	}
	return intent.Now(actor(r)), nil
}

// done logs a change.
func done(what string, by intent.By, fields ...zap.Field) {
	caddy.Log().Named("admin.api.wayhouse").Info(what, append(fields, zap.String("actor", by.Actor))...)
}

const maxBackendBody = 4 << 10

// addBackend adds a backend to a pool.
func (a *API) addBackend(w http.ResponseWriter, r *http.Request) error {
	by, err := wants(r)
	if err != nil {
		return err
	}
	var j struct {
		Addr   *string `json:"addr"`
		Weight *int64  `json:"weight"`
	}
	if err := decode(w, r, maxBackendBody, &j); err != nil {
		return err
	}
	if j.Addr == nil {
		return &problem{http.StatusBadRequest, "addr: missing, as in 10.1.0.13:7777"}
	}
	addr, err := pool.ParseAddr(*j.Addr)
	if err != nil {
		return &problem{http.StatusBadRequest, "addr: " + err.Error()}
	}
	weight := uint32(0)
	if j.Weight != nil {
		if *j.Weight < 1 || *j.Weight > maxWeight {
			return &problem{http.StatusBadRequest, fmt.Sprintf("weight: %d is not from 1 to %d", *j.Weight, maxWeight)}
		}
		weight = uint32(*j.Weight)
	}
	name := r.PathValue("pool")
	if err := pool.Add(name, addr, weight, by); err != nil {
		return notChanged(err, name, addr)
	}
	done("backend added", by, zap.String("pool", name), zap.Stringer("upstream", addr))
	return viewBackend(w, r, http.StatusCreated, name, addr)
}

// maxWeight is the largest weight.
const maxWeight = 1<<32 - 1

// named are the pool and the backend of the path.
func named(r *http.Request) (name string, addr netip.AddrPort, err error) {
	if addr, err = pool.ParseAddr(r.PathValue("addr")); err != nil {
		return "", addr, &problem{http.StatusBadRequest, err.Error()}
	}
	return r.PathValue("pool"), addr, nil
}

// removeBackend removes a backend from a pool.
func (a *API) removeBackend(w http.ResponseWriter, r *http.Request) error {
	by, err := wants(r)
	if err != nil {
		return err
	}
	name, addr, err := named(r)
	if err != nil {
		return err
	}
	if err := pool.Remove(name, addr, by); err != nil {
		return notChanged(err, name, addr)
	}
	done("backend removed", by, zap.String("pool", name), zap.Stringer("upstream", addr))
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// setBackend sets the operator's state of a backend.
func (a *API) setBackend(w http.ResponseWriter, r *http.Request) error {
	by, err := wants(r)
	if err != nil {
		return err
	}
	name, addr, err := named(r)
	if err != nil {
		return err
	}
	var j struct {
		State *string `json:"state"`
	}
	if err := decode(w, r, maxBackendBody, &j); err != nil {
		return err
	}
	if j.State == nil {
		return &problem{http.StatusBadRequest, "state: missing: enabled, draining or disabled"}
	}
	state, ok := intent.ParseState(*j.State)
	if !ok {
		return &problem{http.StatusBadRequest, fmt.Sprintf("state: %.60q is not enabled, draining or disabled", *j.State)}
	}
	if err := pool.SetState(name, addr, state, by); err != nil {
		return notChanged(err, name, addr)
	}
	done("backend state set", by, zap.String("pool", name), zap.Stringer("upstream", addr), zap.Stringer("state", state))
	return viewBackend(w, r, http.StatusOK, name, addr)
}

// notChanged says why a change was.
func notChanged(err error, name string, addr netip.AddrPort) error {
	switch {
	case errors.Is(err, pool.ErrNoPool):
		return &problem{http.StatusNotFound, fmt.Sprintf("no pool is named %.60q", name)}
	case errors.Is(err, pool.ErrUnknown):
		return &problem{http.StatusNotFound, fmt.Sprintf("the pool %s has no backend %s", name, addr)}
	case errors.Is(err, pool.ErrThere):
		return &problem{http.StatusConflict, fmt.Sprintf("the pool %s has the backend %s already", name, addr)}
	case errors.Is(err, intent.ErrFull):
		return &problem{http.StatusServiceUnavailable, err.Error()}
	}
	return err
}

// viewBackend answers with a backend after a change.
func viewBackend(w http.ResponseWriter, r *http.Request, status int, name string, addr netip.AddrPort) error {
	if p := pool.Running(name); p != nil {
		v := viewPool(p)
		for _, b := range v.Backends {
			if b.Addr != addr.String() {
				continue
			}
			if text(r) {
				w.Header().Set("Content-Type", "text/plain; charset=utf-8")
				w.WriteHeader(status)
				v.Backends = []backendJSON{b}
				v.text(w)
				return nil
			}
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(status)
			return json.NewEncoder(w).Encode(b)
		}
	}
	// Somebody else has changed it again since.
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// entryJSON is something that operators want of a backend.
type entryJSON struct {
	Pool   string    `json:"pool"`
	Addr   string    `json:"addr"`
	Change string    `json:"change"`
	Weight uint32    `json:"weight,omitempty"`
	State  string    `json:"state,omitempty"`
	Actor  string    `json:"actor"`
	At     time.Time `json:"at"`
	Unused bool      `json:"unused"` // no config has the pool
}

func viewEntries(list []intent.Entry) []entryJSON {
	views := []entryJSON{}
	for _, e := range list {
		v := entryJSON{Pool: e.Pool, Addr: e.Addr.String(), Change: e.Change, Weight: e.Weight, Actor: e.Actor, At: e.At, Unused: pool.Running(e.Pool) == nil}
		if e.Change == "state" {
			v.State = e.State.String()
		}
		views = append(views, v)
	}
	return views
}

func writeEntries(w http.ResponseWriter, r *http.Request, list []intent.Entry) error {
	views := viewEntries(list)
	if !text(r) {
		w.Header().Set("Content-Type", "application/json")
		return json.NewEncoder(w).Encode(views)
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	for _, v := range views {
		what := ""
		switch v.Change {
		case "added":
			what = fmt.Sprintf(" weight=%d", v.Weight)
		case "state":
			what = " state=" + v.State
		}
		fmt.Fprintf(w, "pool=%s backend=%s change=%s%s actor=%q at=%s unused=%t\n", v.Pool, v.Addr, v.Change, what, v.Actor, v.At.Format(time.RFC3339), v.Unused)
	}
	return nil
}

// overlay tells what operators want of backends.
func (a *API) overlay(w http.ResponseWriter, r *http.Request) error {
	if err := knownParams(r.URL.Query()); err != nil {
		return err
	}
	return writeEntries(w, r, intent.Process.Entries())
}

// dropOverlay forgets it, of all pools or of one.
func (a *API) dropOverlay(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	if err := knownParams(q, "pool"); err != nil {
		return err
	}
	if q.Has("pool") && q.Get("pool") == "" {
		return &problem{http.StatusBadRequest, "pool: is empty; leave it out for all pools"}
	}
	dropped, err := intent.Process.Drop(q.Get("pool"))
	if err != nil {
		return err
	}
	if len(dropped) > 0 {
		done("overlay dropped", intent.Now(actor(r)), zap.Int("entries", len(dropped)))
	}
	return writeEntries(w, r, dropped)
}

// drain takes the instance out of the rotation of those who ask /readyz.
func (a *API) drain(w http.ResponseWriter, r *http.Request) error {
	by, err := wants(r)
	if err != nil {
		return err
	}
	if err := intent.Process.Drain(&by); err != nil {
		return err
	}
	done("instance drained", by)
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// undrain puts it back.
func (a *API) undrain(w http.ResponseWriter, r *http.Request) error {
	by, err := wants(r)
	if err != nil {
		return err
	}
	if err := intent.Process.Drain(nil); err != nil {
		return err
	}
	done("instance no longer drained", by)
	w.WriteHeader(http.StatusNoContent)
	return nil
}
