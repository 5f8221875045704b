package placeholder

import "testing"

func TestReplace(t *testing.T) {
	t.Setenv("WAYHOUSE_TEST", "games")
	t.Setenv("WAYHOUSE_TEST_EMPTY", "")
	a, b := "x-{env.WAYHOUSE_TEST}", "plain"
	if err := Replace(Option{"a", &a}, Option{"b", &b}); err != nil || a != "x-games" || b != "plain" {
		t.Errorf("%q, %q, %v", a, b, err)
	}
	for s, want := range map[string]string{
		"{env.WAYHOUSE_TEST_EMPTY}": "c: evaluated placeholder {env.WAYHOUSE_TEST_EMPTY} is empty",
		"{wayhouse.none}":           "c: unrecognized placeholder {wayhouse.none}",
	} {
		v := s
		if err := Replace(Option{"c", &v}); err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", s, err, want)
		}
	}
}
