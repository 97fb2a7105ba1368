//go:build !linux

package lockkeeper

import "time"

var started = time.Now()

// now is the time since the program began in microseconds: the larger of what the monotonic and the wall clock say
// has passed, since the first may stand still while the machine is suspended, and the second may be set.
func now() int64 {
	at := time.Now()
	return max(at.Sub(started), at.Round(0).Sub(started.Round(0))).Microseconds()
}
