"""What scenarios see of the programs on a GPU and of the systems that share it.

`programs.py` and `systems.py` have the real ones. The tests have others, so that a scenario is run, in virtual time,
before it ever sees a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import attrs


@attrs.frozen
class Part:
    """What a program is for a system."""

    critical: bool = False
    """Latency-critical; else batch."""
    weight: int = 100
    """Of its share, where a system has such a thing."""
    memory: bool = False
    """Whether its memory is to be limited, now or later."""
    limit: str = ""
    """Of its memory from its start on, such as 16G; none where that is empty."""


class Running(Protocol):
    """A program that runs."""

    @property
    def pid(self) -> int: ...


@attrs.frozen
class Served:
    """What came of a burst of requests."""

    latencies: Sequence[float]
    """Seconds from the arrival of each; of one that was given up, how long it had waited by then."""
    given_up: int
    """Requests that had not begun when the time was over."""


class Critical(Running, Protocol):
    """critical.cu"""

    def serve(self, arrivals: Sequence[float], limit: float, watch: Callable[[float], None] | None = None) -> Served:
        """A burst: returns when it is over. What has not begun `limit` seconds after its begin is given up. `watch` is
        told each latency as it comes."""
        ...


class Products(Running, Protocol):
    """products.cu"""

    @property
    def done(self) -> int:
        """Products."""
        ...

    @property
    def created(self) -> float:
        """When its context was made, seconds of the lab's clock."""
        ...

    def work(self, on: bool) -> None:
        """Has it go on, or stand idle; it is idle on return."""
        ...


class Elastic(Running, Protocol):
    """elastic.cu of the tests"""

    @property
    def passes(self) -> int: ...

    @property
    def pass_seconds(self) -> tuple[float, float]:
        """What the last pass over the hot half took, and the last one over everything; 0 before the first."""
        ...

    @property
    def prefetched(self) -> tuple[float, float]:
        """GB/s of a prefetch to the host and back, of unified memory in one part."""
        ...

    def moved(self) -> tuple[float, float]:
        """GB/s to the host and back of what the library has moved so far, by its log. ValueError if it has not."""
        ...


class Stage(Protocol):
    """A system that is at work."""

    def words(self, part: Part) -> list[str]:
        """What stands before the command of a program."""
        ...

    def share(self, programs: Sequence[tuple[Part, Running]]) -> None:
        """Has the system share the GPU among programs that run; it holds on return. Unavailable where it does not."""
        ...

    def present(self, program: Running) -> None:
        """Waits until the system knows a program."""
        ...

    def write(self, program: Running, name: str, value: str) -> None:
        """Writes a control file of a program. Unavailable where there is none."""
        ...

    def report(self, latency: float) -> None:
        """Tells the system what a request of the critical program took, if it wants to know."""
        ...


class System(Protocol):
    """A way to share a GPU."""

    @property
    def name(self) -> str: ...

    def enter(self) -> AbstractContextManager[Stage]:
        """Sets it up. Unavailable where that cannot be."""
        ...


@attrs.frozen
class Shared:
    """What came of a server of bursts and a batch program in one budget of memory."""

    latencies: Sequence[float]
    """Of the server's requests, seconds."""
    throughput: float
    """Pieces of work a second of the batch program, in bursts and pauses."""


class Strangers(Protocol):
    """A look-out for other programs that have the driver open: one that begins or ends has all others wait."""

    def during(self, begin: float, end: float) -> Sequence[object]:
        """Return those that were there at some time of a period that is over, by the lab's clock."""
        ...


class Lab(Protocol):
    """Where programs run."""

    def now(self) -> float:
        """Seconds, of a clock that never goes back."""
        ...

    def sleep(self, seconds: float) -> None: ...

    def critical(self, words: Sequence[str], kind: str) -> AbstractContextManager[Critical]:
        """Started, and ready to serve. `kind` is decode or convolution."""
        ...

    def products(self, words: Sequence[str]) -> AbstractContextManager[Products]:
        """Started, and idle."""
        ...

    def begun(self, words: Sequence[str]) -> AbstractContextManager[Products]:
        """The same as soon as its context is made; what it is to work on is not there yet."""
        ...

    def elastic(self, words: Sequence[str], mib: int, parts: int, *options: str) -> AbstractContextManager[Elastic]:
        """Started, and at work: it has made a pass. Unavailable if it ends before, with its last words; or if it is to
        have more unified memory than half of what the GPU has free."""
        ...

    def copied(self) -> AbstractContextManager[Callable[[], tuple[float, float]]]:
        """copies.cu: a call measures GB/s to pinned memory of the host, and back."""
        ...

    def shared(self, how: str, seed: int) -> Shared:
        """serving.cu and batch.cu of the tests, in a slice with a budget that `how` shares: static, or a policy."""
        ...

    def strangers(self) -> AbstractContextManager[Strangers]:
        """Looked out for while it is entered."""
        ...

    def context_mib(self) -> int:
        """GPU memory that a program needs besides what it allocates."""
        ...
