package filter

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
	"github.com/wayhouse-proxy/wayhouse/internal/fetch"
	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
)

// Lists of networks that are kept elsewhere. A list belongs to the process: all
// filters that name it share it, and a reload leaves it as it is.
//
//	Provision → takeList     a file is read
//	Start     → follow       the first begins the one worker of the list
//	worker    → read or ask → set
//	Stop      → leave        the last ends the worker
//	Cleanup   → giveList

var (
	listNetworks = metrics.Gauge("filter_list_networks", "Networks in a list of the acl filter.", "list")
	listLastOK   = metrics.Gauge("filter_list_last_ok", "Unix time at which a list was last known to be as it should be.", "list")
	listRefresh  = metrics.Counter("filter_list_refresh_total", "Times that a list was read or asked for, by result: ok, unchanged or error.", "list", "result")
)

type listKind uint8

const (
	fileList listKind = iota
	urlList
)

// list is a list of networks. The content is swapped whole.
type list struct {
	kind  listKind
	where string        // path or URL
	name  string        // where, without what may be secret
	tried chan struct{} // closed when it is known what the source says

	set      atomic.Pointer[cidr.Set] // nil: nothing is known
	interval atomic.Int64
	logger   atomic.Pointer[zap.Logger]

	following

	readMu sync.Mutex // guards file
	file   file
	etag   string                // the worker's
	failed atomic.Pointer[error] // why the URL was not read the last time; nil: it was
	once   sync.Once             // closes tried
}

type listKey struct {
	kind  listKind
	where string
}

var lists = caddy.NewUsagePool()

// takeList returns a list; give it back with giveList. A file that cannot be
// read is an error.
func takeList(kind listKind, where string) (*list, error) {
	name := where
	if kind == urlList {
		var err error
		if name, err = checkURL(where); err != nil {
			return nil, err
		}
	} else if where == "" {
		return nil, errors.New("the path is empty")
	}
	v, loaded, err := lists.LoadOrNew(listKey{kind, where}, func() (caddy.Destructor, error) {
		l := &list{kind: kind, where: where, name: name, tried: make(chan struct{}), file: file{path: where}}
		if kind == fileList {
			return l, l.read()
		}
		return l, nil
	})
	if err != nil {
		return nil, err
	}
	l := v.(*list)
	if loaded && kind == fileList {
		return l, l.read() // the caller gives it back
	}
	return l, nil
}

func giveList(l *list) error {
	_, err := lists.Delete(listKey{l.kind, l.where})
	return err
}

// Destruct implements caddy.Destructor.
func (l *list) Destruct() error {
	listNetworks.DeleteLabelValues(l.name)
	listLastOK.DeleteLabelValues(l.name)
	listRefresh.DeletePartialMatch(prometheus.Labels{"list": l.name})
	return nil
}

// checkURL refuses what a list must not come from, and returns the URL without
// its query, which may have a key in it.
func checkURL(s string) (name string, err error) {
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return "", fmt.Errorf("%q is not a URL", s)
	case u.Scheme != "https" && u.Scheme != "http":
		return "", fmt.Errorf("%q begins with neither https:// nor http://", s)
	case u.Hostname() == "":
		return "", fmt.Errorf("%q names no host", s)
	case u.User != nil:
		return "", errors.New("a user in the URL would be shown in logs")
	case u.Fragment != "":
		return "", fmt.Errorf("%q has a fragment, which is never sent", s)
	case u.Scheme == "http" && !fetch.Loopback(u):
		return "", fmt.Errorf("%q is http:// to another host, where anybody on the way can change the list: use https://", s)
	}
	u.RawQuery, u.ForceQuery = "", false
	return u.String(), nil
}

// follow counts a follower in. interval and logger are those of whoever came
// last.
func (l *list) follow(interval time.Duration, logger *zap.Logger) {
	l.interval.Store(int64(interval))
	l.logger.Store(logger.With(zap.String("source", l.name)))
	if l.kind == fileList {
		l.enter(l.watch)
	} else {
		l.enter(l.refresh)
	}
}

// settled tells that it is known what the source says for now.
func (l *list) settled() { l.once.Do(func() { close(l.tried) }) }

// took puts new content in place.
func (l *list) took(set *cidr.Set) {
	l.set.Store(set)
	listNetworks.WithLabelValues(l.name).Set(float64(set.Len()))
	l.good("ok")
}

func (l *list) good(result string) {
	listRefresh.WithLabelValues(l.name, result).Inc()
	listLastOK.WithLabelValues(l.name).SetToCurrentTime()
}

var errEmptyFile = errors.New("the file has no line: write a comment into it if it is meant to be empty")

// read reads the file, if it is not the one that was read before.
func (l *list) read() error {
	l.readMu.Lock()
	defer l.readMu.Unlock()
	defer l.settled()
	content, now, changed, err := l.file.read(maxList)
	switch {
	case err != nil:
		return err
	case !changed:
		listLastOK.WithLabelValues(l.name).SetToCurrentTime()
		return nil
	case len(content) == 0:
		return fmt.Errorf("%s: %w", l.where, errEmptyFile)
	}
	set, err := parseList(content)
	if err != nil {
		return fmt.Errorf("%s:%w", l.where, err)
	}
	l.file.seen = now
	l.took(set)
	return nil
}

