package adminapi

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff/wasm"
)

// wasmHost is the host of WASM sniffers of the running config.
func wasmHost() (*wasm.Host, error) {
	app := proxy.Running()
	if app == nil {
		return nil, &problem{http.StatusServiceUnavailable, "no config with the wayhouse app is running"}
	}
	for _, h := range app.SnifferHosts() {
		if h, ok := h.(*wasm.Host); ok {
			return h, nil
		}
	}
	return nil, &problem{http.StatusConflict, "the running config has no directory of sniffers: set sniffers.wasm.dir"}
}

// sniffers lists the directory.
func (a *API) sniffers(w http.ResponseWriter, r *http.Request) error {
	if err := knownParams(r.URL.Query()); err != nil {
		return err
	}
	h, err := wasmHost()
	if err != nil {
		return err
	}
	list, err := h.List()
	if err != nil {
		return err
	}
	if text(r) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		for _, i := range list {
			fmt.Fprintf(w, "name=%s sha256=%s size=%d loaded=%t has_previous=%t fallback=%t\n", i.Name, i.SHA256, i.SizeBytes, i.Loaded, i.HasPrevious, i.Fallback)
		}
		return nil
	}
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(list)
}

// putSniffer takes a module.
func (a *API) putSniffer(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	if err := knownParams(q, "name"); err != nil {
		return err
	}
	if !q.Has("name") {
		return &problem{http.StatusBadRequest, "name: missing, as in POST /admin/sniffers?name=my-game"}
	}
	if r.ContentLength > wasm.MaxSize {
		// Who is cut off while still sending may not come to read why.
		io.CopyN(io.Discard, r.Body, 2*wasm.MaxSize)
		return &problem{http.StatusRequestEntityTooLarge, fmt.Sprintf("%d bytes are more than %d", r.ContentLength, wasm.MaxSize)}
	}
	if _, err := wasmHost(); err != nil {
		return err
	}
	b, err := uploads.read(r.Context(), http.MaxBytesReader(w, r.Body, wasm.MaxSize))
	var large *http.MaxBytesError
	var late *problem
	switch {
	case errors.As(err, &late):
		return late
	case errors.As(err, &large):
		return &problem{http.StatusRequestEntityTooLarge, fmt.Sprintf("the module is larger than %d bytes", wasm.MaxSize)}
	case errors.Is(err, os.ErrDeadlineExceeded):
		return errSlow
	case err != nil:
		return &problem{http.StatusBadRequest, "the body: " + err.Error()}
	}
	return changeSniffer(w, r, q.Get("name"), "sniffer uploaded", func(h *wasm.Host, name string) error { return h.Put(name, b) })
}

// deleteSniffer removes a module.
func (a *API) deleteSniffer(w http.ResponseWriter, r *http.Request) error {
	return changeSniffer(w, r, r.PathValue("name"), "sniffer removed", (*wasm.Host).Delete)
}

// rollBackSniffer swaps a module with the version before it.
func (a *API) rollBackSniffer(w http.ResponseWriter, r *http.Request) error {
	return changeSniffer(w, r, r.PathValue("name"), "sniffer rolled back", (*wasm.Host).Rollback)
}

// changing is held by a change from its beginning until the config that is
// loaded for it runs.
var changing sync.Mutex

// changeSniffer changes the directory and has the running config loaded anew.
// When that is refused, all is as it was.
func changeSniffer(w http.ResponseWriter, r *http.Request, name, what string, change func(*wasm.Host, string) error) error {
	changing.Lock()
	defer changing.Unlock()
	h, err := wasmHost()
	if err != nil {
		return err
	}
	err = h.Change(name, func() error { return change(h, name) }, func() error { return loadAgain(r) })
	var wrong *wasm.Error
	var refused *problem
	switch {
	case errors.As(err, &wrong):
		return &problem{wrong.Status, err.Error()}
	case errors.As(err, &refused):
		return &problem{http.StatusUnprocessableEntity, "nothing was changed: " + err.Error()}
	case err != nil:
		return err
	}
	caddy.Log().Named("admin.api.wayhouse").Info(what, zap.String("sniffer", name), zap.String("actor", actor(r)))
	w.WriteHeader(http.StatusNoContent)
	return nil
}
