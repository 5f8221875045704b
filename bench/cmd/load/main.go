// Command load is the load generator and the backend of a benchmark, as
// processes of their own. The harness in ../bench starts them:
//
//	load backend PORT
//	load JOB
//
// A backend says "ready" and serves until its standard input is closed. A job
// (JSON, see load.Job) writes one line of JSON at each point and goes on when
// it can read a line, and writes its result last.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"

	"github.com/wayhouse-proxy/wayhouse/bench/backend"
	"github.com/wayhouse-proxy/wayhouse/bench/load"
)

func main() {
	// One thread, and no collection in the middle of a window: what a job
	// allocates once is small.
	runtime.LockOSThread()
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(1 << 30)
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "load:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 2 && args[0] == "backend":
		port, err := strconv.ParseUint(args[1], 10, 16)
		if err != nil {
			return fmt.Errorf("port: %w", err)
		}
		b, err := backend.Listen(uint16(port))
		if err != nil {
			return err
		}
		defer b.Close()
		fmt.Println("ready")
		return b.Run(int(os.Stdin.Fd()))
	case len(args) == 1:
		var j load.Job
		if err := json.Unmarshal([]byte(args[0]), &j); err != nil {
			return fmt.Errorf("job: %w", err)
		}
		return job(j)
	}
	return fmt.Errorf("usage: load backend PORT | load JOB")
}

func job(j load.Job) error {
	in, out := bufio.NewReader(os.Stdin), json.NewEncoder(os.Stdout)
	res, err := load.Run(j, func(p load.Point) error {
		if err := out.Encode(load.Line{Point: &p}); err != nil {
			return err
		}
		_, err := in.ReadString('\n')
		return err
	})
	if err != nil {
		return err
	}
	return out.Encode(load.Line{Result: res})
}
