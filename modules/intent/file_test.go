package intent

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io/fs"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/bbolt"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// kept is a store that is kept in dir until the test ends it.
func kept(t testing.TB, dir string) (s *Store, end func()) {
	t.Helper()
	s = memory()
	if err := s.Acquire(dir, zap.NewNop()); err != nil {
		t.Fatal(err)
	}
	return s, func() {
		t.Helper()
		if err := s.Release(dir); err != nil {
			t.Error(err)
		}
	}
}

func TestKept(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "not", "yet")
	s, end := kept(t, dir)
	add(t, s, "a\x00b", one, added(7))
	add(t, s, "", two, draining())
	add(t, s, "c", one, gone())
	add(t, s, "c", two, added(1))
	if _, err := s.Drop("c"); err != nil {
		t.Fatal(err)
	}
	by := Now("alice")
	if err := s.Drain(&by); err != nil {
		t.Fatal(err)
	}
	since := s.Overlay("")[two].Since
	want := tell(s)
	end()
	wants(t, s, "") // what is in a file is not in memory any more

	for path, mode := range map[string]fs.FileMode{dir: 0o700, filepath.Join(dir, FileName): 0o600} {
		if i, err := os.Stat(path); err != nil || i.Mode().Perm() != mode {
			t.Errorf("%s: %v, %v, want %v", path, i.Mode(), err, mode)
		}
	}
	s, end = kept(t, dir)
	wants(t, s, want)
	if got := s.Overlay("")[two].Since; !got.At.Equal(since.At) || got.Actor != "bob" {
		t.Errorf("it is draining since %v, want %v", got, since)
	}
	if err := s.Drain(nil); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Drop(""); err != nil {
		t.Fatal(err)
	}
	end()
	s, end = kept(t, dir)
	wants(t, s, "")
	end()
}

func TestHintsAreKept(t *testing.T) {
	dir := t.TempDir()
	s, end := kept(t, dir)
	s.hints.Put(Hint{mapped, "a", time.Hour, Now("alice")})
	s.hints.Put(Hint{v6, "b", time.Hour, Now("bob")})
	s.hints.Delete(v6)
	s.hints.Put(Hint{netip.MustParseAddr("10.0.0.9"), "c", time.Nanosecond, By{}})
	end()
	s, end = kept(t, dir)
	var got []string
	for h := range s.hints.All {
		if h.Left <= 0 || h.Left > time.Hour {
			t.Errorf("%v is left of an hour", h.Left)
		}
		got = append(got, fmt.Sprint(h.Client, h.Pool, h.Actor))
	}
	if fmt.Sprint(got) != "[203.0.113.7aalice]" {
		t.Errorf("hints %v", got)
	}
	end()
}

// Hints are on disk soon, without anybody's end: another process reads them.
// TestStartWritesNothing: a process has to start while the disk is full.
func TestStartWritesNothing(t *testing.T) {
	dir := t.TempDir()
	s, end := kept(t, dir)
	add(t, s, "a", one, added(7))
	by := Now("alice")
	if err := s.Drain(&by); err != nil {
		t.Fatal(err)
	}
	for _, client := range []netip.Addr{one.Addr(), two.Addr()} {
		if !s.hints.Set(client, "a", time.Minute) {
			t.Fatal("no room for a hint")
		}
	}
	want := tell(s)
	end()

	path := filepath.Join(dir, FileName)
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	s, end = kept(t, dir)
	wants(t, s, want)
	if n := s.hints.Len(); n != 2 {
		t.Errorf("%d hints, want 2", n)
	}
	end()
	after, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(before, after) {
		t.Error("the file was written to, although it said all there was")
	}
}

