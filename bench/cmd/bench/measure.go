package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/wayhouse-proxy/wayhouse/bench/load"
	"github.com/wayhouse-proxy/wayhouse/bench/proc"
	"github.com/wayhouse-proxy/wayhouse/bench/proxies"
)

// Figures are what one round of one proxy came to.
type Figures map[string]float64

// harness measures one thing at a time. Every process it starts it ends.
type harness struct {
	dir      string            // for binaries, configurations and logs; removed at the end
	load     string            // the load binary
	bins     map[string]string // by proxy
	genCPU   int
	proxyCPU int
	others   float64 // percent of proxyCPU that others may use in a round
	again    int     // how often a round with more is measured again
}

const (
	stopGrace = 5 * time.Second
	readyIn   = 15 * time.Second
	slack     = 60 * time.Second // what a measurement may take beyond its windows
)

// measure runs one scenario once through one proxy.
func (h *harness) measure(ctx context.Context, s Scenario, p *proxies.Proxy) (f Figures, res load.Result, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, s.Job.Warm+s.Job.Window+time.Duration(s.Job.Bytes/(50<<20))*time.Second+slack, errors.New("took too long"))
	defer cancel()
	dir, err := os.MkdirTemp(h.dir, p.Name+"-")
	if err != nil {
		return nil, res, err
	}
	defer os.RemoveAll(dir)
	ports, err := freePorts(3)
	if err != nil {
		return nil, res, err
	}
	backend, err := h.startBackend(ctx, ports[2])
	if err != nil {
		return nil, res, err
	}
	defer backend.stop()

	params := proxies.Params{
		Dir: dir, TCP: loopback(1, ports[0]).String(), UDP: loopback(1, ports[1]).String(),
	}
	// The backend listens on all addresses. Its datagrams come from the one
	// that the kernel takes toward 127.0.0.1, which is the same.
	params.UDPBackend = loopback(1, ports[2]).String()
	for i := range 4 {
		params.TCPBackends = append(params.TCPBackends, loopback(byte(11+i), ports[2]).String())
	}
	argv, err := p.Prepare(h.bins[p.Name], params)
	if err != nil {
		return nil, res, err
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return nil, res, err
	}
	defer log.Close()
	proxy, err := proc.Start(proc.Command{
		Argv: argv, Dir: dir, CPU: h.proxyCPU, Stdout: log, Stderr: log,
		Env: []string{"HOME=" + dir, "XDG_DATA_HOME=" + dir, "XDG_CONFIG_HOME=" + dir},
	})
	if err != nil {
		return nil, res, err
	}
	defer proxy.Stop(stopGrace)
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w%s", err, tail(log.Name(), filepath.Join(dir, "error.log")))
		}
	}()
	target := loopback(1, ports[0])
	if s.UDP {
		target = loopback(1, ports[1])
	}
	if err := ready(ctx, proxy, s.UDP, target); err != nil {
		return nil, res, err
	}
	return h.offer(ctx, s, proxy, target)
}

// offer runs the scenario's job against a proxy that is ready, and takes the
// proxy's figures at the job's points.
func (h *harness) offer(ctx context.Context, s Scenario, proxy *proc.Proc, target netip.AddrPort) (Figures, load.Result, error) {
	job := s.Job
	job.Target = target
	var began usage
	var held []hold
	f := Figures{}
	res, err := h.run(ctx, job, func(pt load.Point) error {
		switch pt.Name {
		case "start", "end":
			u, err := h.usage(proxy)
			if err != nil {
				return err
			}
			if pt.Name == "end" {
				f[cpu] = (u.proxy - began.proxy).Seconds() // of the window, until it is divided below
				f[busy] = 100 * max(0, (u.all-began.all-(u.proxy-began.proxy)).Seconds()/u.at.Sub(began.at).Seconds())
			}
			began = u
		case "held":
			m, err := settle(ctx, proxy)
			if err != nil {
				return err
			}
			m.n = pt.Held
			held = append(held, m)
		}
		return nil
	})
	if err != nil {
		return nil, res, err
	}
	if v, ok := f[cpu]; ok {
		f[cpu] = s.PerUnit(time.Duration(v*1e9), res)
		f[rate] = s.Rate(res)
		f[p50], f[p99] = float64(res.P50)/1e3, float64(res.P99)/1e3
	}
	if len(held) > 1 {
		a, b := held[0], held[len(held)-1]
		f[rss] = float64(b.rss-a.rss) / 1024 / float64(b.n-a.n)
		f[fds] = float64(b.fds-a.fds) / float64(b.n-a.n)
	}
	f[lost], f[wrong] = float64(res.Lost), float64(res.Bad+res.Duplicates)
	return f, res, nil
}

// usage is what the proxy, and all on its CPU, have used.
type usage struct {
	at         time.Time
	proxy, all time.Duration
}

func (h *harness) usage(p *proc.Proc) (u usage, err error) {
	if u.proxy, err = p.CPU(); err != nil {
		return u, err
	}
	u.at = time.Now()
	u.all, err = proc.CPUBusy(h.proxyCPU)
	return u, err
}