// watch looks at the file again and again. A failure is told when it is a new
// one.
func (l *list) watch(ctx context.Context) {
	told := ""
	every(ctx, filePoll, func() {
		before := l.set.Load()
		err := l.read()
		switch {
		case err != nil && err.Error() != told:
			told = err.Error()
			listRefresh.WithLabelValues(l.name, "error").Inc()
			l.logger.Load().Error("list of networks cannot be read; the one before stays", zap.Error(err))
		case err == nil:
			told = ""
			if now := l.set.Load(); now.Len() != before.Len() {
				l.logger.Load().Info("list of networks has changed", zap.Int("networks", now.Len()), zap.Int("before", before.Len()))
			}
		}
	})
}

// Bounds of asking a URL.
const (
	firstAnswer = 5 * time.Second
	askTimeout  = 30 * time.Second
	minRetry    = 5 * time.Second
)

// client asks for lists. Whoever may redirect could name a host inside.
var client = &http.Client{
	Timeout:       askTimeout,
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	Transport: &http.Transport{
		Proxy:       http.ProxyFromEnvironment,
		DialContext: (&net.Dialer{Timeout: 10 * time.Second}).DialContext, ForceAttemptHTTP2: true,
		DisableKeepAlives: true, MaxResponseHeaderBytes: 64 << 10, TLSHandshakeTimeout: 10 * time.Second,
	},
}

// refresh asks the URL again and again. Until it answers, what was kept holds.
func (l *list) refresh(ctx context.Context) {
	if l.set.Load() == nil {
		switch since, err := l.restore(); {
		case err == nil:
			l.logger.Load().Info("list of networks as it was last known", zap.Time("since", since), zap.Int("networks", l.set.Load().Len()))
		case !errors.Is(err, fs.ErrNotExist):
			l.logger.Load().Warn("list of networks was kept and cannot be read", zap.Error(err))
		}
	}
	retry := minRetry
	for {
		wait := time.Duration(l.interval.Load())
		err := l.ask(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			l.failed.Store(nil)
			l.settled()
			retry = minRetry
			wait -= rand.N(wait / 10) // so that not all lists are asked for at once
		} else {
			l.failed.Store(&err)
			l.settled()
			wait, retry = min(wait, retry), min(2*retry, maxRefresh)
			listRefresh.WithLabelValues(l.name, "error").Inc()
			l.logger.Load().Warn("list of networks cannot be fetched; the one before stays", zap.Error(err),
				zap.Bool("known", l.set.Load() != nil), zap.Duration("retry_in", wait))
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-t.C:
		}
	}
}

// ask fetches the list once.
func (l *list) ask(ctx context.Context) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, l.where, nil)
	if err != nil {
		return err
	}
	req.Header.Set("User-Agent", "wayhouse")
	req.Header.Set("Accept", "text/plain, */*")
	if l.etag != "" {
		req.Header.Set("If-None-Match", l.etag)
	}
	resp, err := client.Do(req)
	if err != nil {
		var ue *url.Error
		if errors.As(err, &ue) {
			err = ue.Err // without the URL, which may have a key in it
		}
		return err
	}
	defer resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusNotModified && l.etag != "":
		l.good("unchanged")
		if err := l.touch(); err != nil {
			l.notKept(err)
		}
		return nil
	case resp.StatusCode/100 == 3:
		return fmt.Errorf("status %d: redirects are not followed", resp.StatusCode)
	case resp.StatusCode != http.StatusOK:
		return fmt.Errorf("status %d", resp.StatusCode)
	}
	content, err := io.ReadAll(io.LimitReader(resp.Body, maxList+1))
	switch {
	case err != nil:
		return err
	case len(content) > maxList:
		return fmt.Errorf("the answer has more than %d bytes", maxList)
	}
	set, err := parseList(content)
	if err != nil {
		return fmt.Errorf("line %w", err)
	}
	if set.Len() == 0 {
		return fmt.Errorf("the answer %w", errNoNetworks)
	}
	l.etag = resp.Header.Get("Etag")
	l.took(set)
	if err := l.keep(content); err != nil {
		l.notKept(err)
	}
	return nil
}

var errNoNetworks = errors.New("has no networks")

func (l *list) notKept(err error) {
	l.logger.Load().Warn("list of networks cannot be kept for a restart of the process", zap.Error(err))
}

// Bounds of a list.
const (
	maxList     = 16 << 20
	maxNetworks = 1_000_000
)

// parseList reads a list. The error begins with the number of the line.
func parseList(content []byte) (*cidr.Set, error) {
	set := new(cidr.Set)
	n := 0
	for i := 1; len(content) > 0; i++ {
		var line []byte
		line, content, _ = bytes.Cut(content, []byte("\n"))
		if end := bytes.IndexAny(line, "#;"); end >= 0 {
			line = line[:end]
		}
		if line = bytes.TrimSpace(line); len(line) == 0 {
			continue
		}
		if n++; n > maxNetworks {
			return nil, fmt.Errorf("%d: more than %d networks", i, maxNetworks)
		}
		if len(line) > 64 {
			return nil, fmt.Errorf("%d: %.64q… is no network", i, line)
		}
		if err := set.Add(string(line)); err != nil {
			return nil, fmt.Errorf("%d: %w", i, err)
		}
	}
	return set, nil
}