// TestFailedAcquire: a load that is refused because its file cannot be written to
// leaves what operators want as it was.
func TestFailedAcquire(t *testing.T) {
	dir := t.TempDir()
	s, end := kept(t, dir)
	add(t, s, "a", one, added(7))
	end()
	db, found, err := openFile(dir)
	if err != nil {
		t.Fatal(err)
	}
	s = memory()
	s.hints.Set(two.Addr(), "a", time.Minute) // which the file would have to have
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.push(&file{store: s, dir: dir, db: db}, found); err == nil {
		t.Fatal("a file that cannot be written to was taken")
	}
	wants(t, s, "")
	if s.hints.dirty != nil {
		t.Error("hints are noted for a file that is not in use")
	}
}

func TestHintsAreWritten(t *testing.T) {
	dir := t.TempDir()
	s, end := kept(t, dir)
	defer end()
	const n = 2*hintBatch + 1
	for i := range n {
		s.hints.Put(Hint{netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), "a", time.Hour, Now("alice")})
	}
	written := func() (n int) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.files[0].db.View(func(tx *bbolt.Tx) error {
			n = tx.Bucket(bucketHints).Inspect().KeyN
			return nil
		})
		return n
	}
	testkit.Settles(t, "hints that are written", n, written)
}

// TestMoves has what becomes of files when the directory changes.
func TestMoves(t *testing.T) {
	a, b := t.TempDir(), t.TempDir()
	s := memory()
	acquire := func(dir, text string) {
		t.Helper()
		err := s.Acquire(dir, zap.NewNop())
		if (err == nil) != (text == "") || err != nil && !strings.Contains(err.Error(), text) {
			t.Fatalf("using %s: %v, want %q", dir, err, text)
		}
	}
	release := func(dir string) {
		t.Helper()
		if err := s.Release(dir); err != nil {
			t.Fatal(err)
		}
	}
	// look has what another process would find in a directory that is not used.
	look := func(dir, want string) {
		t.Helper()
		other, end := kept(t, dir)
		wants(t, other, want)
		end()
	}
	const alice, bob = "p 10.0.0.1:1 added 1 enabled by alice; ", "p [2001:db8::2]:2 state 0 draining by bob; "

	acquire(a, "")
	add(t, s, "p", one, added(1))
	acquire(a, "") // a reload that does not change it
	release(a)
	wants(t, s, alice)

	acquire(b, "") // one that moves it
	add(t, s, "p", two, draining())
	release(a)
	wants(t, s, alice+bob)
	look(a, "")

	acquire(a, "") // one that moves it back, and fails
	add(t, s, "q", one, gone())
	release(a)
	look(a, "")
	if _, err := s.Drop("q"); err != nil {
		t.Fatal(err)
	}

	acquire(Off, "") // one that keeps it in memory
	release(b)
	wants(t, s, alice+bob)
	look(b, "")

	other, end := kept(t, b) // somebody else has been in b
	add(t, other, "p", two, gone())
	end()
	acquire(b, "which is not what they have changed since") // one of the two would be lost
	wants(t, s, alice+bob)
	look(b, "p [2001:db8::2]:2 removed 0 enabled by carol; ")
	if _, err := s.Drop(""); err != nil {
		t.Fatal(err)
	}

	var told []string
	defer s.Watch(func(pool string) { told = append(told, pool) })()
	acquire(b, "") // nothing is wanted: what is there holds
	wants(t, s, "p [2001:db8::2]:2 removed 0 enabled by carol; ")
	release(b) // it failed
	wants(t, s, "")
	if fmt.Sprint(told) != "[p p]" {
		t.Errorf("told of %v", told)
	}
	look(b, "p [2001:db8::2]:2 removed 0 enabled by carol; ")

	acquire(b, "")
	release(Off)
	wants(t, s, "p [2001:db8::2]:2 removed 0 enabled by carol; ")
	release(b)
	wants(t, s, "")
	look(b, "p [2001:db8::2]:2 removed 0 enabled by carol; ")
}

// The child's part of the tests below.
const (
	childVar   = "WAYHOUSE_TEST_INTENT_CHILD"
	childHold  = "hold"  // opens the file and waits for the end of its input
	childAdd   = "write" // adds one backend after the other and says each that is there
	childSmall = "small" // may write no file larger than a page, and says what comes of it
)

