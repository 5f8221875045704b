package sock

import (
	"testing"

	"golang.org/x/sys/unix"
)

func TestSpare(t *testing.T) {
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_NOFILE, &was)
	for _, tc := range []struct {
		limit uint64
		first int // descriptor that is not for flows
	}{
		{256, 224},
		{512, 448},
		{4096, 4032},
	} {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: tc.limit, Max: was.Max}); err != nil {
			t.Fatal(err)
		}
		if !Spare(tc.first-1) || Spare(tc.first) {
			t.Errorf("of %d descriptors flows may have up to %d: %v, %d: %v", tc.limit, tc.first-1, Spare(tc.first-1), tc.first, Spare(tc.first))
		}
		if !Room(0) {
			t.Errorf("of %d descriptors there is no room", tc.limit)
		}
	}
}
