"""How parts of a GPU are brought about on hardware that knows timeslices and a runlist only.

The runlist is a round: each channel group (TSG) that has work runs for its timeslice at most, then the next one, and
every switch costs 0.2 ms of the engine, however long the slices are (measured on an H200, docs/nvidia.md). So:

- Those who share have slices in the proportion of their parts, in a round that is long where everybody has enough to
  do, and short where somebody comes and goes.
- What they really used is charged (Ghost, section 4.3: credits), since a program of four contexts switches four times
  and one that stops early leaves its slice: slices follow what was measured, not what was asked.
- Who is to fill what others leave has the shortest slice, beside long ones of theirs: he is off the engine as soon as
  they want it, and back in the same instant that they do not. Only one of those is on the runlist at a time: two would
  switch among themselves every slice, and keep who comes waiting for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from backend.identity import Process
from backend.scheduler.shares import Contender, strata

ROUND_US = 60_000
"""A round of those who have always something to do: three lose 1 % of it to switches."""
SHORT_ROUND_US = 8_000
"""A round in which somebody comes and goes: he waits for so long at most."""
LEADER_US = 50_000
"""The least that those have together who go before others: nothing they do in one go is interrupted for a filler."""
FILLER_US = 50
"""The slice of who fills what is left."""
TURN_US = 250_000
"""For how long one filler is on the runlist before the next one is."""
IDLE_US = 2_000_000
"""Who used nothing for so long is out of the round: those behind it share as if it were not there."""
TRICKLE = 0.01
"""The part of the fillers' time that those behind the first of them have in any case: nobody starves."""
BOUND = 4.0
"""Slices are at most this many times longer, or shorter, than parts say."""
HORIZON_US = 1_000_000
"""Over which what somebody had too little or too much is given back."""
SOME = 0.5
"""Who uses less than this of its part comes and goes."""


@attrs.frozen
class Place:
    """What a process is to have now."""

    timeslice_us: int
    """Longest run in a round, over all its TSGs, microseconds; 0 the driver's default."""
    off: bool = False
    """Off the runlist."""


@attrs.define
class Account:
    """What is remembered of one process."""

    credit: float = 0.0
    """Microseconds that it is owed; negative for what it had too much."""
    used_at: int = 0
    """When it was last seen to use the GPU, microseconds."""
    filled: float = 0.0
    """Microseconds that it was the filler, by its part."""
    share: float = 0.0
    """The share of the last window that it used."""


class Core:
    """The scheduler of one GPU, without a clock and without a GPU."""

    def __init__(self) -> None:
        self._accounts: dict[Process, Account] = {}
        self._filler: Process | None = None
        self._turn_ends = 0

    def decide(self, now_us: int, window_us: int, contenders: Sequence[Contender], used: Mapping[Process, int]) -> Mapping[Process, Place]:
        """Places of all contenders from now on. `used` are the microseconds that each was on the engine in the window
        that ends now; `active` of a contender is not looked at."""
        self._forget(contenders)
        for process, us in used.items():
            account = self._accounts.setdefault(process, Account(used_at=now_us))
            if us > 0:
                account.used_at = now_us
            account.share = us / window_us if window_us else 0.0
        if len(contenders) < 2:
            return {one.process: Place(0) for one in contenders}
        seen = [attrs.evolve(one, active=self._wants(one.process, now_us)) for one in contenders]
        layers = list(strata(seen))
        lead = next((n for n, layer in enumerate(layers) if any(self._wants(p, now_us) for p in layer)), 0)
        places: dict[Process, Place] = {}
        fillers: list[Mapping[Process, float]] = []
        for n, layer in enumerate(layers):
            if n <= lead:
                places.update(self._share(layer, now_us, used, alone=n == len(layers) - 1))
            else:
                fillers.append(layer)
        if fillers:
            places.update(self._fill(fillers, now_us, window_us))
        return places

    def _forget(self, contenders: Sequence[Contender]) -> None:
        there = {one.process for one in contenders}
        for process in self._accounts.keys() - there:
            del self._accounts[process]
        if self._filler not in there:
            self._filler = None

    def _wants(self, process: Process, now_us: int) -> bool:
        """Somebody who is kept off the runlist cannot show it."""
        return now_us - self._account(process, now_us).used_at < IDLE_US

    def _account(self, process: Process, now_us: int) -> Account:
        return self._accounts.setdefault(process, Account(used_at=now_us))

    def _share(self, layer: Mapping[Process, float], now_us: int, used: Mapping[Process, int], *, alone: bool) -> Mapping[Process, Place]:
        """Slices of those who share: in the proportion of their parts, and of what they are owed."""
        total = sum(used.get(process, 0) for process in layer if self._wants(process, now_us))
        whole = 0.0
        for process, part in layer.items():
            account = self._account(process, now_us)
            if not self._wants(process, now_us):
                account.credit = 0.0
                continue
            limit = part * HORIZON_US
            account.credit = max(-limit, min(limit, account.credit + part * total - used.get(process, 0)))
            whole += part
        busy = sum(self._account(process, now_us).share for process in layer)
        lively = any(
            self._wants(process, now_us) and 0 < self._account(process, now_us).share < SOME * part * busy
            for process, part in layer.items()
        )
        length = SHORT_ROUND_US if lively else ROUND_US
        if not alone:
            length = max(length, LEADER_US)
        places = {}
        for process, part in layer.items():
            owed = 1 + self._account(process, now_us).credit / (part * HORIZON_US) * (BOUND - 1)
            factor = max(1 / BOUND, owed if owed >= 1 else 1 / (2 - owed))
            places[process] = Place(max(FILLER_US, round(length * part * factor)))
        return places

    def _fill(self, layers: Sequence[Mapping[Process, float]], now_us: int, window_us: int) -> Mapping[Process, Place]:
        """One of those who fill is on the runlist, the others wait for their turn."""
        parts = {process: (n, part) for n, layer in enumerate(layers) for process, part in layer.items()}
        if self._filler in parts:
            account = self._account(self._filler, now_us)
            account.filled += window_us / parts[self._filler][1]
        if self._filler not in parts or now_us >= self._turn_ends or not self._busy(self._filler):
            self._filler = self._next(parts, now_us)
            self._turn_ends = now_us + TURN_US
        for process in parts:
            if process != self._filler:
                self._account(process, now_us).used_at = now_us  # it may want to
        return {process: Place(FILLER_US, off=process != self._filler) for process in parts}

    def _busy(self, process: Process) -> bool:
        return self._accounts[process].share > 0

    def _next(self, parts: Mapping[Process, tuple[int, float]], now_us: int) -> Process:
        """Whoever of the best layer had the least; of the ones behind it when they had less than a trickle."""
        total = sum(self._account(process, now_us).filled * part for process, (_, part) in parts.items())
        behind = [process for process, (n, _) in parts.items() if n > 0]
        given = sum(self._account(process, now_us).filled * parts[process][1] for process in behind)
        best = [process for process, (n, _) in parts.items() if n == 0]
        choice = behind if behind and given < TRICKLE * total else best
        return min(choice, key=lambda process: self._account(process, now_us).filled)
