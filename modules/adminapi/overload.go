package adminapi

import (
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/wayhouse-proxy/wayhouse/modules/overload"
)

const maxOverloadBody = 4 << 10

// overloadState tells the overload level.
func (a *API) overloadState(w http.ResponseWriter, r *http.Request) error {
	if err := knownParams(r.URL.Query()); err != nil {
		return err
	}
	s := overload.Now()
	if text(r) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		fmt.Fprintf(w, "level=%d reason=%s since=%s use_percent=%d auto=%t\n", s.Level, s.Reason, s.Since.Format(time.RFC3339), s.Use, s.Auto)
		return nil
	}
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(s)
}

// setOverload sets the level, or lets it follow what is measured again.
func (a *API) setOverload(w http.ResponseWriter, r *http.Request) error {
	if err := knownParams(r.URL.Query()); err != nil {
		return err
	}
	var j struct {
		Level *int `json:"level"`
		Auto  bool `json:"auto"`
	}
	if err := decode(w, r, maxOverloadBody, &j); err != nil {
		return err
	}
	switch {
	case j.Auto && j.Level == nil:
		overload.Auto()
	case j.Auto || j.Level == nil:
		return &problem{http.StatusBadRequest, `the body: give one of the two: {"level": 1} or {"auto": true}`}
	case *j.Level < 0 || *j.Level > overload.MaxLevel:
		return &problem{http.StatusBadRequest, fmt.Sprintf("level: %d is not from 0 to %d", *j.Level, overload.MaxLevel)}
	default:
		overload.Set(*j.Level)
	}
	return a.overloadState(w, r)
}
