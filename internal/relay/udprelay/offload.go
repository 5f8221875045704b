package udprelay

import (
	"encoding/binary"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

// offload says which of the kernel's segmentation offloads work here.
type offload struct {
	gso, gro bool
}

// offloadEnv switches both off when it is set to "off".
const offloadEnv = "WAYHOUSE_UDP_OFFLOAD"

// probeOffload tries them out on loopback, once a process.
var probeOffload = sync.OnceValue(func() offload {
	if os.Getenv(offloadEnv) == "off" {
		return offload{}
	}
	return tryOffload()
})

// tryOffload sends one buffer as two datagrams of 100 and 50 bytes and looks
// how they arrive: as one buffer (both work) or as two (only sending does).
func tryOffload() (o offload) {
	const seg, size = 100, 150
	in, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return o
	}
	defer unix.Close(in)
	if unix.Bind(in, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}) != nil {
		return o
	}
	addr, err := sock.LocalAddr(in)
	if err != nil {
		return o
	}
	gro := unix.SetsockoptInt(in, unix.SOL_UDP, unix.UDP_GRO, 1) == nil
	out, errno := sock.DialUDP(addr, addr.Addr())
	if errno != 0 {
		return o
	}
	defer unix.Close(out)

	var c control
	n := c.put(0, unix.SOL_UDP, unix.UDP_SEGMENT, binary.NativeEndian.AppendUint16(nil, seg))
	if _, err := unix.SendmsgN(out, make([]byte, size), c.bytes()[:n], nil, 0); err != nil {
		return o
	}
	buf, oob := make([]byte, 2*size), make([]byte, 64)
	for until := time.Now().Add(100 * time.Millisecond); time.Now().Before(until); {
		fds := []unix.PollFd{{Fd: int32(in), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, 100); err != nil && err != unix.EINTR {
			return o
		}
		n, oobn, _, _, err := unix.Recvmsg(in, buf, oob, 0)
		if err != nil {
			continue
		}
		o.gso = n == seg || n == size
		o.gro = gro && n == size && oobn > 0
		return o
	}
	return o
}

// Offload reports which of the kernel's segmentation offloads work here.
func Offload() (gso, gro bool) {
	o := probeOffload()
	return o.gso, o.gro
}
