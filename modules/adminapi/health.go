package adminapi

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/wayhouse-proxy/wayhouse/modules/intent"
	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
)

func (a *API) healthz(w http.ResponseWriter, r *http.Request) error {
	return state(w, r, http.StatusOK, stateJSON{Status: "ok"})
}

func (a *API) readyz(w http.ResponseWriter, r *http.Request) error {
	s := stateJSON{Status: "ready"}
	if c := proxy.Applied(); c.Hash != "" {
		since := c.Since.UTC()
		s.ConfigHash, s.ConfigApplied = c.Hash, &since
	}
	status := http.StatusServiceUnavailable
	app := proxy.Running()
	unbound, waits := "", false
	if app != nil {
		unbound, waits = app.Unbound()
	}
	by, drained := intent.Process.Drained()
	switch {
	case proxy.Stopping():
		s.Status, s.Reason = "draining", "the process is stopping"
	case app == nil:
		s.Status, s.Reason = "not ready", "no config with the wayhouse app is running"
	case waits:
		s.Status, s.Reason = "not ready", fmt.Sprintf("the listener %s is not bound", unbound)
	case drained:
		s.Status, s.Reason = "draining", fmt.Sprintf("drained by %s at %s", by.Actor, by.At.Format(time.RFC3339))
	default:
		status = http.StatusOK
	}
	return state(w, r, status, s)
}

// stateJSON is what /healthz and /readyz tell.
type stateJSON struct {
	Status        string     `json:"status"`
	Reason        string     `json:"reason,omitempty"`
	ConfigHash    string     `json:"config_hash,omitempty"`
	ConfigApplied *time.Time `json:"config_applied,omitempty"`
}

func state(w http.ResponseWriter, r *http.Request, status int, s stateJSON) error {
	if text(r) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.WriteHeader(status)
		fmt.Fprintln(w, strings.TrimSpace(s.Status+" "+s.Reason))
		return nil
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	return json.NewEncoder(w).Encode(s)
}
