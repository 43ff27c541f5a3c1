"""Token bucket: bounds how often something may be done."""

from __future__ import annotations


class Bucket:
    """Tokens that come back over time. At most `burst` + `rate` tokens are taken in any second. A request for more than
    `burst` tokens is granted when the bucket is full; the debt, like tokens that are owed, has to come back before the
    next token is granted.
    """

    def __init__(self, rate: float, burst: int) -> None:
        """`rate` is in tokens a second. `burst` is both the initial and the largest number of tokens."""
        self._rate = rate
        self._burst = burst
        self._tokens = float(burst)
        self._at = 0.0

    def has(self, now: float, count: int = 1, *, spared: int = 0) -> bool:
        """Return whether `count` tokens can be taken at the time `now`, in seconds, with `spared` tokens left over; a
        full bucket always suffices.
        """
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._at) * self._rate)
        self._at = max(self._at, now)
        return self._tokens >= min(self._burst, count + spared)

    def take(self, now: float, count: int = 1, *, spared: int = 0) -> bool:
        """Take `count` tokens if :meth:`has` grants them; return whether it did."""
        if not self.has(now, count, spared=spared):
            return False
        self._tokens -= count
        return True

    def owe(self, now: float, count: int) -> None:
        """Take `count` tokens that were already used, even where the bucket goes into debt."""
        self.has(now, count)
        self._tokens -= count

    def give_back(self, count: int) -> None:
        """Return `count` tokens that were taken and not used."""
        self._tokens = min(self._burst, self._tokens + count)
