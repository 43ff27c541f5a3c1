"""Waits for what a busy machine may be slow to do, and not for what does not come."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.hostile.daemon import Watch

LATE_S = 1.0
"""Calls that take longer are named where something was waited for in vain."""


class Patience:
    """See the module."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.late = 0.0
        """By how many seconds a sleep was too long, at most."""

    def sleep(self, seconds: float) -> None:
        """A while."""
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
        """Returns once it is so. It is waited for as long as a `sign` of what is done changes, and for some `seconds`
        more; AssertionError."""
        give_up, before = time.monotonic() + seconds, sign()
        while not condition():
            if (now := sign()) != before:
                give_up, before = time.monotonic() + seconds, now
                self._watch.goes_on()
            ages = [(name, age()) for name, age in self._watch.ages]  # type: ignore[operator]
            late = [f"{name} for {age:.0f} s" for name, age in ages if age > LATE_S]
            assert time.monotonic() < give_up, f"nothing of it within {seconds} s: {what}; under way: {late}"
            self.sleep(0.005)
