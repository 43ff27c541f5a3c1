"""The clock of this boot, which one daemon after the other goes by."""

from __future__ import annotations

import time


def boot_usec() -> int:
    """Return the time since this machine booted, in microseconds, but for the time in which it was suspended."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
