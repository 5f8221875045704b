package adminsite

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// door is a way to the API, with the headers that open it.
type door struct {
	name, network, addr string
	headers             []string
}

// open is a raw connection to a door.
func (d door) open(t *testing.T) net.Conn {
	t.Helper()
	c, err := net.Dial(d.network, d.addr)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// head is the head of a request but for the empty line behind it.
func (d door) head(method, target string, headers ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s HTTP/1.1\r\nHost: localhost\r\n", method, target)
	for h := range headerPairs(append(headers, d.headers...)) {
		fmt.Fprintf(&b, "%s: %s\r\n", h[0], h[1])
	}
	return b.String()
}

func headerPairs(list []string) func(func([2]string) bool) {
	return func(yield func([2]string) bool) {
		for i := 0; i+1 < len(list); i += 2 {
			if !yield([2]string{list[i], list[i+1]}) {
				return
			}
		}
	}
}

// outcome is what an attack has met: a status, 0 for a connection that was just
// closed, and how much of it was taken.
type outcome struct {
	status int
	body   string
	sent   int64
}

// attack sends the head and then as much of the body as is taken, and reads the
// answer meanwhile.
func attack(c net.Conn, head string, body io.Reader) outcome {
	defer c.Close()
	c.SetDeadline(time.Now().Add(kit.Long))
	answers := make(chan outcome, 1)
	go func() {
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			answers <- outcome{}
			return
		}
		defer res.Body.Close()
		b, _ := io.ReadAll(io.LimitReader(res.Body, 1<<20))
		answers <- outcome{status: res.StatusCode, body: string(b)}
	}()
	n, err := io.WriteString(c, head)
	sent := int64(n)
	if err == nil && body != nil {
		n, _ := io.Copy(c, body)
		sent += n
	}
	if c, ok := body.(io.Closer); ok {
		c.Close()
	}
	o := <-answers
	o.sent = sent
	return o
}

// endless is a body that begins with some text and goes on with one byte.
func endless(begin string, with byte, size int64) io.Reader {
	return io.MultiReader(strings.NewReader(begin), io.LimitReader(repeat(with), size-int64(len(begin))))
}

type repeat byte

func (r repeat) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = byte(r)
	}
	return len(p), nil
}

// chunks is a reader's text in chunks that have no end.
func chunks(r io.Reader) io.Reader {
	const size = 32 << 10
	pr, pw := io.Pipe()
	go func() {
		buf := make([]byte, size)
		for {
			n, err := io.ReadFull(r, buf)
			if n > 0 {
				if _, err := fmt.Fprintf(pw, "%x\r\n%s\r\n", n, buf[:n]); err != nil {
					return
				}
			}
			if err != nil {
				pw.CloseWithError(err)
				return
			}
		}
	}()
	return pr
}

// peak is the most memory that a process has had.
func peak(t *testing.T, p *kit.Process) int64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.PID()))
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`VmHWM:\s+(\d+) kB`).FindSubmatch(b)
	n, _ := strconv.ParseInt(string(m[1]), 10, 64)
	return n << 10
}

// bodies are the calls that read one, with a beginning that they would go on
// with.
func bodies() map[string][2]string {
	list := make(map[string][2]string)
	for pattern, r := range table {
		for method := range r.calls {
			if method != "POST" && method != "PATCH" {
				continue
			}
			target, begin := r.path, `{"src_ip": "`
			switch pattern {
			case "/admin/sniffers":
				target, begin = target+"?name=x", "\x00asm\x01\x00\x00\x00"
			case "/admin/reload", "/admin/drain", "/admin/undrain", "/admin/sniffers/{name}/rollback":
				continue // these read none
			}
			list[method+" "+target] = [2]string{method + " " + target, begin}
		}
	}
	return list
}

