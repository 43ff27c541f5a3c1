"""The ways to share a GPU between a server that comes first and another program, with memory for both and with less.

The driver and MPS have no way to give a program less memory than it allocates: with less, the other program ends by its
own "out of memory", which is what is recorded of them. Ghost and GVM route their peers' allocations through unified
memory there; that is not done here, as unified memory larger than the card can hang it (docs/nvidia.md).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs

from tests.bench.core.runner import Unavailable
from tests.bench.gpu.faces import Part
from tests.bench.gpu.systems import AGAIN, LIMIT_AGAIN_S, LIMIT_S, Mps, Plain, Programs, SliceRoom, Turned
from tests.bench.papers.lab import Lab, Server, Steps
from tests.support.mounted import Mounted, alive, eventually
from tests.support.policy_program import PolicyProgram

HIGH, LOW = Part(critical=True), Part()
WAIT_S = 2.0
"""Seconds that a program waits for its turn at most."""
SLACK_BYTES = 256 << 20
"""What the server may have beyond what it has: buffers of a larger batch."""
PERIOD_US = 20_000
"""Period of a quota."""
LINES, LINE = 20, 300
"""Lines of a log that are kept, and characters of one."""
ANY = ("",)
"""Words of lines that a daemon may log, of any line: figures are there all the same, and the lines beside them."""


class Hold(Protocol):
    """A way to share that is set up."""

    def both(self, lab: Lab, command: Sequence[str]) -> contextlib.AbstractContextManager[tuple[Server, Steps]]:
        """Both programs, running, with memory as the way has it. Unavailable where one cannot run."""
        ...

    @property
    def said(self) -> Sequence[str]:
        """What daemons and policies have logged."""
        ...


class Sharing(Protocol):
    """A way to share."""

    @property
    def name(self) -> str: ...

    def enter(self, percent: int) -> contextlib.AbstractContextManager[Hold]:
        """Set it up, with so much of the memory that both hold. Unavailable where that cannot be."""
        ...


@attrs.frozen
class DriverHold:
    """No lever but what stands before a command."""

    words: Any
    """Of a Part, the words before its command."""
    percent: int
    caps: bool
    """Whether memory is limited by the words; else by a ballast."""
    share: Callable[[Programs], None] = lambda programs: None
    """Unavailable where the programs do not share the GPU by that way."""
    said: Sequence[str] = ()

    @contextlib.contextmanager
    def both(self, lab: Lab, command: Sequence[str]) -> Iterator[tuple[Server, Steps]]:
        if self.percent >= 100:
            with lab.both(self.words(HIGH), self.words(LOW), command) as (server, loop):
                self.share([(HIGH, server), (LOW, loop)])
                yield server, loop
            return
        before = lab.free_mib()
        with lab.server(self.words(HIGH)) as server:
            first = before - lab.free_mib()
            with lab.loops([(self.words(LOW), command)]):
                second = before - lab.free_mib() - first
            room = (first + second) * self.percent // 100 - first
            if room <= 0:
                raise Unavailable(f"the server alone has {first} MiB of {first + second}")
            with contextlib.ExitStack() as stack:
                words = self.words(attrs.evolve(LOW, limit=f"{room}M")) if self.caps else self.words(LOW)
                if not self.caps:
                    stack.enter_context(lab.ballast(lab.free_mib() - room))
                try:
                    (loop,) = stack.enter_context(lab.loops([(words, command)]))
                except Unavailable as error:
                    raise Unavailable(f"with {room} of the {second} MiB that it needs, {error}") from None
                self.share([(HIGH, server), (LOW, loop)])
                yield server, loop


@attrs.frozen
class Driver:
    """Time slicing, or MPS."""

    system: Plain | Mps

    @property
    def name(self) -> str:
        """Of the system."""
        return self.system.name

    @contextlib.contextmanager
    def enter(self, percent: int) -> Iterator[DriverHold]:
        """See Sharing."""
        with self.system.enter() as stage:
            yield DriverHold(stage.words, percent, isinstance(self.system, Mps), stage.share)


def serving(mount: Mounted) -> None:
    """Unavailable where the daemon of a tree has ended: what was measured since then was of no tree."""
    if (code := mount.daemon.poll()) is not None:
        raise Unavailable(f"the daemon ended with {code}: {' '.join(mount.errors)[-LINE:]}")


@contextlib.contextmanager
def policy(mount: Path, name: str, config: Path, said: list[str]) -> Iterator[PolicyProgram]:
    """A policy at work, whose log goes into `said`. Unavailable where it ends by itself."""
    with PolicyProgram(mount, name, config) as program:
        yield program
        works, told = alive(program.pid), ""
        try:
            program.end()
        except AssertionError as error:
            told = str(error)[:LINE]
        if not works:
            raise Unavailable(f"the policy {name} ended by itself: {told}")
        said += [f"policy {name}: {told}"] if told else []


POLICY = """high = "{high}"
low = "{low}"
within = "/{within}"
headroom = "512M"
"""


def written(path: Path, nbytes: int) -> None:
    """Write a limit, again while programs do not give at once what they have."""
    until = time.monotonic() + LIMIT_S
    while True:
        file = os.open(path, os.O_WRONLY | os.O_TRUNC)
        try:
            os.write(file, f"{nbytes}\n".encode())
            return
        except OSError as error:
            if error.errno not in AGAIN or time.monotonic() > until:
                raise
        finally:
            os.close(file)
        time.sleep(LIMIT_AGAIN_S)


@attrs.frozen
class GgroupHold:
    """A slice that both programs are in."""

    room: SliceRoom
    sharing: Ggroup
    percent: int
    logged: list[str] = attrs.field(factory=list)
    """By policies."""

    @property
    def said(self) -> Sequence[str]:
        """See Hold."""
        return [*self.logged, *(line.strip()[:LINE] for line in self.room.mount.errors[:LINES])]

    @contextlib.contextmanager
    def both(self, lab: Lab, command: Sequence[str]) -> Iterator[tuple[Server, Steps]]:
        """See Hold."""
        if self.sharing.how == "cooperative":
            command = [*command, "--cooperate", os.fspath(self.room.mount.path)]
        properties = (
            [] if self.sharing.duty == 100 else [f"compute.max={self.sharing.duty * PERIOD_US // 100} {PERIOD_US}"]
        )
        with lab.both(self.room.words("compute.priority=0"), self.room.words(*properties), command) as (server, loop):
            high, low = (self.room.mount.group(one.pid) for one in (server, loop))
            for group in (high, low):
                eventually((group / "gmem.current").exists, f"{group} is in the tree")
            with contextlib.ExitStack() as stack:
                if self.percent < 100:
                    self._press(stack, high, low, server.pid, loop.pid)
                yield server, loop
                serving(self.room.mount)

    def _press(self, stack: contextlib.ExitStack, high: Path, low: Path, first: int, second: int) -> None:
        budget = self.room.held() * self.percent // 100
        needs = int((high / "gmem.current").read_text()) + SLACK_BYTES
        if needs >= budget:
            raise Unavailable(f"the server alone has {needs >> 20} MiB, and the budget is {budget >> 20}")
        self.room.wait(WAIT_S)
        if self.sharing.how == "turns":
            self.room.limit(budget)
            return
        written(high / "gmem.limit.high", needs)
        if self.sharing.how == "static":
            written(low / "gmem.limit.high", budget - needs)
        self.room.limit(budget)
        if self.sharing.how != "static":
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ggroupfs-policy-")))
            config = folder / "policy.toml"
            config.write_text(POLICY.format(high=first, low=second, within=self.room.within))
            stack.enter_context(policy(self.room.mount.path, self.sharing.how, config, self.logged))


@attrs.frozen
class Ggroup:
    """A mounted tree: the server has compute.priority 0, and memory is shared in some way."""

    name: str
    how: str = "static"
    """static, dynamic or cooperative (policies of that name), or turns."""
    duty: int = 100
    """Percent of the GPU's time that the other program may have (compute.max)."""
    gpu: str = "nvidia"
    """The GPUs."""

    @contextlib.contextmanager
    def enter(self, percent: int) -> Iterator[GgroupHold]:
        """See Sharing."""
        turned = Turned(self.name, [f"turns={'on' if self.how == 'turns' else 'off'}"], self.gpu, ANY)
        with turned.enter() as room:
            yield GgroupHold(room, self, percent)


