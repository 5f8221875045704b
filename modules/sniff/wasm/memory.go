package wasm

import (
	"context"

	"github.com/tetratelabs/wazero/experimental"
	"golang.org/x/sys/unix"
)

// memory is address space for the linear memory of one instance at a time. The
// kernel lends pages as they are touched, growing moves nothing, and what one
// call has written is gone before the next one: fresh memory at the price of
// clearing what was in use.
//
// wazero frees a memory when it closes the instance, and forgets to when the
// deadline has closed it first. So Free does nothing, and who has run the
// instance calls reset after it.
type memory struct {
	buf  []byte // all of the space
	used int    // bytes that the instance could touch

	ctx context.Context // makes instances use this memory
}

func newMemory(size int) (*memory, error) {
	m := new(memory)
	m.ctx = experimental.WithMemoryAllocator(context.Background(), m)
	if size == 0 {
		return m, nil
	}
	var err error
	m.buf, err = unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	return m, err
}

// Allocate implements experimental.MemoryAllocator.
func (m *memory) Allocate(_, _ uint64) experimental.LinearMemory { return m }

// Reallocate gives more of the space, or nil beyond it, upon which memory.grow
// answers -1. For the memory that an instance begins with nil would be a
// panic; that the space is enough for it is checked before.
func (m *memory) Reallocate(size uint64) []byte {
	if size > uint64(len(m.buf)) {
		return nil
	}
	m.used = max(m.used, int(size))
	return m.buf[:size:size]
}

// Free implements experimental.LinearMemory.
func (m *memory) Free() {}

// clearMax is how much is cleared by hand. Beyond it the kernel takes the pages
// back, which costs page faults and an interrupt of the other cores.
const clearMax = 4 << 20

// reset makes all of the memory zero.
func (m *memory) reset() error {
	n := m.used
	m.used = 0
	if n > clearMax {
		return unix.Madvise(m.buf[:n], unix.MADV_DONTNEED)
	}
	clear(m.buf[:n])
	return nil
}

func (m *memory) release() error {
	if m.buf == nil {
		return nil
	}
	return unix.Munmap(m.buf)
}