// TestLargeRequests sends bodies and headers of a size that nobody needs, to all
// calls at once and two or more to each: all are refused, and the memory stays.
func TestLargeRequests(t *testing.T) {
	const (
		gigabyte = 1 << 30
		most     = 64 << 20 // that may be taken of one, the kernel's buffers and what is thrown away included
		grows    = 64 << 20
	)
	config, addr := both(t, matrixConfig(t), handler())
	p := kit.Start(t, config, kit.Options{Plain: true})
	doors := []door{
		{"endpoint", "unix", socket(p), nil},
		{"site", "tcp", addr, bearer("admin")},
		{"site without a token", "tcp", addr, nil},
	}
	calls := bodies()
	for _, get := range []string{"GET /pools", "GET /sessions", "GET /healthz", "DELETE /sessions/t-ffffff", "POST /admin/sniffers/nobody/rollback"} {
		calls[get] = [2]string{get} // nobody reads the body
	}
	var bomb bytes.Buffer
	z := gzip.NewWriter(&bomb)
	io.Copy(z, io.LimitReader(repeat(' '), 16<<20))
	z.Close()
	client := newClient(t, "unix", socket(p))
	before := state(client)
	base := peak(t, p)
	attacks := map[string]struct {
		headers []string
		body    func(begin string) io.Reader
	}{
		"1 GiB":             {[]string{"Content-Length", strconv.Itoa(gigabyte)}, func(begin string) io.Reader { return endless(begin, 'a', gigabyte) }},
		"1 GiB of brackets": {[]string{"Content-Length", strconv.Itoa(gigabyte)}, func(string) io.Reader { return endless("", '[', gigabyte) }},
		"endless chunks":    {[]string{"Transfer-Encoding", "chunked"}, func(begin string) io.Reader { return chunks(endless(begin, 'a', gigabyte)) }},
		"endless blanks":    {[]string{"Transfer-Encoding", "chunked"}, func(string) io.Reader { return chunks(endless("", ' ', gigabyte)) }},
		"compressed": {[]string{"Content-Encoding", "gzip", "Content-Length", strconv.Itoa(bomb.Len())},
			func(string) io.Reader { return bytes.NewReader(bomb.Bytes()) }},
	}
	for _, d := range doors {
		for name, a := range attacks {
			var wg sync.WaitGroup
			for key, call := range calls {
				method, target, _ := strings.Cut(call[0], " ")
				for range kit.Scaled(2, 8) {
					c := d.open(t)
					wg.Go(func() {
						o := attack(c, d.head(method, target, a.headers...)+"\r\n", a.body(call[1]))
						ok := true
						switch {
						case o.sent > most:
							ok = false
						case d.name == "site without a token" && target != "/healthz":
							ok = o.status == 401 || o.status == 0
						case name == "compressed":
							ok = o.status == 415
						case call[1] != "":
							ok = o.status == 413 || o.status == 400 || o.status == 0
						default: // the body is of no interest
							ok = o.status == 200 || o.status == 404 || o.status == 0
						}
						if !ok {
							t.Errorf("%s: %s with %s: %d %.200s after %d bytes", d.name, key, name, o.status, o.body, o.sent)
						}
					})
				}
			}
			wg.Wait()
		}
	}
	many := strings.Repeat("X-Filler: 0123456789\r\n", 10000)
	names := new(strings.Builder)
	for i := range 10000 {
		fmt.Fprintf(names, "X-%d: 1\r\n", i)
	}
	for _, d := range doors {
		for name, text := range map[string]string{
			"a header of 1 MiB":  "X-Filler: " + strings.Repeat("a", 1<<20) + "\r\n",
			"a token of 1 MiB":   "Authorization: Bearer " + strings.Repeat("a", 1<<20) + "\r\n",
			"10,000 headers":     many,
			"10,000 names":       names.String(),
			"a path of 1 MiB":    "",
			"a header of 16 MiB": "X-Filler: " + strings.Repeat("a", 16<<20) + "\r\n",
		} {
			target := "/pools"
			if text == "" {
				target += "?x=" + strings.Repeat("a", 1<<20)
			}
			var wg sync.WaitGroup
			for range kit.Scaled(2, 8) {
				c := d.open(t)
				wg.Go(func() {
					if o := attack(c, d.head("GET", target)+text+"\r\n", nil); o.status != http.StatusRequestHeaderFieldsTooLarge && o.status != 0 {
						t.Errorf("%s: %s: %d %.200s, want 431", d.name, name, o.status, o.body)
					}
				})
			}
			wg.Wait()
		}
	}
	if now := peak(t, p); now-base > grows {
		t.Errorf("the process has had %d MiB more than before", (now-base)>>20)
	} else {
		t.Logf("%d MiB more than the %d before", (now-base)>>20, base>>20)
	}
	if after := state(client); after != before {
		t.Errorf("what was refused has changed\n%s\nto\n%s", before, after)
	}
}

// TestSlowBodies begins requests whose bodies never come to an end, one byte at
// a time or not at all. Each is ended, and what others ask is answered meanwhile.
func TestSlowBodies(t *testing.T) {
	t.Parallel() // it waits for most of the time
	config, addr := both(t, matrixConfig(t), handler())
	p := kit.Start(t, config, kit.Options{})
	doors := []door{{"endpoint", "unix", socket(p), nil}, {"site", "tcp", addr, bearer("admin")}}
	var wg sync.WaitGroup
	for _, d := range doors {
		for key, call := range bodies() {
			method, target, _ := strings.Cut(call[0], " ")
			for _, drips := range []bool{false, true} {
				for _, length := range [][]string{{"Content-Length", "1000"}, {"Transfer-Encoding", "chunked"}} {
					c := d.open(t)
					begin := call[1]
					if length[1] == "chunked" {
						begin = fmt.Sprintf("%x\r\n%s\r\n", len(begin), begin)
					}
					wg.Go(func() {
						var more io.Reader = strings.NewReader(begin)
						if drips {
							tick := time.NewTicker(200 * time.Millisecond)
							defer tick.Stop()
							more = io.MultiReader(more, &drip{tick.C, length[1] == "chunked"})
						}
						o := attack(c, d.head(method, target, length...)+"\r\n", more)
						if o.status != 0 && o.status != http.StatusRequestTimeout && o.status != http.StatusServiceUnavailable {
							t.Errorf("%s: %s, slowly (drips %t, %s): %d %s", d.name, key, drips, length[1], o.status, o.body)
						}
					})
				}
			}
		}
	}
	for _, d := range doors {
		c := newClient(t, d.network, d.addr)
		for range 20 {
			if a := c.do("GET", "/pools", d.headers...); a.status != 200 {
				t.Errorf("%s: GET /pools beside slow bodies: %d", d.name, a.status)
			}
		}
	}
	wg.Wait()
}

// drip is a reader that gives a byte with each tick.
type drip struct {
	ticks   <-chan time.Time
	chunked bool
}

func (d *drip) Read(p []byte) (int, error) {
	<-d.ticks
	if d.chunked {
		return copy(p, "1\r\na\r\n"), nil
	}
	return copy(p, "a"), nil
}
