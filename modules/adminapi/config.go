package adminapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
)

// configHeader names the config that ran when a call was answered.
const configHeader = "X-Wayhouse-Config"

// rejectedJSON is a config that was not taken. Its text is not kept: it may hold
// secrets.
type rejectedJSON struct {
	Time       time.Time  `json:"time"`
	Source     string     `json:"source"`
	Hash       string     `json:"hash,omitempty"`
	Error      string     `json:"error"`
	Superseded *time.Time `json:"superseded,omitempty"`
}

// web answers as for a config that has no section web: documents in YAML with one
// are refused, and the other forms have sites instead.
func (a *API) web(_ http.ResponseWriter, r *http.Request) error {
	if err := knownParams(r.URL.Query()); err != nil {
		return err
	}
	return &problem{http.StatusNotFound, "the running config has no section web"}
}

// lastRejected tells of the last config that was not taken, also when a later
// one was.
func (a *API) lastRejected(w http.ResponseWriter, r *http.Request) error {
	if err := knownParams(r.URL.Query()); err != nil {
		return err
	}
	last := proxy.LastRefusal()
	if last == nil {
		return &problem{http.StatusNotFound, "no config has been refused since the process began"}
	}
	v := rejectedJSON{Time: last.Time.UTC(), Source: last.Source, Hash: last.Hash, Error: last.Error}
	if !last.Superseded.IsZero() {
		superseded := last.Superseded.UTC()
		v.Superseded = &superseded
	}
	if text(r) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		fmt.Fprintf(w, "%s source=%s hash=%s superseded=%t %q\n", v.Time.Format(time.RFC3339), v.Source, v.Hash, v.Superseded != nil, v.Error)
		return nil
	}
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(v)
}

// loadRoute stands before Caddy's POST /load, so that what is refused there is
// known before it becomes an attempt to run a config: a document that no adapter
// understands.
func loadRoute() []caddy.AdminRoute {
	info, err := caddy.GetModule("admin.api.load")
	if err != nil {
		return nil // a build without adapters
	}
	caddys, ok := info.New().(caddy.AdminRouter)
	if !ok {
		return nil
	}
	for _, route := range caddys.Routes() {
		if route.Pattern == "/load" {
			return []caddy.AdminRoute{{Pattern: "POST /load", Handler: heard{route.Handler}}}
		}
	}
	return nil
}

type heard struct{ next caddy.AdminHandler }

// maxDocument is how large a config may be, as for Caddy's /config/.
const maxDocument = 100 << 20

// ServeHTTP implements caddy.AdminHandler.
func (h heard) ServeHTTP(w http.ResponseWriter, r *http.Request) error {
	// Here and not with others waiting: whoever sends it may be slow.
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxDocument))
	if err != nil {
		status := http.StatusBadRequest
		if too := (*http.MaxBytesError)(nil); errors.As(err, &too) {
			status = http.StatusRequestEntityTooLarge
		}
		return caddy.APIError{HTTPStatus: status, Err: fmt.Errorf("reading request body: %w", err)}
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	return proxy.Through(proxy.SourceLoad, func() error { return h.next.ServeHTTP(w, r) })
}
