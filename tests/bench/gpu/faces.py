"""Interfaces through which scenarios see the programs on a GPU and the systems that share it.

`programs.py` and `systems.py` have the real implementations. The tests have others, so that a scenario is run in
virtual time before it is ever run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import attrs


@attrs.frozen
class Part:
    """Role of a program in a system."""

    critical: bool = False
    """Whether the program is latency-critical; otherwise it is a batch program."""
    weight: int = 100
    """Weight of its share, in a system that has weights."""
    memory: bool = False
    """Whether its memory is to be limited, now or later."""
    limit: str = ""
    """Limit of its memory from the start, such as 16G; empty for none."""


class Running(Protocol):
    """A running program."""

    @property
    def pid(self) -> int: ...


@attrs.frozen
class Served:
    """Result of a burst of requests."""

    latencies: Sequence[float]
    """Seconds from the arrival of each request to its end, or to the moment at which it was given up."""
    given_up: int
    """Number of requests that had not begun at the time limit."""


class Critical(Running, Protocol):
    """A running critical.cu."""

    def serve(self, arrivals: Sequence[float], limit: float, watch: Callable[[float], None] | None = None) -> Served:
        """Serve a burst; return when it is over. Requests that have not begun `limit` seconds after its beginning are
        given up. `watch` is called with each latency as it is measured.
        """
        ...


class Products(Running, Protocol):
    """A running products.cu."""

    @property
    def done(self) -> int:
        """Return the number of finished products."""
        ...

    @property
    def created(self) -> float:
        """Return when its context was made, in seconds of the lab's clock."""
        ...

    def work(self, on: bool) -> None:
        """Let the program work, or stop it; on return it is idle in that case."""
        ...


class Elastic(Running, Protocol):
    """A running elastic.cu of the tests."""

    @property
    def passes(self) -> int: ...

    @property
    def pass_seconds(self) -> tuple[float, float]:
        """Return the duration of the last pass over the hot half and of the last pass over everything; 0 before the
        first.
        """
        ...

    @property
    def prefetched(self) -> tuple[float, float]:
        """Return the GB/s of a prefetch to the host and of one back, of unified memory in one part."""
        ...

    def moved(self) -> tuple[float, float]:
        """Return the GB/s to the host and back of the library's moves so far, by its log. ValueError if there were
        none.
        """
        ...


class Stage(Protocol):
    """A system at work."""

    def words(self, part: Part) -> list[str]:
        """Return the words before the command of a program."""
        ...

    def share(self, programs: Sequence[tuple[Part, Running]]) -> None:
        """Let the system share the GPU among running programs; the sharing holds on return. Unavailable if it does
        not.
        """
        ...

    def present(self, program: Running) -> None:
        """Return once the system knows a program."""
        ...

    def write(self, program: Running, name: str, value: str) -> None:
        """Write a control file of a program. Unavailable if there is none."""
        ...

    def report(self, latency: float) -> None:
        """Report the latency of a request of the critical program to the system."""
        ...


class System(Protocol):
    """A way to share a GPU."""

    @property
    def name(self) -> str: ...

    def enter(self) -> AbstractContextManager[Stage]:
        """Set up the system. Unavailable if that is impossible."""
        ...


@attrs.frozen
class Shared:
    """Result of a server of bursts and a batch program within one budget of memory."""

    latencies: Sequence[float]
    """Latencies of the server's requests, seconds."""
    throughput: float
    """Pieces of work of the batch program per second, over bursts and pauses."""


@attrs.frozen
class Job:
    """A program that goes over all of its memory again and again."""

    kind: str
    """Kind: decode (decode.cu), one of science.cu's, or a model of torchvision (vision.py)."""
    mib: int
    """Memory that it holds besides its context, MiB; approximate for a model."""
    graph: bool = False
    """Whether a step is one CUDA graph; for decode."""