type hold struct {
	n, fds int
	rss    int64
}

// settle waits until the proxy's memory has stopped changing, for at most 6 s,
// and reads it.
func settle(ctx context.Context, p *proc.Proc) (hold, error) {
	var last hold
	for i := range 12 {
		select {
		case <-time.After(500 * time.Millisecond):
		case <-ctx.Done():
			return hold{}, context.Cause(ctx)
		}
		rss, fds, err := p.Memory()
		if err != nil {
			return hold{}, err
		}
		same := fds == last.fds && max(rss-last.rss, last.rss-rss) <= rss/500
		last = hold{fds: fds, rss: rss}
		if i > 1 && same {
			break
		}
	}
	return last, nil
}

// run runs a job in a process of its own and calls at at each of its points.
func (h *harness) run(ctx context.Context, job load.Job, at func(load.Point) error) (res load.Result, err error) {
	arg, err := json.Marshal(job)
	if err != nil {
		return res, err
	}
	c, err := h.startLoad(ctx, string(arg))
	if err != nil {
		return res, err
	}
	defer c.stop()
	for {
		b, err := c.out.ReadBytes('\n')
		if err != nil {
			return res, fmt.Errorf("load generator: %w", c.failed(ctx, err))
		}
		var line load.Line
		if err := json.Unmarshal(b, &line); err != nil {
			return res, fmt.Errorf("load generator says %q: %w", b, err)
		}
		if line.Result != nil {
			return *line.Result, nil
		}
		if line.Point != nil {
			if err := at(*line.Point); err != nil {
				return res, err
			}
		}
		if _, err := c.in.WriteString("\n"); err != nil {
			return res, fmt.Errorf("load generator: %w", err)
		}
	}
}

// child is a process of the load binary, with pipes to it and from it.
type child struct {
	proc   *proc.Proc
	in     *os.File
	r      *os.File
	out    *bufio.Reader
	stderr *strings.Builder // to be read after proc has ended
	unhook func() bool
}

func (h *harness) startLoad(ctx context.Context, args ...string) (*child, error) {
	inR, inW, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	outR, outW, err := os.Pipe()
	if err != nil {
		inR.Close()
		inW.Close()
		return nil, err
	}
	c := &child{in: inW, r: outR, out: bufio.NewReader(outR), stderr: new(strings.Builder)}
	c.proc, err = proc.Start(proc.Command{Argv: append([]string{h.load}, args...), CPU: h.genCPU, Stdin: inR, Stdout: outW, Stderr: c.stderr})
	inR.Close()
	outW.Close()
	if err != nil {
		inW.Close()
		outR.Close()
		return nil, err
	}
	c.unhook = context.AfterFunc(ctx, func() { outR.SetReadDeadline(time.Unix(1, 0)) })
	return c, nil
}

// stop ends the process. A second call does nothing.
func (c *child) stop() {
	c.unhook()
	c.in.Close()
	c.proc.Stop(time.Second)
	c.r.Close()
}

// failed ends the process, which has said something wrong or nothing more, and
// returns err with what it had to say about it.
func (c *child) failed(ctx context.Context, err error) error {
	last, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	c.proc.Wait(last)
	c.stop()
	return fmt.Errorf("%w: %s", errors.Join(err, context.Cause(ctx)), strings.TrimSpace(c.stderr.String()))
}

func (h *harness) startBackend(ctx context.Context, port uint16) (*child, error) {
	c, err := h.startLoad(ctx, "backend", strconv.Itoa(int(port)))
	if err != nil {
		return nil, err
	}
	if line, err := c.out.ReadString('\n'); line != "ready\n" {
		return nil, fmt.Errorf("backend: %w", c.failed(ctx, err))
	}
	return c, nil
}

// ready waits until a byte comes back through the proxy.
func ready(ctx context.Context, p *proc.Proc, udp bool, target netip.AddrPort) error {
	network := "tcp"
	if udp {
		network = "udp"
	}
	var err error
	for end := time.Now().Add(readyIn); time.Now().Before(end); {
		if err = probe(network, target); err == nil {
			return nil
		}
		select {
		case <-p.Done():
			return fmt.Errorf("proxy ended: %w", p.Wait(ctx))
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(50 * time.Millisecond):
		}
	}
	return fmt.Errorf("no answer through the proxy: %w", err)
}

func probe(network string, target netip.AddrPort) error {
	c, err := net.DialTimeout(network, target.String(), time.Second)
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(500 * time.Millisecond))
	if _, err := c.Write([]byte{'e'}); err != nil {
		return err
	}
	_, err = io.ReadFull(c, make([]byte, 1))
	return err
}

func loopback(last byte, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, last}), port)
}

// tail is the end of a proxy's logs, for the error that says it failed.
func tail(names ...string) string {
	var s strings.Builder
	for _, name := range names {
		b, _ := os.ReadFile(name)
		if b = b[max(0, len(b)-600):]; len(b) > 0 {
			fmt.Fprintf(&s, "; its log ends: %s", strings.TrimSpace(string(b)))
		}
	}
	return s.String()
}
