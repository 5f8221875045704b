package consul

import (
	"errors"
	"fmt"
	"io"
	"net/netip"

	"github.com/wayhouse-proxy/wayhouse/internal/fetch"
	"github.com/wayhouse-proxy/wayhouse/modules/discovery"
)

// instance is what matters of an element of GET /v1/health/service/NAME.
type instance struct {
	Node    struct{ Address string }
	Service struct {
		Address string
		Port    int
		Weights struct{ Passing int64 }
	}
}

// decode reads the instances of an answer. Those whose address is a name are
// left to the host, which counts them; when it is all of them, that is an error.
func decode(d *fetch.Decoder) ([]discovery.Endpoint, error) {
	var found []discovery.Endpoint
	known, strange := 0, ""
	err := d.Array(func() error {
		var i instance
		if err := d.Decode(&i); err != nil {
			return err
		}
		if len(found) == maxInstances {
			return fmt.Errorf("there are more than %d instances", maxInstances)
		}
		e, address := i.endpoint()
		if e.Addr.IsValid() {
			known++
		} else {
			strange = address
		}
		found = append(found, e)
		return nil
	})
	if err == nil {
		err = d.End()
	}
	switch {
	case err == io.EOF, err == io.ErrUnexpectedEOF:
		return nil, errors.New("the answer is cut off")
	case errors.Is(err, fetch.ErrTooLarge):
		return nil, fmt.Errorf("an instance has more than %d MiB, or all together more than %d MiB", maxInstance>>20, maxList>>20)
	case err != nil:
		return nil, err
	case len(found) > 0 && known == 0:
		return nil, fmt.Errorf("none of %d instances has an IP address; one has %.80q", len(found), strange)
	}
	return found, nil
}

// endpoint is the instance as a backend, at the address that it has been found
// to have. One that does not say its own is at that of its node.
func (i *instance) endpoint() (e discovery.Endpoint, address string) {
	if address = i.Service.Address; address == "" {
		address = i.Node.Address
	}
	ip, err := netip.ParseAddr(address)
	if err != nil || i.Service.Port < 1 || i.Service.Port > 65535 {
		return e, address
	}
	e.Addr = netip.AddrPortFrom(ip, uint16(i.Service.Port))
	e.Weight = uint32(min(max(i.Service.Weights.Passing, 1), 1<<16-1))
	return e, address
}
