package tcprelay

import (
	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

// pipe carries spliced bytes of one direction between the two sockets. A
// direction holds one only while there are bytes in it.
type pipe struct{ r, w int32 }

const (
	pipeSize  = 1 << 20 // asked for; the kernel may give less
	maxPipes  = 256     // lent out by a worker at a time
	idlePipes = 16      // kept for the next use
)

// pipePool lends out pipes. When there is none to be had, bytes are copied.
type pipePool struct {
	list   []pipe // by ref
	vacant []ref  // entries of list without a pipe
	idle   []ref  // empty pipes
	lent   int
}

func (pp *pipePool) take() ref {
	if pp.lent >= maxPipes {
		return 0
	}
	if n := len(pp.idle); n > 0 {
		r := pp.idle[n-1]
		pp.idle = pp.idle[:n-1]
		pp.lent++
		return r
	}
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_NONBLOCK|unix.O_CLOEXEC); err != nil {
		return 0
	}
	if !sock.Spare(fds[1]) { // copying does without
		unix.Close(fds[0])
		unix.Close(fds[1])
		return 0
	}
	for size := pipeSize; size > 64<<10; size /= 4 {
		if _, err := unix.FcntlInt(uintptr(fds[1]), unix.F_SETPIPE_SZ, size); err == nil {
			break // beyond pipe-user-pages-soft only small ones are left
		}
	}
	var r ref
	if n := len(pp.vacant); n > 0 {
		r = pp.vacant[n-1]
		pp.vacant = pp.vacant[:n-1]
	} else {
		pp.list = append(pp.list, pipe{})
		r = ref(len(pp.list))
	}
	pp.list[r-1] = pipe{int32(fds[0]), int32(fds[1])}
	pp.lent++
	return r
}

func (pp *pipePool) at(r ref) pipe { return pp.list[r-1] }

// give takes a pipe back. One with bytes in it is closed, so that no
// connection ever finds another's.
func (pp *pipePool) give(r ref, empty bool) {
	pp.lent--
	if empty && len(pp.idle) < idlePipes {
		pp.idle = append(pp.idle, r)
		return
	}
	pp.drop(r)
}

func (pp *pipePool) drop(r ref) {
	p := pp.list[r-1]
	closeFD(p.r)
	closeFD(p.w)
	pp.vacant = append(pp.vacant, r)
}

// trim closes the idle pipes: descriptors are short.
func (pp *pipePool) trim() {
	for _, r := range pp.idle {
		pp.drop(r)
	}
	pp.idle = pp.idle[:0]
}

func (pp *pipePool) close() { pp.trim() }

// spill holds bytes that were read and that the other side did not take: at
// most one buffer for a direction, of the smallest class that fits.
type spill struct {
	data  []byte // what is left
	class int8   // of buf; -1: lent by the caller of Forward
	buf   []byte
}

// Classes of spill buffers, and how many of each are kept.
var spillClass = [...]int{4 << 10, 16 << 10, bufSize}

const idleSpills = 32

type spillPool struct {
	list   []spill
	vacant []ref
	idle   [len(spillClass)][][]byte
}

// put keeps a copy of b.
func (sp *spillPool) put(b []byte) ref {
	k := 0
	for len(b) > spillClass[k] {
		k++
	}
	var buf []byte
	if n := len(sp.idle[k]); n > 0 {
		buf = sp.idle[k][n-1]
		sp.idle[k] = sp.idle[k][:n-1]
	} else {
		buf = make([]byte, spillClass[k])
	}
	return sp.add(spill{data: buf[:copy(buf, b)], class: int8(k), buf: buf})
}

// lend keeps b itself.
func (sp *spillPool) lend(b []byte) ref { return sp.add(spill{data: b, class: -1}) }

func (sp *spillPool) add(s spill) ref {
	if n := len(sp.vacant); n > 0 {
		r := sp.vacant[n-1]
		sp.vacant = sp.vacant[:n-1]
		sp.list[r-1] = s
		return r
	}
	sp.list = append(sp.list, s)
	return ref(len(sp.list))
}

func (sp *spillPool) at(r ref) *spill { return &sp.list[r-1] }

func (sp *spillPool) give(r ref) {
	s := &sp.list[r-1]
	if k := s.class; k >= 0 && len(sp.idle[k]) < idleSpills {
		sp.idle[k] = append(sp.idle[k], s.buf)
	}
	*s = spill{}
	sp.vacant = append(sp.vacant, r)
}
