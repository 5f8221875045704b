package flow

import (
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
)

// The way of a record to the log:
//
//	worker: put → chunks → write, in a goroutine that lives while there are any
//
// A log that is slow, such as a disk that has stalled, costs records and holds up
// nobody: put never waits for it, and there is a bound to what waits.

var (
	logRecords = metrics.Counter("session_log_records_total", "Records that were written to the session log, by event.", "event")
	logDropped = metrics.Counter("session_log_dropped_total", "Records that were not written to the session log, because it did not keep up.").WithLabelValues()
)

const (
	maxQueued = 64 << 10 // records, about 20 MB
	logChunk  = 256      // records
)

// logQueue has the records that wait. Its zero value is ready.
type logQueue struct {
	mu      sync.Mutex
	chunks  [][]record // oldest first
	n       int        // records in chunks
	spare   []record   // one that is empty
	writing bool       // there is a writer
	taken   uint64     // records that were ever queued

	done atomic.Uint64 // those of them that were written, or could not be
}

// put queues a record, or counts it when there are too many.
func (q *logQueue) put(r record) {
	r.at = time.Now()
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.n >= maxQueued {
		logDropped.Inc()
		return
	}
	last := len(q.chunks) - 1
	if last < 0 || len(q.chunks[last]) == logChunk {
		c := q.spare
		if q.spare = nil; c == nil {
			c = make([]record, 0, logChunk)
		}
		q.chunks = append(q.chunks, c)
		last++
	}
	q.chunks[last] = append(q.chunks[last], r)
	q.n++
	q.taken++
	if !q.writing {
		q.writing = true
		go q.write()
	}
}

// take takes the oldest chunk out. When there is none the writer has ended.
func (q *logQueue) take(written []record) (chunk []record) {
	clear(written)
	q.mu.Lock()
	defer q.mu.Unlock()
	if written != nil {
		q.spare = written[:0]
	}
	if len(q.chunks) == 0 {
		q.chunks, q.writing = nil, false
		return nil
	}
	chunk, q.chunks = q.chunks[0], q.chunks[1:]
	q.n -= len(chunk)
	return chunk
}

// write writes until nothing waits.
func (q *logQueue) write() {
	var w logWriter
	for chunk := q.take(nil); chunk != nil; chunk = q.take(chunk) {
		for at := 0; at < len(chunk); {
			at = w.write(chunk, at, &q.done)
		}
	}
}

// flush waits for what has been queued by now.
func (q *logQueue) flush(d time.Duration) {
	q.mu.Lock()
	upTo := q.taken
	q.mu.Unlock()
	if q.done.Load() >= upTo {
		return
	}
	end := time.NewTimer(d)
	defer end.Stop()
	poll := time.NewTicker(flushPoll)
	defer poll.Stop()
	for q.done.Load() < upTo {
		select {
		case <-poll.C:
		case <-end.C:
			return
		}
	}
}

const flushPoll = 2 * time.Millisecond

// logWriter writes records.
type logWriter struct{ fields []zap.Field }

// write writes the records of a chunk from one on, and returns where to go on
// after an encoder or a writer of others has panicked.
func (w *logWriter) write(chunk []record, from int, done *atomic.Uint64) (next int) {
	defer func() {
		if recover() != nil {
			logDropped.Inc()
			done.Add(1)
		}
	}()
	for next = from; next < len(chunk); {
		r := &chunk[next]
		next++
		w.fields = r.appendTo(w.fields[:0])
		if ce := sessions.logger.Load().Check(zapcore.InfoLevel, messages[r.event]); ce != nil {
			ce.Time = r.at
			ce.Write(w.fields...)
		}
		logRecords.WithLabelValues(events[r.event]).Inc()
		done.Add(1)
	}
	return next
}
