package proxy

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
)

// What becomes of the configs that this process is given.
//
// Caddy answers whoever has brought a config and tells nobody else. But it gives
// the context of a config to the modules of its admin endpoint before it loads
// any app, and cancels it with the reason when the config is refused. So an
// attempt is followed from there, or from our app where there is no endpoint,
// until its context ends or that of the config before it does. One config is
// loaded at a time.
//
// What is refused earlier, such as a file that no adapter can read, is heard at
// the doors that are ours: see through.

var (
	reloads = metrics.Counter("config_reload_total", "Loads of a config beside a running one, by result: ok or error.", "result")

	versionDesc = metrics.Desc("config_version", "Unix time at which the running config was started.")
	infoDesc    = metrics.Desc("config_info", "Always 1; the label says which config of the app runs.", "hash")
	lastDesc    = metrics.Desc("config_last_reload_successful", "1 unless the last config that was brought has been refused.")
)

func init() {
	for _, result := range []string{"ok", "error"} {
		reloads.WithLabelValues(result) // so that the first is seen to be one more
	}
	metrics.Add(metrics.Func{Descs: []*prometheus.Desc{versionDesc, infoDesc, lastDesc}, Send: sendConfig})
}

func sendConfig(ch chan<- prometheus.Metric) {
	if a := Applied(); a.Hash != "" {
		ch <- prometheus.MustNewConstMetric(versionDesc, prometheus.GaugeValue, float64(a.Since.UnixMilli())/1e3)
		ch <- prometheus.MustNewConstMetric(infoDesc, prometheus.GaugeValue, 1, a.Hash)
	}
	ok := 1.0
	if r := LastRefusal(); r != nil && r.Superseded.IsZero() {
		ok = 0
	}
	ch <- prometheus.MustNewConstMetric(lastDesc, prometheus.GaugeValue, ok)
}

// Config says which config of the app runs.
type Config struct {
	Hash  string // of its JSON, see hashOf
	Since time.Time
}

// Applied is the config that runs, zero without one.
func Applied() Config {
	instances.mu.Lock()
	defer instances.mu.Unlock()
	if a := instances.current; a != nil {
		return Config{a.hash, a.since}
	}
	return Config{}
}

// A Refusal is a config that was not taken.
type Refusal struct {
	Time       time.Time
	Source     string // who has brought it, see doors
	Hash       string // of the app's part, "" when it did not get that far
	Error      string
	Superseded time.Time // when a later one was taken, zero while none was
}

// LastRefusal is the last config that was not taken, nil when all were.
func LastRefusal() *Refusal {
	configs.mu.Lock()
	defer configs.mu.Unlock()
	configs.settleLocked()
	if configs.last == nil {
		return nil
	}
	r := *configs.last
	return &r
}

// Follow hears from ctx what becomes of the config it belongs to.
func Follow(ctx caddy.Context) { configs.follow(ctx, "") }

// Through has load bring a config by a door, where what is refused before it
// becomes an attempt is heard too.
func Through(source string, load func() error) error { return configs.through(source, load) }

// SourceLoad is Caddy's POST /load.
const SourceLoad = "load"

// doors are the functions by which configs come, and what their sources are
// called.
var doors = map[string]string{
	"github.com/caddyserver/caddy/v2/caddyconfig.adminLoad.handleLoad":  SourceLoad,
	"github.com/caddyserver/caddy/v2.handleConfig":                      "config",
	"github.com/caddyserver/caddy/v2.trapSignalsPosix.func1":            "signal",
	"github.com/caddyserver/caddy/v2.finishSettingUp.func1":             "pull",
	"github.com/caddyserver/caddy/v2/cmd.watchConfigFile":               "watch",
	"github.com/caddyserver/caddy/v2/cmd.cmdRun":                        "start",
	"github.com/wayhouse-proxy/wayhouse/modules/adminapi.(*API).reload": "reload",
}

// running is the function under which Caddy makes a config run. Without it a
// config is only looked at, as by validate.
const running = "github.com/caddyserver/caddy/v2.unsyncedDecodeAndRun"

// source finds in the stack who has brought a config, and whether it is being
// made to run.
func source() (name string, loading bool) {
	pcs := make([]uintptr, 128)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs)])
	for {
		f, more := frames.Next()
		if f.Function == running {
			loading = true
		}
		if door := doors[f.Function]; door != "" {
			return door, loading
		}
		if !more {
			return "other", loading
		}
	}
}

// configs follows the configs of this process.
var configs history

type history struct {
	mu       sync.Mutex
	applied  *attempt // nil before the first and after the last
	pending  *attempt // being loaded, or taken with nothing having said so yet
	refusals map[string]int
	last     *Refusal

	doorsMu sync.Mutex
	doors   map[string]*sync.Mutex // one load at a time by each
}

