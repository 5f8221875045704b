package discovery

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/strictjson"
	"github.com/wayhouse-proxy/wayhouse/internal/suggest"
)

const (
	namespace = "wayhouse.sources"
	inlineKey = "source"
)

// Use is a pool's hold on a source. Load makes it, and after it come Start,
// Stop and Close, in this order and from one goroutine; everything else may be
// called from any.
type Use struct {
	name    string // in the config, or the kind
	task    *task
	changed chan struct{}

	// Set by Start, and guarded by the mutex of the task from then on.
	pool    string
	log     *zap.Logger
	counts  *counters
	running bool
}

// tasks has the task of every source that a config of the process has.
var tasks = caddy.NewUsagePool()

// Load takes the source that a pool's config has: the name of one of Sources,
// a kind with its options, or the name of a kind that needs none. Errors begin
// with the key below the source's.
func Load(ctx caddy.Context, raw json.RawMessage) (*Use, error) {
	var word string
	if json.Unmarshal(raw, &word) != nil {
		return load(ctx, "", raw)
	}
	named, _ := ctx.Value(sourcesKey).(*Sources)
	if named != nil && named.raw[word] != nil {
		return load(ctx, word, named.raw[word])
	}
	if _, err := caddy.GetModule(namespace + "." + word); err == nil && word != "" {
		kind, _ := json.Marshal(map[string]string{inlineKey: word})
		return load(ctx, "", kind)
	}
	known := suggest.Modules(namespace)
	if named != nil {
		known = slices.AppendSeq(known, maps.Keys(named.raw))
	}
	return nil, fmt.Errorf(": no source is named %q in apps.wayhouse.sources, and no kind is; %s", word, suggest.Hint(word, known))
}

// Name is what Load would be given: a name alone, or a kind and its options in
// one spelling.
func Name(raw json.RawMessage) (name, options string) {
	if json.Unmarshal(raw, &name) == nil {
		return name, ""
	}
	kind, canonical, err := guest(raw)
	if err != nil {
		return kind, string(raw)
	}
	return kind, string(canonical)
}

func load(ctx caddy.Context, name string, raw json.RawMessage) (*Use, error) {
	kind, options, err := guest(raw)
	if err != nil {
		return nil, err
	}
	key := taskKey{kind, string(options)}
	v, _, err := tasks.LoadOrNew(key, func() (caddy.Destructor, error) {
		s, err := newSource(ctx, kind, options)
		if err != nil {
			return nil, err
		}
		return newTask(key, s), nil
	})
	if err != nil {
		return nil, err
	}
	if name == "" {
		name = kind
	}
	return &Use{name: name, task: v.(*task), changed: make(chan struct{}, 1)}, nil
}

// guest takes a source's config apart, says which key is wrong, and returns the
// options in one spelling.
func guest(raw json.RawMessage) (kind string, options json.RawMessage, err error) {
	var m map[string]json.RawMessage
	if json.Unmarshal(raw, &m) != nil || m == nil {
		return "", nil, fmt.Errorf(`: %s is not an object, as in {"source": "dns_srv", "record": "…"}`, raw)
	}
	if json.Unmarshal(m[inlineKey], &kind) != nil || kind == "" {
		return "", nil, errors.New(`.source: the kind is missing, as in "source": "dns_srv"`)
	}
	info, err := caddy.GetModule(namespace + "." + kind)
	if err != nil {
		return "", nil, fmt.Errorf(".source: there is no %s.%s; %s", namespace, kind, suggest.Module(namespace, kind))
	}
	delete(m, inlineKey)
	if options, err = json.Marshal(m); err != nil {
		return "", nil, err
	}
	if err := strictjson.Check(options, info.New()); err != nil {
		return "", nil, fmt.Errorf(".%w", err)
	}
	d := json.NewDecoder(bytes.NewReader(options))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		return "", nil, err
	}
	options, err = json.Marshal(v) // sorted all through, so that the order of keys is no change
	return kind, options, err
}

