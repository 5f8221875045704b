package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/fetch"
)

const (
	pageSize  = 500
	maxPages  = 4096     // they may be empty
	maxObject = 4 << 20  // bytes; etcd keeps less
	maxList   = 64 << 20 // bytes of all pages
	maxFound  = 1 << 16  // what a list may come to

	// How long a watch goes on, before it is opened anew. The API ends it at that
	// time plus up to as much again.
	watchFor  = 5 * time.Minute
	watchOver = 30 * time.Second

	// Streams are opened that far apart, at least.
	minWatch = time.Second
)

// Objects are those that a Follower follows.
type Objects struct {
	Group    string // with the version: discovery.k8s.io/v1
	Resource string // endpointslices
	Labels   string // selector; "" for all

	// Concerns reports whether an event is news: an object that is there, or one
	// that has been deleted. It is called by Watch. nil: every event is.
	Concerns func(deleted bool, object json.RawMessage) bool
}

// Follower lists objects and hears of their changes. List and Watch may run at
// once, each in one goroutine.
type Follower struct {
	client *Client
	path   string
	labels string
	what   string

	concerns func(deleted bool, object json.RawMessage) bool

	mu      sync.Mutex
	version string        // where a watch goes on; "" when only a list can tell
	listed  chan struct{} // closed by the next list

	watchFor time.Duration
}

// Follow makes a follower of objects in the client's namespace.
func (c *Client) Follow(o Objects) *Follower {
	return &Follower{
		client: c,
		path:   "apis/" + o.Group + "/namespaces/" + c.namespace + "/" + o.Resource,
		labels: o.Labels,
		what:   o.Resource + " in namespace " + c.namespace, concerns: o.Concerns,
		listed: make(chan struct{}), watchFor: watchFor,
	}
}

var errGone = errors.New("the version is gone")