// attempt is a config that Caddy has begun to load.
type attempt struct {
	ctx     context.Context
	source  string
	hash    string // once it is known
	started bool   // our app in it has
}

// follow is told of the context of a config, and of the hash of our app in it
// once that is known.
func (h *history) follow(ctx context.Context, hash string) {
	from, loading := source()
	if !loading {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.pending == nil || h.pending.ctx.Done() != ctx.Done() {
		if h.settleLocked(); h.pending != nil {
			h.takenLocked() // one is loaded at a time
		}
		h.pending = &attempt{ctx: ctx, source: from}
		context.AfterFunc(ctx, func() {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.settleLocked()
		})
	}
	if hash != "" {
		h.pending.hash = hash
	}
}

// undecoded hears of a config of our app that cannot be decoded. Without an
// admin endpoint nobody else would.
func (h *history) undecoded(hash string, err error) {
	from, loading := source()
	if !loading {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.pending != nil && !h.pending.started {
		h.pending.hash = hash // Caddy will cancel its context
		return
	}
	h.settleLocked()
	h.refusedLocked(from, hash, err.Error())
}

// started hears that our app in the pending config has.
func (h *history) started() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.pending != nil {
		h.pending.started = true
	}
}

// settleLocked decides what became of the pending config, if that can be told.
func (h *history) settleLocked() {
	if p := h.pending; p != nil && p.ctx.Err() != nil {
		if why, refused := reason(context.Cause(p.ctx)); refused {
			h.pending = nil
			h.refusedLocked(p.source, p.hash, why)
		} else {
			h.takenLocked() // and has been stopped meanwhile
		}
	}
	if h.applied == nil || h.applied.ctx.Err() == nil {
		return
	}
	// Caddy stops a config when the next one runs, or when it ends.
	if h.pending != nil {
		h.takenLocked()
	} else {
		h.applied = nil
	}
}

// takenLocked is called when the pending config runs.
func (h *history) takenLocked() {
	if h.applied != nil {
		reloads.WithLabelValues("ok").Inc()
	}
	if h.last != nil && h.last.Superseded.IsZero() {
		h.last.Superseded = time.Now()
	}
	h.applied, h.pending = h.pending, nil
}

func (h *history) refusedLocked(source, hash, why string) {
	if h.refusals == nil {
		h.refusals = make(map[string]int)
	}
	h.refusals[source]++
	if len(why) > maxError {
		why = strings.ToValidUTF8(why[:maxError], "") + "…"
	}
	h.last = &Refusal{Time: time.Now(), Source: source, Hash: hash, Error: why}
	if h.applied != nil || h.pending != nil {
		reloads.WithLabelValues("error").Inc()
	}
}

// maxError is how much of an error is kept, in bytes.
const maxError = 4 << 10

// through brings a config by a door. Its refusal may have been heard from its
// context by then; since a door is used by one at a time, a refusal by that door
// is this one's.
func (h *history) through(source string, load func() error) error {
	door := h.door(source)
	door.Lock()
	defer door.Unlock()
	before := h.refusedBy(source)
	err := load()
	if err == nil || h.refusedBy(source) != before {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.refusedLocked(source, "", err.Error())
	return err
}

func (h *history) door(source string) *sync.Mutex {
	h.doorsMu.Lock()
	defer h.doorsMu.Unlock()
	if h.doors == nil {
		h.doors = make(map[string]*sync.Mutex)
	}
	if h.doors[source] == nil {
		h.doors[source] = new(sync.Mutex)
	}
	return h.doors[source]
}

func (h *history) refusedBy(source string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.settleLocked()
	return h.refusals[source]
}

// reason is why a config was refused, by what its context was cancelled with.
func reason(cause error) (why string, refused bool) {
	for _, prefix := range []string{"configuration error: ", "configuration start error: "} {
		if why, refused = strings.CutPrefix(cause.Error(), prefix); refused {
			return why, true
		}
	}
	return "", false
}

// hashOf is the beginning of the SHA-256 of a config, as compact JSON with its
// keys in order, in hexadecimal digits. What placeholders stand for is not in it.
func hashOf(config []byte) string {
	dec := json.NewDecoder(bytes.NewReader(config))
	dec.UseNumber()
	var v any
	if dec.Decode(&v) != nil {
		return ""
	}
	var canonical bytes.Buffer
	enc := json.NewEncoder(&canonical)
	enc.SetEscapeHTML(false)
	if enc.Encode(v) != nil {
		return ""
	}
	sum := sha256.Sum256(bytes.TrimSuffix(canonical.Bytes(), []byte("\n")))
	return hex.EncodeToString(sum[:])[:hashDigits]
}

const hashDigits = 12