// newSource loads a guest and checks what it shares with the others.
func newSource(ctx caddy.Context, kind string, options json.RawMessage) (Source, error) {
	id := namespace + "." + kind
	mod, err := ctx.LoadModuleByID(id, options)
	if err != nil { // without Caddy's words before the key
		text := strings.TrimPrefix(strings.TrimPrefix(err.Error(), "provision "+id+": "), id+": invalid configuration: ")
		return nil, errors.New("." + text)
	}
	s, ok := mod.(Source)
	if !ok {
		return nil, fmt.Errorf(": %T is not a source", mod)
	}
	if _, ok := mod.(caddy.CleanerUpper); ok {
		// Its config may end before it does.
		return nil, fmt.Errorf(": %T has a Cleanup, which would end it with a config; a source has a Close instead", mod)
	}
	// A kind with a Provision of its own may have left this out.
	if err := errors.Join(s.Common().Provision(ctx), s.Common().Validate()); err != nil {
		closeSource(s)
		return nil, fmt.Errorf(".%w", err)
	}
	return s, nil
}

func closeSource(s Source) {
	if c, ok := s.(io.Closer); ok {
		_ = c.Close()
	}
}

// Name is the name that the source has in the config, or else its kind.
func (u *Use) Name() string { return u.name }

// Kind is the kind of the source.
func (u *Use) Kind() string { return u.task.key.kind }

// Start has the source asked for a pool, if it is not already.
func (u *Use) Start(pool string, log *zap.Logger) {
	u.task.join(u, pool, log.With(zap.String("source", u.name)))
}

// Changed has something in it when Known may say something new.
func (u *Use) Changed() <-chan struct{} { return u.changed }

// Known is what the source has found: in a stable order, each address once,
// none of which can be no host's. It must not be changed. asked reports whether
// there has been any answer, a failure too.
func (u *Use) Known() (endpoints []Endpoint, asked bool) {
	u.task.mu.Lock()
	defer u.task.mu.Unlock()
	return u.task.set, u.task.asked
}

// Stop ends what Start began.
func (u *Use) Stop() { u.task.leave(u) }

// Close gives back what Load took.
func (u *Use) Close() {
	_, _ = tasks.Delete(u.task.key) // Destruct returns no error
}

// Sources are the named sources of a config.
type Sources struct {
	raw  map[string]json.RawMessage
	uses []*Use // so that those no pool has are checked too
}

// NewSources makes the sources of a config by their names. Errors begin with
// the name. Close gives back what it took.
func NewSources(ctx caddy.Context, raw map[string]json.RawMessage) (*Sources, error) {
	s := &Sources{raw: raw}
	for _, name := range slices.Sorted(maps.Keys(raw)) {
		u, err := load(ctx, name, raw[name])
		if err != nil {
			s.Close()
			return nil, fmt.Errorf("%s%w", name, err)
		}
		s.uses = append(s.uses, u)
	}
	return s, nil
}

const sourcesKey caddy.CtxKey = "wayhouse_sources"

// In makes the sources known to the pools that are loaded with the context.
func (s *Sources) In(ctx caddy.Context) caddy.Context { return ctx.WithValue(sourcesKey, s) }

// Close gives the sources back.
func (s *Sources) Close() {
	if s == nil {
		return
	}
	for _, u := range s.uses {
		u.Close()
	}
	s.uses = nil
}

// The rhythm of a task.
const (
	maxTTL     = 5 * time.Minute
	listLimit  = 15 * time.Second       // of one List
	quiet      = 500 * time.Millisecond // after the last sign of a change
	impatience = 5 * time.Second        // after the first
	minRetry   = time.Second            // after a failed List, doubled with each
	maxRetry   = 30 * time.Second
	minRewatch = 5 * time.Second // after a Watch that has ended, doubled with each
	maxRewatch = time.Minute
)
