package adminapi

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"net/http"
	"os"
	_ "unsafe" // for go:linkname

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
)

// reload loads the file that the process was started with again. It is forced:
// what a config refers to, such as sniffers in a directory, may have changed
// where its text has not.
func (a *API) reload(w http.ResponseWriter, r *http.Request) error {
	if err := knownParams(r.URL.Query()); err != nil {
		return err
	}
	file, adapter, err := proxy.StartFile(os.Args)
	if err != nil {
		return &problem{http.StatusConflict, err.Error()}
	}
	if err := proxy.LoadFile(file, adapter); err != nil {
		return &problem{http.StatusUnprocessableEntity, err.Error()}
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// loadAgain has the running config loaded anew, whoever has pushed it and
// through whichever door the request has come. Caddy keeps its text to itself,
// so its own handler of /config/ is asked.
func loadAgain(r *http.Request) error {
	const tries = 5 // each fails only when another load comes between
	var err error
	for range tries {
		var now *answer
		if now, err = ask(r.Context(), http.MethodGet, nil, nil); err != nil {
			return err
		}
		header := http.Header{
			"Content-Type":  {"application/json"},
			"Cache-Control": {"must-revalidate"}, // although it is the same
			"If-Match":      {now.header.Get("Etag")},
		}
		if file, _, err := proxy.StartFile(os.Args); err == nil {
			header.Set("Caddy-Config-Source-File", file) // it stays that for SIGHUP
		}
		var wrong caddy.APIError
		if _, err = ask(r.Context(), http.MethodPost, header, now.body.Bytes()); !errors.As(err, &wrong) || wrong.HTTPStatus != http.StatusPreconditionFailed {
			break
		}
	}
	if err != nil {
		return &problem{http.StatusUnprocessableEntity, err.Error()}
	}
	return nil
}

// answer is what a handler in this process answers.
type answer struct {
	header http.Header
	body   bytes.Buffer
}

func (a *answer) Header() http.Header         { return a.header }
func (a *answer) WriteHeader(int)             {}
func (a *answer) Write(p []byte) (int, error) { return a.body.Write(p) }

// ask puts a request about the config to Caddy.
func ask(ctx context.Context, method string, header http.Header, body []byte) (*answer, error) {
	req, err := http.NewRequestWithContext(ctx, method, "/config/", bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	maps.Copy(req.Header, header)
	a := &answer{header: make(http.Header)}
	return a, handleConfig(a, req)
}

// handleConfig is what Caddy answers /config/ with at its admin endpoint, which
// may be off, or behind checks that a request to a site does not pass. There is
// no other way to the text of the running config. It is bodiless here, for which
// the compiler wants the empty linked.s; a Caddy without it does not link.
//
//go:linkname handleConfig github.com/caddyserver/caddy/v2.handleConfig
func handleConfig(w http.ResponseWriter, r *http.Request) error
