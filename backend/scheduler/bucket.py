"""How often something may be done: a token bucket."""

from __future__ import annotations


class Bucket:
    """Tokens that come back over time. In any second no more than `burst` + `rate` are taken."""

    def __init__(self, rate: float, burst: int) -> None:
        """`rate` tokens a second, and `burst` of them to begin with, which is also the most that there are."""
        self._rate = rate
        self._burst = burst
        self._tokens = float(burst)
        self._at = 0.0

    def take(self, now: float, count: int = 1, *, spared: int = 0) -> bool:
        """Whether there are `count` tokens, besides those to be `spared`, at the time `now`, seconds; they are taken
        then."""
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._at) * self._rate)
        self._at = max(self._at, now)
        if self._tokens < count + spared:
            return False
        self._tokens -= count
        return True
