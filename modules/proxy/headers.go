package proxy

import (
	"fmt"
	"maps"
	"slices"

	"github.com/wayhouse-proxy/wayhouse/internal/proxyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
)

// checkHeaders refuses a PROXY header that is not for the flows of the
// listeners whose routes lead to it. What comes by a hint or an answer of a
// resolver is refused when it comes.
func (a *App) checkHeaders() error {
	for _, name := range slices.Sorted(maps.Keys(a.Listeners)) {
		l := a.Listeners[name]
		tcp, udp := l.Networks()
		for h := range l.Handlers {
			user, ok := h.(interface {
				UsedHeader() (path string, form proxyproto.Form)
			})
			if !ok {
				continue
			}
			path, form := user.UsedHeader()
			for isUDP, has := range map[bool]bool{false: tcp, true: udp} {
				if err := proxyopt.Fits(form, isUDP); has && err != nil {
					return fmt.Errorf("%s.%w (from listeners.%s)", path, err, name)
				}
			}
		}
	}
	return nil
}
