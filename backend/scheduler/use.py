"""What is remembered of the use that processes make of a GPU: which want it, and which have enough to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from backend.process.identity import Process
from backend.scheduler.brief import Brief

ACTIVE_US = 2_000_000
"""Microseconds without use after which a process does not share: its part is for the others until it comes."""
LIGHT_US = 10_000_000
"""Microseconds of that for a process that was seen to use less than its part, which is for its siblings anyhow."""
HUNGRY_US = 400_000
"""Microseconds without use after which a process that could has nothing to do: the trace of a real GPU is 0.2 s
late."""
LEAD_US = 5_000_000
"""Microseconds without use after which those of worse priority share as if a process were not there."""


STOOD_US = 2_000_000
"""Microseconds after a process stood for its quota in which it is taken to do so again: periods are 1 s at most."""
WORD_US = 1_000_000
"""Microseconds without use after which a process that could is not believed any more that it has work that waits: the
word is its own. (One whose turn comes at all has had it by then: rounds take a quarter of that, and the trace is 0.2 s
late.)"""


@attrs.frozen
class Sample:
    """What one process did in a window of time."""

    used_us: int | None = None
    """Microseconds on the engine; None where the machine cannot tell."""
    waiting: bool | None = None
    """Whether it has work at the end of the window that is not done, by its own word; None where it does not say."""
    contexts: int = 1
    """What its timeslice is split over."""
    stays: int | None = None
    """Times that it came onto the engine in place of another; None where the machine cannot tell."""
    drains: bool = False
    """Whether its turn was over, and it was on the runlist to drain, or has just been."""
    stands: bool = False
    """Whether it stands at the end of the window, as its quota is used up: it has nothing to do until the next period,
    and shows nothing by that."""
    held_launches: int | None = None
    """Launches of a program that is held in the busy periods of all those that go before it; None of another."""
    busy_periods: int | None = None
    """How often it had others held that were not before; None of one that none goes behind."""
    stood: bool = False
    """Whether it did so at any time of the window."""
    quota_us: int | None = None
    """Quota that this process alone has at once, microseconds; None where it has none of its own."""


class Use:
    """All processes of one GPU."""

    def __init__(self) -> None:
        self._idle: dict[Process, int] = {}  # microseconds on the runlist without any use, up to now
        self._word: dict[Process, int] = {}  # ... for which it said that it had work, on and off since it last worked
        self._off: set[Process] = set()
        self._brief = Brief()
        self._stood: dict[Process, int] = {}  # microseconds since it stood for its quota; of those that did of late
        self.samples: Mapping[Process, Sample] = {}
        """Of the last window."""

    def observe(self, window_us: int, contenders: Iterable[Process], samples: Mapping[Process, Sample]) -> None:
        """A window has passed. A process that is new wants the GPU until it has shown otherwise, and so does one that
        is off the runlist, since it cannot show it."""
        self.samples = samples
        self._brief.observe(samples)
        idle: dict[Process, int] = {}
        word: dict[Process, int] = {}
        for process in contenders:
            sample = samples.get(process, Sample())
            is_kept = process in self._off or sample.stands
            unused = sample.used_us == 0 and process in self._idle and not is_kept
            if unused and sample.waiting:
                word[process] = self._word.get(process, 0) + window_us
            elif unused or (is_kept and process in self._word and not sample.used_us):
                word[process] = self._word.get(process, 0)  # turns that come and go are no new word
            counts = unused and (not sample.waiting or word[process] > WORD_US)
            if counts:
                idle[process] = self._idle[process] + window_us
            else:  # what it showed before it was taken off goes on to count
                idle[process] = self._idle.get(process, 0) if is_kept and not sample.used_us else 0
        self._idle, self._word = idle, word
        since = {process: us + window_us for process, us in self._stood.items() if us < STOOD_US and process in samples}
        self._stood = since | {process: 0 for process, sample in samples.items() if sample.stood or sample.stands}

    def placed(self, off: Iterable[Process]) -> None:
        """The processes that are off the runlist from now on."""
        self._off = set(off)

    def wants(self, process: Process, within_us: int) -> bool:
        """Whether a process has used the GPU, or could not, in the last `within_us` microseconds."""
        return self._idle.get(process, 0) < within_us

    def stands(self, process: Process) -> bool:
        """Whether a process stands until its quota lets it work."""
        return self.samples.get(process, Sample()).stands

    def is_limited(self, process: Process) -> bool:
        """Whether a process stood until its quota let it work, of late: that it uses little, and leaves the engine
        before its slice is over, says nothing of what it wants."""
        return process in self._stood

    def quota_us(self, process: Process) -> int | None:
        """Return the quota that a process which stands for it now and then has at once, microseconds; None of
        others."""
        return self.samples.get(process, Sample()).quota_us if self.is_limited(process) else None

    def contexts(self, process: Process) -> int:
        """What its timeslice is split over, at least 1."""
        return max(1, self.samples.get(process, Sample()).contexts)

    def is_brief(self, process: Process) -> bool:
        """Whether a process is held in the busy periods of all that go before it, as far as it shows, and what it
        launches is brief."""
        return self._brief.has(process)

    def stays(self, process: Process) -> int | None:
        """Times that it came onto the engine in the last window; None where the machine cannot tell."""
        return self.samples.get(process, Sample()).stays

    def drains(self, process: Process) -> bool:
        """Whether its turn was over in the last window, and it was on the runlist all the same."""
        return self.samples.get(process, Sample()).drains

    def used(self, process: Process) -> int | None:
        """Microseconds in the last window; None where the machine cannot tell."""
        return self.samples.get(process, Sample()).used_us
