package adminapi

import (
	"fmt"
	"math"
	"net/http"
	"net/netip"
	"time"

	"github.com/wayhouse-proxy/wayhouse/modules/intent"
	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
)

// hintJSON is a route hint as it is pushed.
type hintJSON struct {
	SrcIP  *string `json:"src_ip"`
	Pool   *string `json:"pool"`
	TTLSec *int64  `json:"ttl_sec"`
}

const (
	maxHintBody    = 4 << 10
	defaultHintTTL = 30 // seconds
)

// pushHint takes a route hint.
func (a *API) pushHint(w http.ResponseWriter, r *http.Request) error {
	if err := knownParams(r.URL.Query()); err != nil {
		return err
	}
	var j hintJSON
	if err := decode(w, r, maxHintBody, &j); err != nil {
		return err
	}
	client, pool, ttl, err := j.check()
	if err != nil {
		return err
	}
	app := proxy.Running()
	if app == nil {
		return &problem{http.StatusServiceUnavailable, "no config with the wayhouse app is running"}
	}
	if _, err := app.Pool(pool); err != nil {
		return &problem{http.StatusNotFound, err.Error()}
	}
	if !intent.RouteHints.Put(intent.Hint{Client: client, Pool: pool, Left: ttl, By: intent.Now(actor(r))}) {
		return &problem{http.StatusServiceUnavailable, fmt.Sprintf("there are %d hints already, as many as there may be", intent.MaxHints)}
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// check reads what was pushed.
func (j *hintJSON) check() (client netip.Addr, pool string, ttl time.Duration, err error) {
	bad := func(format string, args ...any) (netip.Addr, string, time.Duration, error) {
		return netip.Addr{}, "", 0, &problem{http.StatusBadRequest, fmt.Sprintf(format, args...)}
	}
	if j.SrcIP == nil {
		return bad("src_ip: missing")
	}
	client, err = netip.ParseAddr(*j.SrcIP)
	if err != nil || client.Zone() != "" {
		return bad("src_ip: %.60q is not an IP address", *j.SrcIP)
	}
	if j.Pool == nil || *j.Pool == "" {
		return bad("pool: missing")
	}
	sec := int64(defaultHintTTL)
	if j.TTLSec != nil {
		sec = *j.TTLSec
	}
	if sec < int64(intent.MinHintTTL/time.Second) || sec > int64(intent.MaxHintTTL/time.Second) {
		return bad("ttl_sec: %d is not from %d to %d", sec, intent.MinHintTTL/time.Second, intent.MaxHintTTL/time.Second)
	}
	return client, *j.Pool, time.Duration(sec) * time.Second, nil
}

// hintView is a route hint as operators see it.
type hintView struct {
	SrcIP  string    `json:"src_ip"`
	Pool   string    `json:"pool"`
	TTLSec int64     `json:"ttl_sec"` // that are left, rounded up
	Actor  string    `json:"actor"`
	At     time.Time `json:"at"`
}

// hints streams the table.
func (a *API) hints(w http.ResponseWriter, r *http.Request) error {
	if err := knownParams(r.URL.Query()); err != nil {
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
	for h := range intent.RouteHints.All {
		v := hintView{h.Client.String(), h.Pool, int64(math.Ceil(h.Left.Seconds())), h.Actor, h.At}
		var err error
		if plain {
			_, err = fmt.Fprintf(w, "src_ip=%s pool=%s ttl_sec=%d actor=%q\n", v.SrcIP, v.Pool, v.TTLSec, v.Actor)
		} else {
			err = writeElement(w, n, v)
		}
		if err != nil || r.Context().Err() != nil {
			return nil // the answer has begun: an error can only cut it short
		}
		if n++; n%flushEvery == 0 && flusher != nil {
			flusher.Flush()
		}
	}
	if !plain {
		fmt.Fprintln(w, "]")
	}
	return nil
}

// dropHint forgets a hint.
func (a *API) dropHint(w http.ResponseWriter, r *http.Request) error {
	text := r.PathValue("src_ip")
	client, err := netip.ParseAddr(text)
	if err != nil {
		return &problem{http.StatusBadRequest, fmt.Sprintf("%.60q is not an IP address", text)}
	}
	if !intent.RouteHints.Delete(client) {
		return &problem{http.StatusNotFound, fmt.Sprintf("there is no hint for %s", client)}
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
