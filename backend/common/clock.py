"""The clock of this boot, which successive daemons share."""

from __future__ import annotations

import time


def boot_usec() -> int:
    """Return the microseconds since this machine booted, without the time in which it was suspended."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
