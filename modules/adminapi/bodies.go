package adminapi

import (
	"io"
	"net/http"
	"time"
)

// errSlow is the answer to a body that did not come in time.
var errSlow = &problem{http.StatusRequestTimeout, "the body has not arrived in time"}

// limitBody gives the body of a request a time by which it must have arrived.
func limitBody(w http.ResponseWriter, r *http.Request) {
	if r.Body == nil || r.Body == http.NoBody {
		return
	}
	c := http.NewResponseController(w)
	if c.SetReadDeadline(time.Now().Add(bodyTime)) == nil {
		r.Body = &timedBody{r.Body, c}
	}
}

// timedBody takes the deadline away at the end of the body: behind it the
// server reads to learn that the client has gone.
type timedBody struct {
	io.ReadCloser
	c *http.ResponseController
}

func (b *timedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF {
		b.c.SetReadDeadline(time.Time{})
	}
	return n, err
}