class Alone(Protocol):
    """A way to give a program that is alone a part of its memory."""

    def enter(self) -> contextlib.AbstractContextManager[Lone]:
        """Set it up. Unavailable where that cannot be."""
        ...


class Lone(Protocol):
    """Such a way, set up."""

    def one(self, lab: Lab, command: Sequence[str], percent: int) -> contextlib.AbstractContextManager[Steps]:
        """The program, running, with so much of the memory that it holds."""
        ...

    @property
    def said(self) -> Sequence[str]:
        """What daemons have logged."""
        ...


@attrs.frozen
class AloneHold:
    """A slice for one program."""

    room: SliceRoom

    @property
    def said(self) -> Sequence[str]:
        """See Hold."""
        return [line.strip()[:LINE] for line in self.room.mount.errors[:LINES]]

    @contextlib.contextmanager
    def one(self, lab: Lab, command: Sequence[str], percent: int) -> Iterator[Steps]:
        """The program, with so much of its memory on the GPU."""
        with lab.loops([(self.room.words(), command)]) as (loop,):
            group = self.room.mount.group(loop.pid)
            eventually((group / "gmem.current").exists, f"{group} is in the tree")
            written(group / "gmem.limit.high", int((group / "gmem.current").read_text()) * percent // 100)
            yield loop
            serving(self.room.mount)


@attrs.frozen
class GgroupAlone:
    """A mounted tree and a limit."""

    gpu: str = "nvidia"

    @contextlib.contextmanager
    def enter(self) -> Iterator[AloneHold]:
        """See Alone."""
        with Turned("ggroupfs", ["turns=off"], self.gpu, ANY).enter() as room:
            yield AloneHold(room)
