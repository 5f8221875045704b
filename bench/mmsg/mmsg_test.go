package mmsg

import (
	"bytes"
	"fmt"
	"net/netip"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// socket binds a UDP socket with IP_PKTINFO on all addresses.
func socket(t *testing.T) (fd int, port uint16) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_PKTINFO, 1); err != nil {
		t.Fatal(err)
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{}); err != nil {
		t.Fatal(err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	return fd, uint16(sa.(*unix.SockaddrInet4).Port)
}

// recv receives n datagrams; on loopback they are there when the send returns.
func recv(t *testing.T, fd, n int) *Batch {
	t.Helper()
	b := New(n+1, 2048)
	if got, errno := b.Recv(fd); got != n || errno != 0 {
		t.Fatalf("received %d, %v, want %d", got, errno, n)
	}
	return b
}

func TestBatchGoesThereAndBack(t *testing.T) {
	const n = 5
	client, clientPort := socket(t)
	server, serverPort := socket(t)
	out := New(n, 2048)
	addr := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{127, 9, 0, byte(1 + i)}) }
	data := func(i int) []byte { return bytes.Repeat([]byte{byte('a' + i)}, i*100) } // an empty one too
	for i := range n {
		copy(out.Buf(i), data(i))
		out.Set(i, len(data(i)), addr(i), netip.AddrPortFrom(addr(100+i), serverPort))
	}
	if sent, errno := out.Send(client, n); sent != n || errno != 0 {
		t.Fatalf("sent %d, %v", sent, errno)
	}
	there := recv(t, server, n)
	for i := range n {
		if there.Local(i) != addr(100+i) || !bytes.Equal(there.Data(i), data(i)) {
			t.Errorf("datagram %d came to %v with %q", i, there.Local(i), there.Data(i))
		}
		from := there.names[i]
		if netip.AddrFrom4(from.Addr) != addr(i) || from.Port != clientPort<<8|clientPort>>8 {
			t.Errorf("datagram %d is from %v, port %#x in network order", i, from.Addr, from.Port)
		}
	}
	there.Echo(n)
	if refused := there.SendAll(server, n); refused != 0 {
		t.Fatalf("%d refused", refused)
	}
	back := recv(t, client, n)
	for i := range n {
		if back.Local(i) != addr(i) || !bytes.Equal(back.Data(i), data(i)) {
			t.Errorf("answer %d came to %v with %q", i, back.Local(i), back.Data(i))
		}
	}
	if got, errno := back.Recv(client); got != 0 || errno != syscall.EAGAIN {
		t.Errorf("received %d, %v where nothing is", got, errno)
	}
}

func TestSendAllSkipsWhatIsRefused(t *testing.T) {
	client, _ := socket(t)
	server, port := socket(t)
	const n = 3
	out := New(n, 16)
	for i := range n {
		copy(out.Buf(i), fmt.Sprint(i))
		local := netip.AddrFrom4([4]byte{127, 9, 0, 1})
		if i == 1 {
			local = netip.AddrFrom4([4]byte{192, 0, 2, 1}) // not ours
		}
		out.Set(i, 1, local, netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port))
	}
	if refused := out.SendAll(client, n); refused != 1 {
		t.Errorf("%d refused, want 1", refused)
	}
	in := recv(t, server, n-1)
	if string(in.Data(0))+string(in.Data(1)) != "02" {
		t.Errorf("received %q and %q, want 0 and 2", in.Data(0), in.Data(1))
	}
}
