package metrics

import (
	"os"
	"runtime/debug"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"
)

var (
	buildInfo = Gauge("build_info", "Always 1; the labels say which build runs.", "component", "version", "commit")
	fdOpen    = Desc("fd_open", "Open file descriptors of this process.")
	fdLimit   = Desc("fd_limit", "Soft limit of open file descriptors of this process.")
)

func init() {
	version, commit := build()
	buildInfo.WithLabelValues("wayhouse", version, commit).Set(1)
	Add(Func{Descs: []*prometheus.Desc{fdOpen, fdLimit}, Send: func(ch chan<- prometheus.Metric) {
		if n, err := OpenFiles(); err == nil {
			ch <- prometheus.MustNewConstMetric(fdOpen, prometheus.GaugeValue, float64(n))
		}
		var lim unix.Rlimit
		if unix.Getrlimit(unix.RLIMIT_NOFILE, &lim) == nil {
			ch <- prometheus.MustNewConstMetric(fdLimit, prometheus.GaugeValue, float64(lim.Cur))
		}
	}})
}

// OpenFiles counts the open file descriptors of this process.
func OpenFiles() (int, error) {
	d, err := os.Open("/proc/self/fd")
	if err != nil {
		return 0, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	return max(len(names)-1, 0), err // not counting d
}

// modulePath is this module's, to find it in the build info of a binary that
// xcaddy has made around it.
const modulePath = "github.com/wayhouse-proxy/wayhouse"

// Version is this module's in the running build, "unknown" where it has none.
func Version() string {
	version, _ := build()
	return version
}

func build() (version, commit string) {
	version, commit = "unknown", "unknown"
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return version, commit
	}
	if info.Main.Path == modulePath && info.Main.Version != "" {
		version = info.Main.Version
	}
	for _, dep := range info.Deps {
		if dep.Path == modulePath {
			version = dep.Version
		}
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && len(s.Value) >= 12 {
			commit = s.Value[:12]
		}
	}
	return version, commit
}
