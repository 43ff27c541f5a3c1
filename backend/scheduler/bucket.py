"""How often something may be done: a token bucket."""

from __future__ import annotations


class Bucket:
    """Tokens that come back over time. In any second no more than `burst` + `rate` are taken. Where more than `burst`
    are at once, or are owed, there are none until these have come back, too."""

    def __init__(self, rate: float, burst: int) -> None:
        """`rate` tokens a second, and `burst` of them to begin with, which is also the most that there are."""
        self._rate = rate
        self._burst = burst
        self._tokens = float(burst)
        self._at = 0.0

    def has(self, now: float, count: int = 1, *, spared: int = 0) -> bool:
        """Whether there are `count` tokens, besides those to be `spared`, at the time `now`, seconds; or all, where
        that is less."""
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._at) * self._rate)
        self._at = max(self._at, now)
        return self._tokens >= min(self._burst, count + spared)

    def take(self, now: float, count: int = 1, *, spared: int = 0) -> bool:
        """Whether there are as many; they are taken then."""
        if not self.has(now, count, spared=spared):
            return False
        self._tokens -= count
        return True

    def owe(self, now: float, count: int) -> None:
        """`count` tokens were used up: they are taken, whether they are there or not."""
        self.has(now, count)
        self._tokens -= count

    def give_back(self, count: int) -> None:
        """`count` tokens that were taken were of no use."""
        self._tokens = min(self._burst, self._tokens + count)
