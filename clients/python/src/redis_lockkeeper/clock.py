"""The clock of all leases: microseconds since boot, never stepping back, running through suspend."""

from __future__ import annotations

import time

_BOOTTIME: int = getattr(time, "CLOCK_BOOTTIME", -1)

if _BOOTTIME >= 0:

    def now() -> int:
        """Microseconds since boot."""
        return time.clock_gettime_ns(_BOOTTIME) // 1000

else:
    _latest, _wall = time.monotonic_ns(), time.time_ns()

    def now() -> int:
        """Microseconds: the larger of what the monotonic and the wall clock say has passed."""
        global _latest, _wall
        wall, monotonic = time.time_ns(), time.monotonic_ns()
        # Asleep, only the wall clock goes on; a wall clock that is set back takes nothing away.
        _latest = max(_latest + wall - _wall, monotonic, _latest)
        _wall = wall
        return _latest // 1000
