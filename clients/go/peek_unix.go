//go:build unix

package lockkeeper

import "syscall"

func nothingToRead(socket syscall.RawConn) bool {
	nothing := false
	err := socket.Control(func(fd uintptr) {
		var peeked [1]byte
		_, _, err := syscall.Recvfrom(int(fd), peeked[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		nothing = err == syscall.EAGAIN || err == syscall.EWOULDBLOCK
	})
	return err == nil && nothing
}
