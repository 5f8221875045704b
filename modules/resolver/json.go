package resolver

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"time"
)

// requestJSON is a request as the service gets it.
type requestJSON struct {
	Listener   string `json:"listener"`
	Src        string `json:"src"`
	Dst        string `json:"dst"`
	SNI        string `json:"sni,omitempty"`
	FirstBytes []byte `json:"first_bytes_b64"`
	RoutingKey string `json:"routing_key,omitempty"`
}

func encodeRequest(r *Request) []byte {
	first := r.FirstBytes
	if first == nil {
		first = []byte{} // "", not null
	}
	b, err := json.Marshal(requestJSON{r.Listener, r.Client.String(), r.Dst(), r.SNI, first, r.RoutingKey})
	if err != nil {
		panic(err) // strings and bytes can always be encoded
	}
	return b
}

// Dst is the address of ours that the client spoke to.
func (r *Request) Dst() string { return r.Local.String() }

// answerJSON is an answer as the service gives it.
type answerJSON struct {
	Pool   *string `json:"pool"`
	Target *string `json:"target"`
	TTLSec *uint32 `json:"ttl_sec"`
}

// decodeAnswer reads an answer. Keys that it does not know are the service's
// own business.
func decodeAnswer(b []byte) (Answer, error) {
	var j *answerJSON
	if err := json.Unmarshal(b, &j); err != nil {
		return Answer{}, fmt.Errorf("the answer: %w", err)
	}
	if j == nil {
		return Answer{}, fmt.Errorf("the answer is null, not an object")
	}
	var pool, target string
	if j.Pool != nil {
		pool = *j.Pool
	}
	if j.Target != nil {
		target = *j.Target
	}
	return makeAnswer(pool, target, j.TTLSec)
}

// makeAnswer checks what a service has answered.
func makeAnswer(pool, target string, ttlSec *uint32) (Answer, error) {
	a := Answer{Pool: pool}
	if ttlSec != nil {
		a.HasTTL, a.TTL = true, time.Duration(*ttlSec)*time.Second
	}
	if target == "" {
		return a, nil
	}
	t, err := netip.ParseAddrPort(target)
	if err != nil {
		return Answer{}, fmt.Errorf("the target %.80q is not ip:port", target)
	}
	a.Pool, a.Target = "", netip.AddrPortFrom(t.Addr().Unmap(), t.Port())
	return a, nil
}