func TestChild(t *testing.T) {
	mode, dir, ok := strings.Cut(os.Getenv(childVar), " ")
	if !ok {
		return // it is no child
	}
	if mode == childSmall {
		signal.Ignore(syscall.SIGXFSZ)
		if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &syscall.Rlimit{Cur: 4096, Max: 4096}); err != nil {
			t.Fatal(err)
		}
		fmt.Println("open")
		fmt.Println(memory().Acquire(dir, zap.NewNop()))
		return
	}
	s, end := kept(t, dir)
	fmt.Println("open")
	if mode == childHold {
		bufio.NewReader(os.Stdin).ReadByte()
		end()
		return
	}
	for i := 0; ; i++ {
		addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), uint16(1+os.Getpid()%60000))
		add(t, s, "p", addr, added(1))
		fmt.Println("added", addr)
	}
}

func child(t *testing.T, mode, dir string) (cmd *exec.Cmd, out *bufio.Scanner) {
	t.Helper()
	cmd = exec.Command("/proc/self/exe", "-test.run=^TestChild$")
	cmd.Env = append(os.Environ(), childVar+"="+mode+" "+dir)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close() })
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	out = bufio.NewScanner(stdout)
	if !out.Scan() || out.Text() != "open" {
		t.Fatalf("the child says %q", out.Text())
	}
	return cmd, out
}

func TestTwoProcesses(t *testing.T) {
	dir := t.TempDir()
	cmd, _ := child(t, childHold, dir)
	err := memory().Acquire(dir, zap.NewNop())
	if err == nil || !strings.Contains(err.Error(), "in use by another process") {
		t.Errorf("a file that another process has: %v", err)
	}
	cmd.Process.Kill()
	cmd.Wait()
	_, end := kept(t, dir)
	end()
}

// TestKilled kills a process in the midst of its changes, again and again: what
// it has said to be there is.
func TestKilled(t *testing.T) {
	const seed, kills = 11, 50
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, seed))
	dir := t.TempDir()
	said := make(map[string]bool)
	for range kills {
		cmd, out := child(t, childAdd, dir)
		for range rng.IntN(12) {
			if !out.Scan() {
				break
			}
			if addr, ok := strings.CutPrefix(out.Text(), "added "); ok {
				said[addr] = true
			}
		}
		cmd.Process.Kill()
		for out.Scan() { // what it had said by then
			if addr, ok := strings.CutPrefix(out.Text(), "added "); ok {
				said[addr] = true
			}
		}
		cmd.Wait()
		s, end := kept(t, dir)
		for addr := range said {
			if b := s.Overlay("p")[netip.MustParseAddrPort(addr)]; b.Weight != 1 || b.Added.Actor != "alice" {
				t.Fatalf("%s was added, and there is %+v", addr, b)
			}
		}
		end()
	}
	if len(said) < kills {
		t.Errorf("only %d changes were made", len(said))
	}
}

