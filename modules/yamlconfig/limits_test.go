package yamlconfig_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
)

// heavy are documents that would cost much if they were let.
func heavy() map[string]string {
	bomb := "schema_version: 1\npools: &a [{name: x}, {name: x}]\n"
	for c := 'b'; c < 'k'; c++ {
		bomb += fmt.Sprintf("%c: &%c [*%c, *%c, *%c, *%c, *%c, *%c, *%c, *%c]\n", c, c, c-1, c-1, c-1, c-1, c-1, c-1, c-1, c-1)
	}
	route := "{match: {type: always}, action: {pool: lobby}}"
	routes := "[&r " + route + strings.Repeat(", *r", 20000) + "]"
	listener := "{name: a, bind: '0.0.0.0:1', protocol: tcp, routes: &rs " + routes + "}"
	return map[string]string{
		"an alias bomb":         bomb,
		"aliases of lists":      "listeners: [&l " + listener + strings.Repeat(", *l", 40000) + "]\n",
		"an alias of itself":    "pools: &a [*a]\n",
		"a deep list":           "pools: " + strings.Repeat("[", 100000),
		"a deep closed list":    "pools: " + strings.Repeat("[", 5000) + strings.Repeat("]", 5000),
		"a deep mapping":        "pools: " + strings.Repeat("{a: ", 5000) + strings.Repeat("}", 5000),
		"a deep block":          "pools:\n" + strings.Repeat("- ", 50000) + "a",
		"many empty lists":      "pools: [" + strings.Repeat("[],", 340000) + "]",
		"too long":              small + "#" + strings.Repeat("x", 1<<20),
		"nothing but marks":     strings.Repeat("?:", 1<<19),
		"a NUL":                 small + "\x00",
		"not UTF-8":             small + "# \xff",
		"UTF-16":                "\xff\xfep\x00o\x00",
		"nothing":               "",
		"a comment":             "# nothing\n",
		"a string":              "hello",
		"a list":                "- a",
		"null":                  "~",
		"a key that is a list":  "[a]: b",
		"an alias of no anchor": "pools: *a",
		"a long key":            strings.Repeat("k", 1<<19) + ": 1",
		"a long string":         "pools: " + strings.Repeat("k", 1<<19),
		"many unknown fields": strings.Repeat("a%[1]d: 1\n", 3) + func() (s string) {
			var b strings.Builder
			for i := range 60000 {
				fmt.Fprintf(&b, "k%d: 1\n", i)
			}
			return b.String()
		}(),
		"many mistakes": "pools: [" + strings.Repeat("{},", 40000) + "]",
	}
}

// The allocations of one document, in bytes. Its limit is about what a document
// of the longest list holds at a time, and not what is garbage soon.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

func TestHeavyDocuments(t *testing.T) {
	for name, doc := range heavy() {
		t.Run(name, func(t *testing.T) {
			var err error
			n := allocated(func() { _, _, err = adapt(doc) })
			if err == nil {
				t.Error("was accepted")
			}
			if n > 128<<20 {
				t.Errorf("allocated %d MiB", n>>20)
			}
			if err != nil && len(err.Error()) > 64<<10 {
				t.Errorf("an error of %d bytes", len(err.Error()))
			}
		})
	}
}

// longest is a document of almost 1 MiB that is in order.
func longest() string {
	var b strings.Builder
	b.WriteString(small + "    deny:\n")
	for i := 0; b.Len() < 1<<20-32; i++ {
		fmt.Fprintf(&b, "    - %d.%d.%d.0/24\n", 1+i>>16, i>>8&255, i&255)
	}
	return b.String()
}

func TestLongestDocument(t *testing.T) {
	doc := longest()
	var out []byte
	var err error
	n := allocated(func() { out, _, err = adapt(doc) })
	if err != nil || bytes.Count(out, []byte("/24")) != strings.Count(doc, "/24") {
		t.Fatalf("%v, %d networks", err, bytes.Count(out, []byte("/24")))
	}
	if n > 128<<20 {
		t.Errorf("allocated %d MiB", n>>20)
	}
}

func BenchmarkLongest(b *testing.B) {
	doc := longest()
	b.ReportAllocs()
	for b.Loop() {
		if _, _, err := adapt(doc); err != nil {
			b.Fatal(err)
		}
	}
}

// TestMutants takes lines out of the scenario, doubles and swaps them, and puts
// values of others in: what is accepted loads.
func TestMutants(t *testing.T) {
	const seed = 20
	rnd := rand.New(rand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)
	lines := strings.Split(strings.TrimSuffix(scenario(t), "\n"), "\n")
	accepted := 0
	n := 1500
	if testing.Short() {
		n = 200
	}
	for range n {
		mutant := append([]string(nil), lines...)
		for range 1 + rnd.IntN(2) {
			i, j := rnd.IntN(len(mutant)), rnd.IntN(len(mutant))
			switch rnd.IntN(5) {
			case 0:
				mutant = append(mutant[:i], mutant[i+1:]...)
			case 1:
				mutant = append(mutant[:i], append([]string{mutant[j]}, mutant[i:]...)...)
			case 2:
				mutant[i], mutant[j] = mutant[j], mutant[i]
			case 3: // another value
				key, _, ok := strings.Cut(mutant[i], ": ")
				if _, other, ok2 := strings.Cut(mutant[j], ": "); ok && ok2 {
					mutant[i] = key + ": " + other
				}
			case 4: // an odd value
				if key, _, ok := strings.Cut(mutant[i], ": "); ok {
					odd := []string{"0", "-1", "1", "''", "null", "[]", "{}", "true", "65536", "9999999999", "x", "'{a}'", "1.5", "'[::]:0'", "0.0.0.0/0"}
					mutant[i] = key + ": " + odd[rnd.IntN(len(odd))]
				}
			}
		}
		doc := strings.Join(mutant, "\n")
		out, _, err := adapt(doc)
		if err != nil {
			continue
		}
		accepted++
		if err := validate(out); err != nil && !strings.Contains(err.Error(), "there is no /var/run/secrets/") { // of pods
			t.Errorf("accepted, and does not load: %v\n%s", err, doc)
		}
	}
	if accepted < n/100 {
		t.Errorf("only %d of %d were accepted: nothing is tested", accepted, n)
	}
	t.Logf("%d of %d were accepted", accepted, n)
}

// FuzzAdapt: whatever a document is, the adapter ends, and what it accepts is
// JSON that is the same the second time.
func FuzzAdapt(f *testing.F) {
	f.Add([]byte(scenario(f)))
	f.Add([]byte(small))
	for _, doc := range heavy() {
		if len(doc) < 1000 {
			f.Add([]byte(doc))
		}
	}
	f.Fuzz(func(t *testing.T, doc []byte) {
		out, _, err := adapt(string(doc))
		if err != nil {
			return
		}
		again, _, err := adapt(string(doc))
		if err != nil || !bytes.Equal(out, again) {
			t.Errorf("%v, %s and %s", err, out, again)
		}
		tidy(t, out)
	})
}
