package adminapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"

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

// loadAgain has the running config loaded anew, whoever has pushed it. Only
// Caddy's own admin API has its text, so the server of the request is asked,
// which is Caddy's.
func loadAgain(r *http.Request) error {
	const tries = 5 // each fails only when another load comes between
	var err error
	for range tries {
		var now *answer
		if now, err = ask(r, http.MethodGet, nil, nil); err != nil {
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
		var res *answer
		if res, err = ask(r, http.MethodPost, header, now.body.Bytes()); err == nil || res.status != http.StatusPreconditionFailed {
			return err
		}
	}
	return err
}

// answer is what a handler in this process answers.
type answer struct {
	status int
	header http.Header
	body   bytes.Buffer
}

func (a *answer) Header() http.Header         { return a.header }
func (a *answer) WriteHeader(status int)      { a.status = status }
func (a *answer) Write(p []byte) (int, error) { return a.body.Write(p) }

// ask puts a request about the config to the server that r came to, as who has
// sent r.
func ask(r *http.Request, method string, header http.Header, body []byte) (*answer, error) {
	srv, _ := r.Context().Value(http.ServerContextKey).(*http.Server)
	if srv == nil || srv.Handler == nil {
		return nil, errors.New("the running config cannot be told here")
	}
	req := r.Clone(r.Context())
	req.Method, req.URL, req.RequestURI = method, &url.URL{Path: "/config/"}, "/config/"
	req.Body, req.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	req.Header.Del("Content-Length")
	for k, v := range header {
		req.Header[k] = v
	}
	a := &answer{status: http.StatusOK, header: make(http.Header)}
	srv.Handler.ServeHTTP(a, req)
	if a.status != http.StatusOK {
		var e struct{ Error string }
		if err := json.Unmarshal(a.body.Bytes(), &e); err != nil || e.Error == "" {
			e.Error = strings.TrimSpace(a.body.String())
		}
		return a, &problem{a.status, e.Error}
	}
	return a, nil
}
