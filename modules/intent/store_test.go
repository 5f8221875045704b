package intent

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
)

var (
	one = netip.MustParseAddrPort("10.0.0.1:1")
	two = netip.MustParseAddrPort("[2001:db8::2]:2")
)

func memory() *Store { return NewStore(NewHints(MaxHints)) }

// add has the store want something of a backend.
func add(t testing.TB, s *Store, pool string, addr netip.AddrPort, b Backend) {
	t.Helper()
	if err := s.Change(pool, addr, func(Backend) (Backend, error) { return b, nil }); err != nil {
		t.Fatal(err)
	}
}

func added(weight uint32) Backend { return Backend{Weight: weight, Added: Now("alice")} }
func draining() Backend           { return Backend{State: Draining, Since: Now("bob")} }
func gone() Backend               { return Backend{Removed: Now("carol")} }

// tell writes down what a store wants, without times.
func tell(s *Store) string {
	var b strings.Builder
	for _, e := range s.Entries() {
		fmt.Fprintf(&b, "%s %s %s %d %s by %s; ", e.Pool, e.Addr, e.Change, e.Weight, e.State, e.Actor)
	}
	if by, ok := s.Drained(); ok {
		fmt.Fprintf(&b, "drained by %s", by.Actor)
	}
	return b.String()
}

func wants(t testing.TB, s *Store, want string) {
	t.Helper()
	if got := tell(s); got != want {
		t.Errorf("the store wants %q, want %q", got, want)
	}
}

func TestChange(t *testing.T) {
	s := memory()
	var told []string
	stop := s.Watch(func(pool string) { told = append(told, pool) })
	add(t, s, "b", one, added(3))
	add(t, s, "a", two, draining())
	both := draining()
	both.Weight, both.Added = 1, Now("dave")
	add(t, s, "a", one, both)
	wants(t, s, "a 10.0.0.1:1 added 1 enabled by dave; a 10.0.0.1:1 state 0 draining by bob; "+
		"a [2001:db8::2]:2 state 0 draining by bob; b 10.0.0.1:1 added 3 enabled by alice; ")
	if o := s.Overlay("a"); len(o) != 2 || s.Overlay("nobody") != nil {
		t.Errorf("overlays %v and %v", o, s.Overlay("nobody"))
	}

	before := s.Overlay("a")
	refusal := errors.New("no")
	if err := s.Change("a", one, func(b Backend) (Backend, error) { return Backend{}, refusal }); err != refusal {
		t.Errorf("a change that is refused: %v", err)
	}
	add(t, s, "a", one, both) // nothing new
	if want := []string{"b", "a", "a"}; !slices.Equal(told, want) {
		t.Errorf("told of %v, want %v", told, want)
	}
	add(t, s, "a", one, Backend{})
	if len(before) != 2 {
		t.Error("an overlay that was read has changed")
	}
	stop()
	add(t, s, "b", one, Backend{})
	wants(t, s, "a [2001:db8::2]:2 state 0 draining by bob; ")
	if len(told) != 4 {
		t.Errorf("told of %v", told)
	}
}

func TestDrop(t *testing.T) {
	s := memory()
	add(t, s, "a", one, added(1))
	add(t, s, "b", one, gone())
	add(t, s, "b", two, draining())
	if err := s.Drain(&By{Actor: "erin"}); err != nil {
		t.Fatal(err)
	}
	if list, err := s.Drop("nobody"); len(list) != 0 || err != nil {
		t.Errorf("dropping nothing: %v, %v", list, err)
	}
	list, err := s.Drop("b")
	if err != nil || len(list) != 2 || list[0].Change != "removed" || list[1].State != Draining {
		t.Errorf("dropped %v, %v", list, err)
	}
	wants(t, s, "a 10.0.0.1:1 added 1 enabled by alice; drained by erin")
	if list, err = s.Drop(""); err != nil || len(list) != 1 {
		t.Errorf("dropped %v, %v", list, err)
	}
	wants(t, s, "drained by erin")
}

func TestDrainedStaysBy(t *testing.T) {
	s := memory()
	for _, actor := range []string{"alice", "bob"} {
		if err := s.Drain(&By{Actor: actor}); err != nil {
			t.Fatal(err)
		}
	}
	wants(t, s, "drained by alice")
	for range 2 {
		if err := s.Drain(nil); err != nil {
			t.Fatal(err)
		}
	}
	wants(t, s, "")
}

func TestStoreIsBounded(t *testing.T) {
	s := memory()
	overlay := make(Overlay)
	for i := range MaxBackends {
		overlay[netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 1)] = gone()
	}
	s.replaceLocked("a", overlay)
	set := func(addr netip.AddrPort, b Backend) error {
		return s.Change("b", addr, func(Backend) (Backend, error) { return b, nil })
	}
	if err := set(two, added(1)); !errors.Is(err, ErrFull) {
		t.Errorf("one too many: %v", err)
	}
	known := netip.MustParseAddrPort("10.0.0.7:1")
	add(t, s, "a", known, added(2)) // known ones may change
	add(t, s, "a", known, Backend{})
	if err := set(two, added(1)); err != nil {
		t.Errorf("there is room again: %v", err)
	}
}

// Changes of many at once are made one after the other.
func TestChangesAtOnce(t *testing.T) {
	s := memory()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 100 {
				err := s.Change("a", one, func(b Backend) (Backend, error) {
					b.Weight++
					b.Added = Now("x")
					return b, nil
				})
				if err != nil {
					t.Error(err)
				}
				s.Entries()
			}
		})
	}
	wg.Wait()
	if w := s.Overlay("a")[one].Weight; w != 800 {
		t.Errorf("weight %d, want 800", w)
	}
}
