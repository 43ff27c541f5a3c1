"""Waits that allow for a busy machine, and end for events that do not come."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.hostile.daemon import Watch

LATE_S = 1.0
"""Seconds after which a call is named when a wait was in vain."""


class Patience:
    """A waiter; see the module."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.late = 0.0
        """Largest number of seconds by which a sleep was too long."""

    def sleep(self, seconds: float) -> None:
        """Sleep a while."""
        began = time.monotonic()
        time.sleep(seconds)
        self.late = max(self.late, time.monotonic() - began - seconds)

    def until(
        self,
        condition: Callable[[], bool],
        what: str,
        seconds: float,
        sign: Callable[[], object] = lambda: None,
    ) -> None:
        """Wait for a condition, as long as a `sign` of progress changes, and some `seconds` more; then
        AssertionError."""
        give_up, before = time.monotonic() + seconds, sign()
        while not condition():
            if (now := sign()) != before:
                give_up, before = time.monotonic() + seconds, now
                self._watch.goes_on()
            ages = [(name, age()) for name, age in self._watch.ages]  # type: ignore[operator]
            late = [f"{name} for {age:.0f} s" for name, age in ages if age > LATE_S]
            assert time.monotonic() < give_up, f"nothing of it within {seconds} s: {what}; under way: {late}"
            self.sleep(0.005)
