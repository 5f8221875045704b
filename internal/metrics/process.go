package metrics

import (
	"cmp"
	"os"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/version"
)

var (
	buildInfo = Gauge("build_info", "Always 1; the labels say which build runs.", "component", "version", "commit")
	fdOpen    = Desc("fd_open", "Open file descriptors of this process.")
	fdLimit   = Desc("fd_limit", "Soft limit of open file descriptors of this process.")
)

func init() {
	build := version.Read()
	buildInfo.WithLabelValues("wayhouse", build.Version, cmp.Or(build.Commit, "unknown")).Set(1)
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
