package lockkeeper

import "golang.org/x/sys/unix"

// now is the time since boot in microseconds, by a clock that never steps back and runs through suspend, which Go's
// own does not.
func now() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		panic("lockkeeper: Linux 2.6.39 or later is needed: " + err.Error())
	}
	return t.Sec*second + t.Nsec/1000
}