// TestDamaged opens files that are not as they were. None of them is taken for an
// empty one, and none is changed.
func TestDamaged(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, FileName)
	s, end := kept(t, dir)
	for i := range 120 {
		add(t, s, "p", netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 1), added(1))
	}
	want := tell(s)
	end()
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	page := os.Getpagesize()
	with := func(change func(b []byte) []byte) []byte { return change(append([]byte(nil), good...)) }
	cases := map[string][]byte{
		"no database":        []byte(strings.Repeat("not a database\n", 4000)),
		"cut off":            good[:5*page],
		"cut off in a page":  good[:3*page+100],
		"cut off early":      good[:100],
		"headers of nothing": with(func(b []byte) []byte { clear(b[:2*page]); return b }),
		"pages of nothing":   with(func(b []byte) []byte { clear(b[2*page:]); return b }),
	}
	for name, b := range cases {
		t.Run(name, func(t *testing.T) { refuses(t, dir, b, "is damaged") })
	}
	// A value that has changed is found by its checksum.
	t.Run("bits", func(t *testing.T) {
		found := 0
		for at := 0; ; {
			next := strings.Index(string(good[at:]), `"weight":1`)
			if next < 0 {
				break
			}
			at += next + len(`"weight":`)
			b := append([]byte(nil), good...)
			b[at] = '9'
			if err := os.WriteFile(path, b, 0o600); err != nil {
				t.Fatal(err)
			}
			s := memory()
			if s.Acquire(dir, zap.NewNop()) != nil {
				found++
				continue
			}
			// The page is one that is not used any more.
			if got := tell(s); got != want {
				t.Error("a weight is another one")
			}
			s.Release(dir)
			if err := os.WriteFile(path, good, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if found < 120 {
			t.Errorf("%d changed values of 120 were found", found)
		}
	})
	if err := os.WriteFile(path, good, 0o600); err != nil {
		t.Fatal(err)
	}
	s, end = kept(t, dir)
	wants(t, s, want)
	end()

	t.Run("format", func(t *testing.T) {
		db, err := bbolt.Open(path, 0o600, nil)
		if err != nil {
			t.Fatal(err)
		}
		err = db.Update(func(tx *bbolt.Tx) error { return tx.Bucket(bucketInstance).Put(keyFormat, []byte("2")) })
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		refuses(t, dir, b, `the format "2"`)
	})
}

// refuses expects that a file is not opened, is left as it is and is nobody's
// afterwards.
func refuses(t *testing.T, dir string, b []byte, text string) {
	t.Helper()
	path := filepath.Join(dir, FileName)
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the first attempt has left no lock
		err := memory().Acquire(dir, zap.NewNop())
		if err == nil || !strings.Contains(err.Error(), text) {
			t.Fatalf("opening: %v, want %q", err, text)
		}
	}
	now, err := os.ReadFile(path)
	if err != nil || string(now) != string(b) {
		t.Errorf("the file has changed: %v", err)
	}
}

func TestUnwritable(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{file, "/proc/nowhere"} {
		if err := memory().Acquire(dir, zap.NewNop()); err == nil || !strings.Contains(err.Error(), `"off" to keep nothing`) {
			t.Errorf("%s: %v", dir, err)
		}
	}
}

// TestFullDisk has a child that may write no file larger than a page, which is
// less than a new one needs.
func TestFullDisk(t *testing.T) {
	dir := t.TempDir()
	cmd, out := child(t, childSmall, dir)
	if !out.Scan() || !strings.Contains(out.Text(), `"off" to keep nothing`) || strings.Contains(out.Text(), "damaged") {
		t.Errorf("the child says %q", out.Text())
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	_, end := kept(t, dir) // nothing is left that would be taken for damaged
	end()
}

func FuzzDecode(f *testing.F) {
	for _, v := range []any{added(3), draining(), gone(), Now("x"), savedHint{Pool: "p", Expires: time.Now()}} {
		b, err := encode(v)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
		f.Add(b[4:])
		f.Add(b[:len(b)/2])
	}
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		// The checksum is made right, or nothing behind it would be tried.
		sum := binary.BigEndian.AppendUint32(nil, crc32.ChecksumIEEE(b))
		b = append(sum, b...)
		var be Backend
		if decode(b, &be) == nil && be.check() == nil {
			again, err := encode(be)
			if err != nil {
				return // a year that JSON does not have
			}
			var other Backend
			if err := decode(again, &other); err != nil || !sameTimes(be, other) {
				t.Errorf("%+v comes back as %+v, %v", be, other, err)
			}
			_ = be.State.String()
		}
		var h savedHint
		decode(b, &h)
		splitKey(b)
	})
}

func sameTimes(a, b Backend) bool {
	return a.Weight == b.Weight && a.State == b.State && a.Added.At.Equal(b.Added.At) && a.Removed.At.Equal(b.Removed.At) &&
		a.Since.At.Equal(b.Since.At) && a.Added.Actor == b.Added.Actor
}
