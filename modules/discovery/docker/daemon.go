package docker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/wayhouse-proxy/wayhouse/internal/fetch"
)

// The bounds of what a daemon may say.
const (
	maxList       = 32 << 20
	maxContainers = 16384
	maxValue      = 1 << 20 // of a container and of an event
)

// The versions of the API: the oldest that is spoken, which Docker 20.10 and
// Podman have, and the newest that this code has been written for.
const (
	oldestAPI = 41
	newestAPI = 52
)

// daemon speaks the Engine API. It sends nothing but GET, so that a socket that
// allows no more is enough.
type daemon struct {
	client *fetch.Client

	// What is put before paths, as in /v1.47; nil: not known.
	version atomic.Pointer[string]
}

// filters are a daemon's. The values of one key are alternatives, except for
// labels, all of which a container needs.
type filters map[string][]string

func (f filters) query() url.Values {
	b, err := json.Marshal(f)
	if err != nil {
		panic(err) // strings can always be encoded
	}
	return url.Values{"filters": {string(b)}}
}

// get sends a request in a version that the daemon speaks. The daemon is asked
// for its version anew when a request has failed: it may be another one.
func (d *daemon) get(ctx context.Context, path string, f filters) (*http.Response, error) {
	v := d.version.Load()
	if v == nil {
		found, err := d.negotiate(ctx)
		if err != nil {
			return nil, fmt.Errorf("GET /_ping: %w", err)
		}
		v = &found
	}
	resp, err := d.client.Get(ctx, *v+path, f.query())
	if err != nil {
		d.version.Store(nil)
		return nil, fmt.Errorf("GET %s: %w", path, err)
	}
	d.version.Store(v)
	return resp, nil
}

// negotiate asks the daemon which version it has. A proxy in front of the
// socket may not let that through; then the daemon's own version is spoken.
func (d *daemon) negotiate(ctx context.Context) (prefix string, err error) {
	resp, err := d.client.Get(ctx, "/_ping", nil)
	var status *fetch.StatusError
	if errors.As(err, &status) && (status.Code == http.StatusForbidden || status.Code == http.StatusNotFound) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	drain(resp.Body)
	if said := resp.Header.Get("Api-Version"); said != "" {
		return versionPrefix(said)
	}
	return "", nil
}

// versionPrefix is the path of the newest version that both speak.
func versionPrefix(said string) (string, error) {
	minor, ok := strings.CutPrefix(said, "1.")
	n, err := strconv.ParseUint(minor, 10, 16)
	if !ok || err != nil {
		return "", fmt.Errorf("the daemon says that its API has the version %.40q, not one such as 1.47", said)
	}
	if n < oldestAPI {
		return "", fmt.Errorf("the daemon's API has the version 1.%d; 1.%d is needed, as Docker 20.10 has it", n, oldestAPI)
	}
	return fmt.Sprintf("/v1.%d", min(n, newestAPI)), nil
}

// drain reads a short rest, so that the connection can be kept.
func drain(r io.Reader) { _, _ = io.CopyN(io.Discard, r, 4096) }

// list returns the containers that filters take.
func (d *daemon) list(ctx context.Context, f filters) ([]container, error) {
	const path = "/containers/json"
	resp, err := d.get(ctx, path, f)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	list, err := parseList(resp.Body)
	if err != nil {
		return nil, fmt.Errorf("GET %s: %w", path, err)
	}
	return list, nil
}

// parseList reads a list of containers, one after the other.
func parseList(r io.Reader) ([]container, error) {
	dec := fetch.NewDecoder(r, maxValue, maxList)
	var list []container
	err := dec.Array(func() error {
		if len(list) == maxContainers {
			return fmt.Errorf("there are more than %d containers", maxContainers)
		}
		var c container
		if err := dec.Decode(&c); err != nil {
			return err
		}
		list = append(list, c)
		return nil
	})
	if err == nil {
		err = dec.End()
	}
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return nil, err
	}
	return list, nil
}

// event is something that has happened at the daemon.
type event struct {
	Type  string `json:"Type"`
	Actor struct {
		Attributes map[string]string `json:"Attributes"` // of a container: its labels, and more
	} `json:"Actor"`
}

// events calls each with what happens, and opened before the first. It returns
// nil when the daemon ends the stream between two events.
func (d *daemon) events(ctx context.Context, f filters, opened func(), each func(event)) error {
	const path = "/events"
	resp, err := d.get(ctx, path, f)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	opened()
	if err := parseEvents(resp.Body, each); err != nil {
		return fmt.Errorf("GET %s: %w", path, err)
	}
	return nil
}

func parseEvents(r io.Reader, each func(event)) error {
	dec := fetch.NewDecoder(r, maxValue, fetch.Unlimited)
	for {
		var e event
		switch err := dec.Decode(&e); {
		case err == io.EOF:
			return nil
		case err != nil:
			return err
		}
		each(e)
	}
}
