package metrics

import "github.com/prometheus/client_golang/prometheus"

// Forget removes the series of vectors whose label has that value. Whoever still
// holds one of them counts on unseen.
func Forget(label, value string) {
	for _, c := range All() {
		if v, ok := c.(interface {
			DeletePartialMatch(prometheus.Labels) int
		}); ok {
			v.DeletePartialMatch(prometheus.Labels{label: value})
		}
	}
}
