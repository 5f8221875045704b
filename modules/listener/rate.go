package listener

import (
	"github.com/wayhouse-proxy/wayhouse/internal/tokens"
)

// newSessions is the bucket behind max_new_sessions_per_sec. It belongs to the
// process: a reload does not fill it.
var newSessions tokens.Bucket
