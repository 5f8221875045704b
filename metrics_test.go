package wayhouse_test

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
)

var descPattern = regexp.MustCompile(`^Desc\{fqName: "([^"]*)", help: "([^"]*)", (?:unit: "", )?constLabels: \{\}, variableLabels: \{([^}]*)\}\}$`)

// series is what is known of a metric before it has values.
type series struct {
	name, help string
	labels     []string
}

func allSeries(t *testing.T) []series {
	t.Helper()
	ch := make(chan *prometheus.Desc)
	go func() {
		defer close(ch)
		for _, c := range metrics.All() {
			c.Describe(ch)
		}
	}()
	var all []series
	for d := range ch {
		m := descPattern.FindStringSubmatch(d.String())
		if m == nil {
			t.Errorf("not understood: %s", d)
			continue
		}
		s := series{name: m[1], help: m[2]}
		if m[3] != "" {
			s.labels = strings.Split(m[3], ",")
		}
		all = append(all, s)
	}
	if len(all) == 0 {
		t.Fatal("there are no metrics")
	}
	return all
}

// Labels whose values are a closed set, or as many as the config names. A
// client's address or a player would be a series for each.
var knownLabels = []string{
	"listener", "proto", "pool", "backend", "result", "reason", "dir", "kind", "state", "strategy", "filter", "change", "event",
	"resolver", "component", "version", "commit", "name", "list", "hash",
}

// Words in a name that stand for a unit other than seconds and bytes, or for
// what Prometheus adds by itself.
var badWords = []string{"ms", "millis", "milliseconds", "secs", "sec", "micros", "kb", "mb", "kilobytes", "count", "sum", "bucket", "counter", "gauge"}

func TestMetricNames(t *testing.T) {
	name := regexp.MustCompile(`^wayhouse(_[a-z][a-z0-9]*)+$`)
	seen := make(map[string]bool)
	for _, s := range allSeries(t) {
		if seen[s.name] {
			t.Errorf("%s is made twice", s.name)
		}
		seen[s.name] = true
		if !name.MatchString(s.name) {
			t.Errorf("%s is not in lower case with single underscores behind wayhouse", s.name)
		}
		for word := range strings.SplitSeq(s.name, "_") {
			if slices.Contains(badWords, word) {
				t.Errorf("%s: %q in a name", s.name, word)
			}
		}
		if len(s.help) < 10 || !strings.HasSuffix(s.help, ".") || strings.ToUpper(s.help[:1]) != s.help[:1] {
			t.Errorf("%s: the help %q is not a sentence", s.name, s.help)
		}
		for _, l := range s.labels {
			if !slices.Contains(knownLabels, l) {
				t.Errorf("%s: the label %q is not one of the known ones", s.name, l)
			}
		}
	}
}

// TestMetricTypes collects what has values and checks that counters, and they
// alone, end in _total.
func TestMetricTypes(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	if err := metrics.Register(reg); err != nil {
		t.Fatal(err)
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if counter := f.GetType().String() == "COUNTER"; counter != strings.HasSuffix(f.GetName(), "_total") {
			t.Errorf("%s is a %s", f.GetName(), f.GetType())
		}
	}
}

// TestMetricsPage compares docs/metrics.md with what there is, both ways.
func TestMetricsPage(t *testing.T) {
	row := regexp.MustCompile("(?m)^\\| `(wayhouse_[a-z_0-9]+)` \\| (counter|gauge|histogram) \\|([^|]*)\\|")
	listed := make(map[string]string)
	for _, m := range row.FindAllStringSubmatch(string(read(t, "docs/metrics.md")), -1) {
		if _, twice := listed[m[1]]; twice {
			t.Errorf("docs/metrics.md has %s twice", m[1])
		}
		if (m[2] == "counter") != strings.HasSuffix(m[1], "_total") {
			t.Errorf("docs/metrics.md: %s is a %s", m[1], m[2])
		}
		listed[m[1]] = strings.TrimSpace(m[3])
	}
	for _, s := range allSeries(t) {
		var quoted []string
		for _, l := range s.labels {
			quoted = append(quoted, fmt.Sprintf("`%s`", l))
		}
		want := strings.Join(quoted, ", ")
		labels, ok := listed[s.name]
		switch {
		case !ok:
			t.Errorf("docs/metrics.md lacks %s", s.name)
		case labels != want:
			t.Errorf("docs/metrics.md: %s has the labels %q, not %q", s.name, want, labels)
		}
		delete(listed, s.name)
	}
	for _, name := range slices.Sorted(maps.Keys(listed)) {
		t.Errorf("docs/metrics.md has %s, which there is not", name)
	}
}

// promised are the series that keep their names and labels from one version to
// the next: alerts and dashboards of operators name them.
var promised = map[string]string{
	"listener_connections_total": "listener result", "active_connections": "listener", "active_udp_sessions": "listener",
	"connection_duration_seconds": "listener", "bytes_total": "listener dir", "packets_total": "listener dir",
	"datagrams_dropped_total": "listener reason", "pool_backends": "pool state", "backend_active_sessions": "pool backend",
	"backend_connect_errors_total": "pool backend kind", "healthcheck_total": "pool backend result",
	"lb_selections_total": "pool strategy result", "route_hints_applied_total": "listener",
	"proxy_protocol_headers_total": "pool version", "discovery_refresh_total": "pool kind result", "discovery_backends": "pool",
	"accept_errors_total": "listener", "filter_blocked_total": "listener filter", "sniffer_calls_total": "name result",
	"sniffer_call_seconds": "name", "resolver_requests_total": "resolver result", "resolver_cache_total": "resolver result",
	"config_reload_total": "result", "config_version": "", "listener_bind_failures_total": "listener",
	"build_info": "component version commit", "fd_open": "", "fd_limit": "",
	"resolver_latency_seconds": "resolver",
}

// later are those that belong to parts which there are not yet: gossip between
// instances, TLS of the admin API, components that talk to each other, the web
// front's own process and certificates.
var later = map[string]string{
	"tls_handshakes_refused_total": "reason", "tls_handshakes_evicted_total": "", "gossip_members": "",
	"gossip_messages_total": "direction", "gossip_auth_rejected_total": "", "gossip_stale_rejected_total": "",
	"gossip_version_rejected_total": "", "gossip_registers_dropped_total": "reason", "protocol_mismatch_total": "route_group",
	"backend_domain_down": "pool backend", "web_sync_last_ok": "", "web_sync_loads_total": "", "web_sync_rejects_total": "",
	"web_sync_errors_total": "stage", "web_sync_last_render_seconds": "", "acme_cert_expiry_seconds": "site",
	"acme_issue_total": "result", "acme_held": "", "session_setup_seconds": "listener phase", "worker_busy_ratio": "worker",
}

// TestPromisedMetrics finds each promised series with exactly its labels.
func TestPromisedMetrics(t *testing.T) {
	is := make(map[string]string)
	for _, s := range allSeries(t) {
		is[strings.TrimPrefix(s.name, "wayhouse_")] = strings.Join(s.labels, " ")
	}
	for name, labels := range promised {
		if got, ok := is[name]; !ok || got != labels {
			t.Errorf("wayhouse_%s: there %v, labels %q, want %q", name, ok, got, labels)
		}
	}
	for name, labels := range later {
		if got, ok := is[name]; ok && got != labels {
			t.Errorf("wayhouse_%s has the labels %q, want %q", name, got, labels)
		}
	}
}
