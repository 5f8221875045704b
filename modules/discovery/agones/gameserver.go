package agones

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/wayhouse-proxy/wayhouse/modules/discovery"
)

// gameServer is what matters of a GameServer, of agones.dev/v1.
type gameServer struct {
	Metadata struct {
		Name              string
		DeletionTimestamp *string
	}
	Spec struct {
		Ports []struct {
			Name          string
			ContainerPort int
		}
	}
	Status struct {
		State   string
		Address string // an IP address or a name
		Ports   []struct {
			Name string
			Port int
		}
		Addresses []struct{ Type, Address string } // of the node and the pod
		Counters  map[string]tally
		Lists     map[string]tally
	}
}

// tally is a counter or a list.
type tally struct{ Capacity int64 }

// The types of addresses.
const (
	externalIP = "ExternalIP"
	internalIP = "InternalIP"
	podIP      = "PodIP"
)

// wants says which servers are endpoints, and how.
type wants struct {
	states        []string
	port, address string
	counter, list string
}

// add appends a server that is wanted. One that nobody could be sent to has no
// address, and the reason.
func (w *wants) add(list []found, g *gameServer) []found {
	if !slices.Contains(w.states, g.Status.State) || g.Metadata.DeletionTimestamp != nil {
		return list
	}
	f := found{name: g.Metadata.Name}
	ip, err := w.ip(g)
	if err == nil {
		var port uint16
		if port, err = w.number(g); err == nil {
			f.at = discovery.Endpoint{Addr: netip.AddrPortFrom(ip, port), MaxSessions: w.capacity(g)}
		}
	}
	if err != nil {
		f.left = err.Error()
	}
	return append(list, f)
}

// ip is the address that players are sent to.
func (w *wants) ip(g *gameServer) (netip.Addr, error) {
	types := []string{w.address}
	if w.address == "" {
		if a, ok := parseIP(g.Status.Address); ok {
			return a, nil
		}
		types = []string{externalIP, internalIP}
	}
	for _, t := range types {
		for _, at := range g.Status.Addresses {
			if a, ok := parseIP(at.Address); ok && at.Type == t {
				return a, nil
			}
		}
	}
	if w.address == "" {
		return netip.Addr{}, fmt.Errorf("its address %.60q is not an IP address, and its node has none", g.Status.Address)
	}
	return netip.Addr{}, fmt.Errorf("it has no %s", w.address)
}

func parseIP(s string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(s)
	return a.Unmap(), err == nil && a.Zone() == "" && !a.IsUnspecified()
}

// number is the port that is wanted. Agones maps the one of the node to the
// container's, at which a pod itself is reached.
func (w *wants) number(g *gameServer) (uint16, error) {
	if w.address == podIP {
		for _, p := range g.Spec.Ports {
			if w.port == "" || p.Name == w.port {
				return w.inRange(p.ContainerPort)
			}
		}
	} else {
		for _, p := range g.Status.Ports {
			if w.port == "" || p.Name == w.port {
				return w.inRange(p.Port)
			}
		}
	}
	if w.port == "" {
		return 0, errors.New("it has no port")
	}
	return 0, fmt.Errorf("it has no port named %q", w.port)
}

func (w *wants) inRange(port int) (uint16, error) {
	if port < 1 || port > 65535 {
		return 0, fmt.Errorf("its port is %d", port)
	}
	return uint16(port), nil
}

// capacity is how many flows it may have; 0 says nothing.
func (w *wants) capacity(g *gameServer) int64 {
	switch {
	case w.counter != "":
		return max(g.Status.Counters[w.counter].Capacity, 0)
	case w.list != "":
		return max(g.Status.Lists[w.list].Capacity, 0)
	}
	return 0
}
