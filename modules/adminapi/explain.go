package adminapi

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"

	"github.com/wayhouse-proxy/wayhouse/internal/literal"
	"github.com/wayhouse-proxy/wayhouse/internal/suggest"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
)

// flowJSON is a flow that somebody asks about.
type flowJSON struct {
	Listener string `json:"listener,omitempty"`
	Network  string `json:"network,omitempty"` // tcp or udp; "": the listener's only one
	Src      string `json:"src,omitempty"`
	Dst      string `json:"dst,omitempty"`
	Bytes    pieces `json:"bytes,omitempty"`
	Final    *bool  `json:"final,omitempty"` // default true
}

// pieces are the segments of a stream or datagrams, one as text or several as a
// list of texts.
type pieces []string

// UnmarshalJSON decodes a text or a list.
func (p *pieces) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '[' {
		return json.Unmarshal(b, (*[]string)(p))
	}
	var s string
	if err := json.Unmarshal(b, &s); err != nil {
		return errors.New(`bytes: neither "hex:…" or "ascii:…" nor a list of these`)
	}
	*p = pieces{s}
	return nil
}

// maxExplainBody has room for as many datagrams as are looked at, in hex.
const maxExplainBody = 1 << 20

// explain tells what would become of a flow.
func (a *API) explain(w http.ResponseWriter, r *http.Request) error {
	if err := knownParams(r.URL.Query()); err != nil {
		return err
	}
	var j flowJSON
	if err := decode(w, r, maxExplainBody, &j); err != nil {
		return err
	}
	q, err := j.question()
	if err != nil {
		return &problem{http.StatusBadRequest, err.Error()}
	}
	app := proxy.Running()
	if app == nil {
		return &problem{http.StatusServiceUnavailable, "no config with the wayhouse app is running"}
	}
	l := app.Listeners[j.Listener]
	if l == nil {
		var known []string
		for name := range app.Listeners {
			known = append(known, name)
		}
		return &problem{http.StatusNotFound, fmt.Sprintf("listener: none is named %.60q; %s", j.Listener, suggest.Hint(j.Listener, known))}
	}
	if j.Network == "" {
		tcp, udp := l.Networks()
		if tcp && udp {
			return &problem{http.StatusUnprocessableEntity, fmt.Sprintf("network: the listener %s has both: tcp or udp?", j.Listener)}
		}
		q.UDP = udp
	}
	e, err := l.Explain(*q)
	var wrong *listener.ErrQuestion
	switch {
	case errors.As(err, &wrong):
		return &problem{http.StatusUnprocessableEntity, err.Error()}
	case err != nil:
		return err
	case text(r):
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		return e.WriteText(w)
	}
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(e)
}

// question reads what was asked.
func (j *flowJSON) question() (*listener.Question, error) {
	q := &listener.Question{UDP: j.Network == "udp", Final: j.Final == nil || *j.Final}
	switch {
	case j.Listener == "":
		return nil, errors.New("listener: missing")
	case j.Network != "" && j.Network != "tcp" && j.Network != "udp":
		return nil, fmt.Errorf("network: %.60q is neither tcp nor udp", j.Network)
	case j.Src == "":
		return nil, errors.New("src: missing: the client's address and port, as in 203.0.113.7:51343")
	}
	var err error
	if q.Client, err = netip.ParseAddrPort(j.Src); err != nil {
		return nil, fmt.Errorf("src: %.60q is not an address and port, as in 203.0.113.7:51343", j.Src)
	}
	if j.Dst != "" {
		if q.Local, err = netip.ParseAddrPort(j.Dst); err != nil {
			return nil, fmt.Errorf("dst: %.60q is not an address and port, as in 198.51.100.10:7777", j.Dst)
		}
	}
	for i, s := range j.Bytes {
		b, err := literal.ParseAny(s)
		if err != nil {
			return nil, fmt.Errorf("bytes[%d]: %w", i, err)
		}
		q.Pieces = append(q.Pieces, b)
	}
	return q, nil
}