// List reads all objects, page by page. add appends what it finds in one to
// what was found before.
func List[T, R any](ctx context.Context, f *Follower, add func([]R, *T) []R) ([]R, error) {
	found, version, err := list(ctx, f, add)
	if errors.Is(err, errGone) { // the pages that were left are of a time that is no longer known
		found, version, err = list(ctx, f, add)
	}
	if err != nil {
		return nil, fmt.Errorf("listing %s: %w", f.what, err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version = version
	close(f.listed)
	f.listed = make(chan struct{})
	return found, nil
}

func list[T, R any](ctx context.Context, f *Follower, add func([]R, *T) []R) (found []R, version string, err error) {
	rest := int64(maxList)
	for next, pages := "", 0; pages < maxPages; pages++ {
		query := url.Values{"limit": {strconv.Itoa(pageSize)}}
		if next != "" {
			query.Set("continue", next)
		}
		var p page
		if found, err = readPage(ctx, f, query, &rest, &p, found, add); err != nil {
			return nil, "", err
		}
		if next = p.next; next == "" {
			return found, p.version, nil
		}
	}
	return nil, "", fmt.Errorf("it has more than %d pages", maxPages)
}

// page is what a page says beside its objects.
type page struct{ version, next string }

func readPage[T, R any](ctx context.Context, f *Follower, query url.Values, rest *int64, p *page, found []R, add func([]R, *T) []R) ([]R, error) {
	resp, err := f.get(ctx, query)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body := &counted{from: resp.Body}
	found, err = decodePage(fetch.NewDecoder(body, maxObject, *rest), p, found, add)
	*rest -= body.n
	return found, err
}

// counted counts what is read.
type counted struct {
	from io.Reader
	n    int64
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.from.Read(b)
	c.n += int64(n)
	return n, err
}

func decodePage[T, R any](d *fetch.Decoder, p *page, found []R, add func([]R, *T) []R) ([]R, error) {
	var items bool
	err := d.Object(func(name string) error {
		switch name {
		case "items":
			items = true
			return d.Array(func() error {
				var object T
				if err := d.Decode(&object); err != nil {
					return err
				}
				if found = add(found, &object); len(found) > maxFound {
					return fmt.Errorf("there are more than %d", maxFound)
				}
				return nil
			})
		case "metadata":
			var m struct{ ResourceVersion, Continue string }
			if err := d.Decode(&m); err != nil {
				return err
			}
			p.version, p.next = m.ResourceVersion, m.Continue
			return nil
		}
		return d.Skip()
	})
	switch {
	case err != nil:
		return nil, whole(err)
	case !items:
		return nil, errors.New("the answer has no items")
	}
	if err := d.End(); err != nil {
		return nil, whole(err)
	}
	return found, nil
}

// whole says what the error of an answer means that is not whole.
func whole(err error) error {
	switch {
	case err == io.EOF, err == io.ErrUnexpectedEOF:
		return errors.New("the answer is cut off")
	case errors.Is(err, fetch.ErrTooLarge):
		return fmt.Errorf("an object has more than %d MiB, or all together more than %d MiB", maxObject>>20, maxList>>20)
	}
	return err
}

// get asks for the objects.
func (f *Follower) get(ctx context.Context, query url.Values) (*http.Response, error) {
	if f.labels != "" {
		query.Set("labelSelector", f.labels)
	}
	resp, err := f.client.fetch.Get(ctx, f.path, query)
	var status *fetch.StatusError
	if errors.As(err, &status) && status.Code == http.StatusGone {
		return nil, errGone
	}
	return resp, err
}

// Watch calls changed when an object has changed, or when only a list can tell,
// until ctx ends. It waits for a list before it begins.
func (f *Follower) Watch(ctx context.Context, changed func()) error {
	for was := false; ; {
		version := f.wait(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if version == "" {
			return fmt.Errorf("watching %s: the list has no resourceVersion", f.what)
		}
		began, news := time.Now(), false
		err := f.watch(ctx, version, func() { news = true; changed() })
		if ctx.Err() != nil {
			return nil
		}
		short := time.Since(began) < minWatch
		switch {
		case errors.Is(err, errGone):
			f.forget()
			changed()
			if was && !news {
				return fmt.Errorf("watching %s: the version of a list that has just been made is gone", f.what)
			}
			was = true
			continue
		case err != nil:
			return fmt.Errorf("watching %s: %w", f.what, err)
		case short && !news:
			return fmt.Errorf("watching %s: the API ends it at once", f.what)
		case short:
			fetch.Pause(ctx, minWatch-time.Since(began))
		}
		was = false
	}
}

// wait is the version to watch from, as soon as there is one. It is "" when a
// list had none, and when ctx ends.
func (f *Follower) wait(ctx context.Context) string {
	f.mu.Lock()
	version, listed := f.version, f.listed
	f.mu.Unlock()
	if version != "" {
		return version
	}
	select {
	case <-listed:
	case <-ctx.Done():
		return ""
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.version
}

// forget makes the next watch wait for a list.
func (f *Follower) forget() { f.at("") }

func (f *Follower) at(version string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version = version
}

// watch reads one stream to its end, which is no error.
func (f *Follower) watch(ctx context.Context, version string, changed func()) error {
	within := f.watchFor + rand.N(f.watchFor)
	over, cancel := context.WithTimeout(ctx, within+watchOver)
	defer cancel()
	resp, err := f.get(over, url.Values{
		"watch": {"true"}, "resourceVersion": {version}, "allowWatchBookmarks": {"true"},
		"timeoutSeconds": {strconv.Itoa(int(within.Seconds()))},
	})
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	d := fetch.NewDecoder(resp.Body, maxObject, fetch.Unlimited)
	for {
		e, err := nextEvent(d)
		switch {
		case err == io.EOF, err != nil && over.Err() != nil: // the end, or the API has not kept to it
			return nil
		case err != nil:
			return err
		}
		if e.version != "" {
			f.at(e.version)
		}
		switch e.kind {
		case added, modified, deleted:
			if f.concerns == nil || f.concerns(e.kind == deleted, e.object) {
				changed()
			}
		case gone:
			return errGone
		case failed:
			return errors.New(f.client.fetch.Redact(e.message))
		}
	}
}

// eventKind is what an event says.
type eventKind uint8

const (
	added eventKind = iota
	modified
	deleted
	bookmark // nothing but the version
	gone     // the version is no longer known
	failed
)

// event is a line of a watch.
type event struct {
	kind    eventKind
	version string
	object  json.RawMessage // of added, modified and deleted
	message string          // of failed
}

// nextEvent reads an event. At the end of the stream the error is io.EOF.
func nextEvent(d *fetch.Decoder) (event, error) {
	var line struct {
		Type   string
		Object json.RawMessage
	}
	if err := d.Decode(&line); err != nil {
		if err == io.EOF {
			return event{}, err
		}
		return event{}, whole(err)
	}
	var said struct {
		Metadata        struct{ ResourceVersion string }
		Code            int
		Reason, Message string
	}
	if len(line.Object) > 0 {
		if err := json.Unmarshal(line.Object, &said); err != nil {
			return event{}, err
		}
	}
	e := event{version: said.Metadata.ResourceVersion, object: line.Object}
	switch line.Type {
	case "ADDED":
		e.kind = added
	case "MODIFIED":
		e.kind = modified
	case "DELETED":
		e.kind = deleted
	case "BOOKMARK":
		e.kind = bookmark
	case "ERROR":
		s := said
		if s.Code == http.StatusGone || s.Reason == "Expired" || s.Reason == "Gone" {
			return event{kind: gone}, nil
		}
		return event{kind: failed, message: strings.TrimSpace(fmt.Sprintf("status %d %s: %s", s.Code, s.Reason, s.Message))}, nil
	default:
		return event{}, fmt.Errorf("an event of type %.40q", line.Type)
	}
	return e, nil
}