@attrs.frozen
class Carried:
    """Bytes that the library of a program moved for turns, by its log, and the time that took."""

    out_bytes: int = 0
    """Bytes moved to the host, written or not."""
    clean_bytes: int = 0
    """Bytes of these that were not written since the host had them."""
    out_s: float = 0.0
    """Time of these moves, seconds."""
    in_bytes: int = 0
    """Bytes moved to the GPU before turns."""
    in_s: float = 0.0
    """Time of these moves, seconds."""

    def __sub__(self, other: Carried) -> Carried:
        return Carried(*(one - another for one, another in zip(attrs.astuple(self), attrs.astuple(other), strict=True)))

    def __add__(self, other: Carried) -> Carried:
        return Carried(*(one + another for one, another in zip(attrs.astuple(self), attrs.astuple(other), strict=True)))


class Worked(Running, Protocol):
    """A running program that does a job."""

    @property
    def passes(self) -> int:
        """Return the number of passes over all of its memory. Unavailable once it has ended."""
        ...

    def carried(self) -> Carried:
        """Return what was moved so far; zero without the library."""
        ...

    def finish(self) -> None:
        """Stop the program. RuntimeError if its results are wrong."""
        ...


class Room(Protocol):
    """A slice for programs; or none, and then they have all of the GPU and there are no control files."""

    def words(self, *properties: str) -> list[str]:
        """Return the words before the command of a program that gets these properties (compute.priority=0)."""
        ...

    def held(self) -> int:
        """Return the bytes that the programs have on the GPU, including contexts. Unavailable without a slice."""
        ...

    def limit(self, nbytes: int | None) -> None:
        """Limit the memory of the programs together; None removes the limit. The limit holds on return."""
        ...

    def wait(self, seconds: float) -> None:
        """Set the longest wait of a program for its turn, seconds."""
        ...

    def figures(self) -> Mapping[str, int]:
        """Return the figures in gmem.stat and gcgroup.stat of the slice."""
        ...


class Rooms(Protocol):
    """A way to share memory, by turns or without them."""

    @property
    def name(self) -> str: ...

    def enter(self) -> AbstractContextManager[Room]:
        """Set up the system. Unavailable if that is impossible."""
        ...


class Strangers(Protocol):
    """Record of the programs outside the benchmark that have the driver open. When such a program begins or ends, all
    other programs wait.
    """

    def during(self, begin: float, end: float) -> Sequence[object]:
        """Return the strangers that were present at any time between `begin` and `end`, which is past, by the lab's
        clock.
        """
        ...


class Lab(Protocol):
    """The machine on which programs run."""

    def now(self) -> float:
        """Return the seconds of a monotonic clock."""
        ...

    def sleep(self, seconds: float) -> None: ...

    def critical(self, words: Sequence[str], kind: str) -> AbstractContextManager[Critical]:
        """Start critical.cu, and wait until it can serve. `kind` is decode or convolution."""
        ...

    def products(self, words: Sequence[str]) -> AbstractContextManager[Products]:
        """Start products.cu, and wait until it is idle."""
        ...

    def begun(self, words: Sequence[str]) -> AbstractContextManager[Products]:
        """Start products.cu, and wait only until its context is made; its data is not there yet."""
        ...

    def elastic(self, words: Sequence[str], mib: int, parts: int, *options: str) -> AbstractContextManager[Elastic]:
        """Start elastic.cu, and wait for its first pass. Unavailable if it ends before, with its last words; or if it
        requests more unified memory than half of the free memory of the GPU.
        """
        ...

    def copied(self) -> AbstractContextManager[Callable[[], tuple[float, float]]]:
        """Start copies.cu: a call returns the GB/s to pinned memory of the host, and back."""
        ...

    def both_ways(self) -> tuple[float, float]:
        """Return the GB/s out and in while both directions are busy."""
        ...

    def shared(self, how: str, seed: int) -> Shared:
        """Run serving.cu and batch.cu of the tests in a slice with a budget, shared by `how`: static, or a policy."""
        ...

    def jobs(self, words: Sequence[str], jobs: Sequence[Job]) -> AbstractContextManager[Sequence[Worked]]:
        """Start programs together, and wait until each has made a pass. Unavailable if one ends before, with its last
        words.
        """
        ...

    def wants(self, case: Mapping[str, str | float]) -> bool:
        """Return whether a case that a scenario can leave out was requested."""
        ...

    def strangers(self) -> AbstractContextManager[Strangers]:
        """Record strangers while the context is entered."""
        ...

    def context_mib(self) -> int:
        """Return the GPU memory that a program needs besides what it allocates, MiB."""
        ...
