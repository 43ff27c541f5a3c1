"""Generated histories of a live mount, compared with the same backend in process: every file's content and every errno.

Real tenants, controlled like puppets, use the software GPU of a real mount, and a :class:`Model` gets the same calls.
The content of files is rendered a second time here, and the meaning of a written text comes with the text
(tests.support.strategies). So neither the filesystem's table nor its parsers are checked against themselves.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
import trio
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from backend.core.controller import Controller
from backend.core.records import MAX
from backend.core.settings import LOW, OOM_GROUP, SWAP_MAX, TIMESLICE, Setting
from backend.ledgers.soft import SoftLedger
from backend.process.identity import Group, Member, Process, Slice, SliceOn, identify
from backend.soft.bus import Lane
from backend.soft.client import Device
from backend.soft.config import SoftConfig
from backend.soft.gpu import SoftGpu
from ggroupfs.client import flat
from ggroupfs.fs.controls import PEAKS
from tests.support.cgroups import answer, cgroup2
from tests.support.mounted import Mounted, eventually, mounted
from tests.support.strategies import (
    Written,
    chosen,
    history,
    pick,
    size_writes,
    sm_writes,
    switch_writes,
    timeslice_writes,
)

MIB = 1 << 20
PAGE = 2 * MIB
BUS = Lane(SoftConfig().out_bytes_per_s)
"""One direction of the bus of a software GPU; the other is as fast."""
SHARERS = 8
"""Greatest number of moves that share it at once: two for each program."""
TOP = f"ggroupfs-model-{os.getpid()}"
"""Name of a cgroup, and of its slice, for this test alone."""

SLICES = tuple(Slice(f"/{TOP}{below}") for below in ("", "/a", "/b", "/made"))


# Puppets: real processes that follow commands


class Puppet:
    """One tenant. `ask` returns the answer of the software GPU, or the name of an errno."""

    def __init__(self, theater: socket.socket, mount: Path, cgroup: Path) -> None:
        self._socket, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with end:
            socket.send_fds(theater, [json.dumps([str(mount), str(cgroup)]).encode()], [end.fileno()])
        self.pid = int(self.ask())
        self.process = identify(self.pid)
        self.slice = Slice(f"/{TOP}/{cgroup.name}")
        self.tsgs: list[tuple[int, int]] = []
        """Its TSGs, by the numbers of the mount and of the model."""
        self.stamps: dict[range, list[int]] = {}
        """The stamps that it wrote into each of its allocations."""

    def ask(self, *words: object) -> Any:
        if words:
            self._socket.send(json.dumps(words).encode())
        raw = self._socket.recv(1 << 16)
        assert raw, f"process {self.pid} died of {words}"
        return json.loads(raw)

    def end(self, *, kill: bool) -> None:
        """Let it exit, or kill it."""
        if kill:
            os.kill(self.pid, signal.SIGKILL)
        self._socket.close()


def theater(stage: socket.socket) -> None:
    """Fork puppets for the test at the other end of `stage`."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    while True:
        raw, fds, _, _ = socket.recv_fds(stage, 4096, 1)
        if not raw:
            return
        if os.fork() == 0:
            stage.close()
            try:
                perform(socket.socket(fileno=fds[0]), *json.loads(raw))
            finally:
                os._exit(0)
        os.close(fds[0])


def perform(strings: socket.socket, mount: str, cgroup: str) -> None:
    """Follow commands, as a puppet."""
    Path(cgroup, "cgroup.procs").write_text("0")
    strings.send(str(os.getpid()).encode())
    device: Device | None = None

    def do(name: str, *args: Any) -> object:
        nonlocal device
        device = device or Device(mount)
        match name, args:
            case "alloc", (nbytes,):
                pages = device.alloc(nbytes)
                return [pages.start, pages.stop]
            case (("free" | "read"), (start, stop)):
                result = getattr(device, name)(range(start, stop))
                return list(result) if name == "read" else result
            case "write", (start, stop, stamp):
                return device.write(range(start, stop), stamp)
            case "launch", (tsg, kernels, us, start, stop):
                return device.launch(tsg, kernels, us, range(start, stop))
        return getattr(device, name)(*args)

    while raw := strings.recv(1 << 16):
        words = json.loads(raw)
        strings.send(json.dumps(answer(lambda words=words: do(*words))).encode())  # type: ignore[misc]


# The model


class Model:
    """The backend without a mount, on a thread of its own."""

    def __init__(self) -> None:
        self.controller: Controller
        self.gpu = SoftGpu(0, SoftConfig(capacity=256 * MIB, switch_us=0))
        self._ready = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._main,))
        self._thread.start()
        self._ready.wait()

    async def _main(self) -> None:
        self._token, self._stop = trio.lowlevel.current_trio_token(), trio.Event()
        self.controller = Controller(SoftLedger(), [self.gpu], scheduler=False)
        async with trio.open_nursery() as nursery:
            await nursery.start(self.controller.run)
            self._ready.set()
            await self._stop.wait()
            nursery.cancel_scope.cancel()

    def stop(self) -> None:
        self.do(lambda: self._stop.set())
        self._thread.join()

    def do(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a call, or the name of its errno."""
        return answer(lambda: trio.from_thread.run_sync(call, *args, trio_token=self._token))

    def wait(self, call: Callable[..., Any], *args: Any) -> Any:
        """The same for an async call."""
        return answer(lambda: trio.from_thread.run(call, *args, trio_token=self._token))

    def groups(self) -> list[Group]:
        """Return every group that has a directory with control files."""

        def collect() -> list[Group]:
            population = self.controller.population
            found = [Member(r.process, gpu) for r in population.residents() for gpu in r.gpus]
            return found + [SliceOn(slice_, 0) for slice_ in SLICES if population.slice_entry(slice_) is not None]

        groups: list[Group] = self.do(collect)
        return groups

    def shows(self, name: str, group: Group) -> Any:
        """Return the content of a file, or the errno of reading it."""
        if name in ("gmem.reclaim", "compute.migrate"):
            return "EINVAL"
        return self.do(lambda: CONTENTS[name](self.controller, group))


def size(nbytes: int) -> str:
    return "max\n" if nbytes == MAX else f"{nbytes}\n"


def table(**pairs: int | None) -> str:
    return "".join(f"{key} {value}\n" for key, value in pairs.items() if value is not None)


def gmem_stat(controller: Controller, group: Group) -> str:
    b = controller.books(group)
    moved = {"swapin": b.swapins, "swapin_bytes": b.swapin_bytes, "swapout": b.swapouts}
    return table(resident=b.current, swapped=b.swap, **moved, swapout_bytes=b.swapout_bytes)


def gmem_events(controller: Controller, group: Group) -> str:
    b = controller.books(group)
    limits = {"low": b.events_low, "high": b.events_high, "max": b.events_max, "oom": b.events_oom}
    kills = {"oom_kill": b.events_oom_kill, "oom_group_kill": b.events_oom_group_kill}
    states = {"over": int(controller.is_over(group)), "past": int(controller.is_past(group))}
    return table(**limits, reclaim=b.events_reclaim, fail=b.events_fail, **kills, **states)


def timeslice(controller: Controller, group: Group) -> str:
    us = controller.books(group).timeslice_us
    if not us and isinstance(group.node, Slice):
        return "default\n"
    whole, thousandths = divmod(us or 2048, 1000)
    return f"{whole}.{thousandths:03}".rstrip("0").rstrip(".") + "\n"


def shown(path: Path) -> object:
    """Return the content of a file, without figures of the clock."""
    found = answer(path.read_text)
    return without_clock(found) if isinstance(found, str) else found


def without_clock(text: str) -> str:
    """Return a text without the lines that depend on the clock, which differs between two looks. The time of moves is
    one of them: of two moves that begin at once, either may be first on the bus, and the later one shares it.
    """
    clocks = ("frozen_usec ", "byte_seconds ", "since ", "move_usec ")
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(clocks))


def leaves(controller: Controller, group: Group) -> list[Group]:
    """Return the processes at or below a group."""
    return [Member(resident.process, group.gpu) for resident in controller.population.below(group)]


def is_asked_to_freeze(controller: Controller, group: Group) -> bool:
    """Return whether a freeze was set on a group or above it: nothing else takes a program off the runlist here."""
    return any(controller.books(level).frozen for level in controller.population.path(group))


def gcgroup_stat(controller: Controller, group: Group) -> str:
    a = controller.activity(group)
    return table(
        submitted=a.submitted,
        finished=a.finished,
        pending=a.pending,
        gpu_usec=a.gpu_usec,
        busy_usec=a.busy_usec,
        busy_sampled_usec=a.busy_sampled_usec,
        timeslice_usec=controller.applied_timeslice(group) or None,
        tsgs=a.tsgs,
        channels=a.channels,
        attached=a.attached,
        nr_periods=controller.periods(group),
        nr_throttled=controller.throttled(group).times,
        throttled_usec=controller.throttled(group).usec,
        off_freeze=sum(is_asked_to_freeze(controller, leaf) for leaf in leaves(controller, group)),
        **dict.fromkeys(("off_turn", "off_quota", "off_busy", "off_gang", "off_migration", "off_gr"), 0),
        managed=int(a.managed),
    )


CONTENTS: dict[str, Callable[[Controller, Group], str]] = {
    "gmem.limit.high": lambda c, g: size(c.books(g).high),
    "gmem.limit.max": lambda c, g: size(c.books(g).limit_max),
    "gmem.oom.group": lambda c, g: f"{int(c.books(g).oom_group)}\n",
    "gmem.limit.low": lambda c, g: size(c.books(g).low),
    "gmem.current": lambda c, g: f"{c.books(g).current}\n",
    "gmem.peak": lambda c, g: f"{c.peak(g, 'peak')}\n",
    "gmem.swap.peak": lambda c, g: f"{c.peak(g, 'swap_peak')}\n",
    "gmem.swap.current": lambda c, g: f"{c.books(g).swap}\n",
    "gmem.swap.max": lambda c, g: size(c.books(g).swap_max),
    "gmem.events": gmem_events,
    "gmem.stat": gmem_stat,
    "compute.timeslice": timeslice,
    "compute.freeze": lambda c, g: f"{int(c.books(g).frozen)}\n",
    "compute.priority": lambda c, g: f"{c.books(g).priority}\n",
    "compute.weight": lambda c, g: f"{c.books(g).weight}\n",
    "compute.max": lambda c, g: f"max {c.books(g).period_us}\n",
    "compute.wait.max": lambda c, g: "default\n",
    "compute.spatial": lambda c, g: f"{int(c.books(g).spatial)}\n",
    "compute.sm.max": lambda c, g: f"{c.gpus[g.gpu].info.sms_of(c.books(g).sm_max) or 'max'}\n",
    "compute.events": lambda c, g: table(
        populated=int(c.is_populated(g)),
        frozen=int(c.is_frozen(g)),
        migrated=c.moved(g),
        undone=0,
        lost=0,
        **({} if (lost := c.servers_lost(g)) is None else {"server_lost": lost}),
    ),
    "gcgroup.stat": gcgroup_stat,
}
NAMES = sorted([*CONTENTS, "gmem.reclaim", "compute.migrate", "usermemfd"])

REFUSALS = ("EBUSY", "EAGAIN")
"""Errnos of a well-formed write to a live group on a GPU that answers: swap.max prevents the move."""

memory = st.one_of(st.integers(0, 130).map(lambda mib: mib * MIB), st.integers(0, 130 * MIB))
sized, counted = size_writes(memory), size_writes(memory, unlimited=False)


async def set_value(controller: Controller, setting: Setting, group: Group, value: int) -> None:
    await controller.set_value(group, setting, value)


WRITES: dict[str, tuple[st.SearchStrategy[Written], Callable[[Controller], Callable[..., Any]]]] = {
    "gmem.limit.high": (sized, lambda c: c.set_high),
    "gmem.limit.max": (sized, lambda c: c.set_max),
    "gmem.oom.group": (switch_writes, lambda c: partial(set_value, c, OOM_GROUP)),
    "gmem.limit.low": (sized, lambda c: partial(set_value, c, LOW)),
    "gmem.swap.max": (sized, lambda c: partial(set_value, c, SWAP_MAX)),
    "gmem.reclaim": (counted, lambda c: c.reclaim),
    "compute.timeslice": (timeslice_writes, lambda c: partial(set_value, c, TIMESLICE)),
    "compute.freeze": (switch_writes, lambda c: c.set_frozen),
    "compute.spatial": (switch_writes, lambda c: c.set_spatial),
    "compute.sm.max": (sm_writes, lambda c: c.set_sms),
}
writes = st.sampled_from(sorted(WRITES)).flatmap(lambda name: st.tuples(st.just(name), WRITES[name][0]))


@attrs.define(eq=False)
class Opened:
    """A control file that is open on the mount."""

    fd: int
    name: str
    group: Group
    snapshot: Any = None
    """Content that was read from the start."""
    seen: int = 0
    """Sequence number of the last record, of usermemfd."""


# The machine


class MountMachine(RuleBasedStateMachine):
    """The state machine: each rule acts on the mount and on the model."""

    mount: ClassVar[Mounted]
    stage: ClassVar[socket.socket]
    cgroup: ClassVar[Path]

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.controller, self.gpu = self.model.controller, self.model.gpu
        self.puppets: list[Puppet] = []
        self.open_files: list[Opened] = []

    def teardown(self) -> None:
        try:
            for group in self.model.groups():
                self.compare(group, NAMES)
        finally:
            for file in self.open_files:
                os.close(file.fd)
            for puppet in self.puppets:
                puppet.end(kill=False)
            for puppet in self.puppets:
                eventually(lambda gone=puppet: not (self.mount / gone.pid).exists(), "its directory is gone")
            top = self.mount / "slice" / TOP
            for path in (top / "a", top / "b", top / "made", top):
                # ENODEV is possible for a moment: the kernel is still being told that a directory above is gone.
                eventually(lambda path=path: answer(path.rmdir) in (None, "ENOENT"), f"{path} is gone")
            self.model.stop()
        assert (self.mount / "gpus/0/gmem.current").read_text() == "0\n"
        self.mount.check_log()

    # The small parts

    def puppet(self, index: int) -> Puppet:
        return chosen(self.puppets, index)

    def path(self, group: Group) -> Path:
        node = group.node
        name = str(node.pid) if isinstance(node, Process) else f"slice{node.path}"
        return self.mount.path / name / str(group.gpu)

    def compare(self, group: Group, names: list[str]) -> None:
        """Compare the files of a group with the model. Background work gets a moment to finish."""
        for name in names:
            if name == "usermemfd":
                continue
            path = self.path(group) / name
            if shown(path) != self.model.shows(name, group):
                with contextlib.suppress(AssertionError):
                    eventually(
                        lambda n=name, p=path: shown(p) == self.model.shows(n, group), name, 1.0, self.mount.watch()
                    )
                assert shown(path) == self.model.shows(name, group), f"{name} of {group.node}"

    def drain(self) -> None:
        """Wait, on both sides, until all work that is not frozen is finished."""

        def idle(stat: Any) -> bool:
            if not isinstance(stat, str) or " " not in stat:
                return True  # the process is gone
            numbers = dict(line.split() for line in stat.splitlines())
            return numbers["pending"] == "0" or numbers["attached"] == "0"

        for puppet in self.puppets:
            group = Member(puppet.process, 0)
            path = self.path(group) / "gcgroup.stat"
            eventually(lambda p=path: idle(answer(p.read_text)), "the mount's kernels finish")
            eventually(lambda g=group: idle(self.model.shows("gcgroup.stat", g)), "the model's kernels finish")

    # Processes and directories

    @precondition(lambda self: len(self.puppets) < 3)
    @rule(where=st.sampled_from(("a", "b")), contexts=st.integers(0, 2), pages=st.integers(0, 40))
    def spawn(self, where: str, contexts: int, pages: int) -> None:
        """Start a process, which mostly uses the GPU at once."""
        self.puppets.append(Puppet(self.stage, self.mount.path, self.cgroup / where))
        for _ in range(contexts):
            self.join(len(self.puppets) - 1, 8)
        if pages:
            self.alloc(len(self.puppets) - 1, pages, 0)

    @precondition(lambda self: self.puppets)
    @rule(index=pick, make=st.booleans())
    def make_or_remove_its_directory(self, index: int, make: bool) -> None:
        puppet = self.puppet(index)
        path = self.mount / puppet.pid
        if make:
            assert answer(path.mkdir) == self.model.wait(self.controller.make_process, puppet.pid)
        else:
            assert answer(path.rmdir) == self.model.do(self.controller.unmake_process, puppet.process)

    @rule(name=st.sampled_from(("0", "007", "x", "-1", "1 ", "4194305", "99999999999999999999", "gpus", "self")))
    def make_what_cannot_be(self, name: str) -> None:
        expected = "EEXIST" if name in ("gpus", "self") else "ENOENT" if name.isdigit() and name[0] != "0" else "EINVAL"
        assert answer((self.mount / name).mkdir) == expected

    @rule(name=st.sampled_from(("a", "made", ".")), make=st.booleans())
    def make_or_remove_a_slice(self, name: str, make: bool) -> None:
        slice_ = Slice(f"/{TOP}" if name == "." else f"/{TOP}/{name}")
        path = self.mount.path / "slice" / slice_.path[1:]
        population = self.controller.population
        if make:
            assert answer(path.mkdir) == self.model.do(population.make, slice_)
        elif self.model.do(population.slice_entry, slice_) is None:
            assert answer(path.rmdir) == "ENOENT"
        else:
            assert answer(path.rmdir) == self.model.do(self.controller.unmake_slice, slice_)

    @precondition(lambda self: self.puppets)
    @rule(index=pick, kill=st.booleans())
    def exit(self, index: int, kill: bool) -> None:
        """Its directory disappears; its open files fail with ENODEV, and those of others work."""
        puppet = self.puppet(index)
        self.puppets.remove(puppet)
        puppet.end(kill=kill)
        eventually(lambda: not (self.mount / puppet.pid).exists(), "its directory is gone")
        group = Member(puppet.process, 0)
        eventually(lambda: not self.model.do(self.controller.population.holds, group), "the model noticed")

    # Acts of tenants

    @precondition(lambda self: self.puppets)
    @rule(index=pick, channels=st.sampled_from((1, 8, 128, 0, 129)))
    def join(self, index: int, channels: int) -> None:
        puppet = self.puppet(index)
        number = puppet.ask("join", channels)
        if not 0 < channels <= 128:
            assert number == "EINVAL"
            return
        twin = self.model.wait(self.gpu.open_context, puppet.process, channels, lambda finished: None)
        puppet.tsgs.append((number, twin))

    @precondition(lambda self: any(puppet.tsgs for puppet in self.puppets))
    @rule(index=pick)
    def leave(self, index: int) -> None:
        puppet = chosen([puppet for puppet in self.puppets if puppet.tsgs], index)
        number, twin = puppet.tsgs.pop(index % len(puppet.tsgs))
        assert puppet.ask("leave", number) is None
        assert self.model.do(self.gpu.close_context, puppet.process, twin) is None
        assert puppet.ask("leave", number) == "ENOENT"

    @precondition(lambda self: self.puppets)
    @rule(index=pick, pages=st.integers(0, 40), less=st.sampled_from((0, 1, PAGE - 1)))
    def alloc(self, index: int, pages: int, less: int) -> None:
        puppet = self.puppet(index)
        nbytes = max(0, pages * PAGE - less)
        found = puppet.ask("alloc", nbytes)
        if not puppet.tsgs:
            assert found == "EBADF"
            return
        expected = self.model.wait(self.gpu.allocate, puppet.process, nbytes)
        if isinstance(expected, str):
            assert found == expected
            assert expected == ("ENOMEM" if pages else "EINVAL")
            return
        assert range(*found) == expected
        puppet.stamps[expected] = [0] * len(expected)

    @precondition(lambda self: any(puppet.stamps for puppet in self.puppets))
    @rule(index=pick, whole=st.sampled_from((True, True, False)))
    def free(self, index: int, whole: bool) -> None:
        puppet = chosen([puppet for puppet in self.puppets if puppet.stamps], index)
        pages = chosen(list(puppet.stamps), index)
        if not whole:
            assert puppet.ask("free", pages.start, pages.stop + 1) == "EINVAL"
            return
        assert puppet.ask("free", pages.start, pages.stop) is None
        assert self.model.do(self.gpu.free, puppet.process, pages) is None
        del puppet.stamps[pages]
        assert puppet.ask("read", pages.start, pages.stop) == "EFAULT"

    @precondition(lambda self: any(puppet.stamps for puppet in self.puppets))
    @rule(index=pick, stamp=st.integers(0, (1 << 64) - 1))
    def write_and_read(self, index: int, stamp: int) -> None:
        """Contents survive every move."""
        puppet = chosen([puppet for puppet in self.puppets if puppet.stamps], index)
        pages = chosen(list(puppet.stamps), index)
        assert puppet.ask("read", pages.start, pages.stop) == puppet.stamps[pages]
        assert puppet.ask("write", pages.start, pages.stop, stamp) is None
        puppet.stamps[pages] = [(stamp + i) % (1 << 64) for i in range(len(pages))]
        self.model.do(lambda: [self.gpu.write(puppet.process, page, 0) for page in pages])

    @precondition(lambda self: any(puppet.tsgs for puppet in self.puppets))
    @rule(index=pick, kernels=st.integers(0, 3), us=st.integers(1, 200), touched=st.integers(0, 40))
    def launch(self, index: int, kernels: int, us: int, touched: int) -> None:
        puppet = chosen([puppet for puppet in self.puppets if puppet.tsgs], index)
        number, twin = chosen(puppet.tsgs, index)
        pages = chosen(list(puppet.stamps), index)[:touched] if puppet.stamps else range(0)
        found = puppet.ask("launch", number, kernels, us, pages.start, pages.stop)
        assert found == self.model.wait(self.gpu.launch, puppet.process, twin, kernels, us, pages)
        self.drain()

    # Acts of operators

    @precondition(lambda self: self.model.groups())
    @rule(index=pick, write=writes)
    def write_control(self, index: int, write: tuple[str, Written]) -> None:
        group, (name, written) = chosen(self.model.groups(), index), write
        path = self.path(group) / name
        before = self.model.shows(name, group)
        found = answer(lambda: self.write(path, written.raw))
        if written.refused:
            assert found == errno.errorcode[written.refused], written
        else:
            call = WRITES[name][1](self.controller)
            value = bool(written.value) if name == "compute.freeze" else written.value
            expected = self.model.wait(call, group, value)
            assert found == (len(written.raw) if expected is None else expected), written
            refusals = (*REFUSALS, "EINVAL") if name == "compute.spatial" and value else REFUSALS
            assert not isinstance(found, str) or found in refusals, written  # a process has no space of its own
        after = answer(path.read_text)
        assert after == self.model.shows(name, group), "at once, not eventually"
        assert not isinstance(found, str) or after == before, "a refused write changes nothing"
        self.drain()

    @staticmethod
    def write(path: Path, raw: bytes) -> int:
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
        try:
            return os.write(fd, raw)
        finally:
            os.close(fd)

    @precondition(lambda self: self.model.groups())
    @rule(index=pick, high=st.integers(0, 40), swap=st.integers(0, 20), odd=st.sampled_from((0, 1, MIB)))
    def squeeze(self, index: int, high: int, swap: int, odd: int) -> None:
        """Leave little room on the GPU and in the host, which is what limits are for."""
        for name, nbytes in (("gmem.swap.max", swap * PAGE + odd), ("gmem.limit.high", high * PAGE + odd)):
            self.write_control(index, (name, Written(b"%d\n" % nbytes, nbytes)))

    @precondition(lambda self: self.model.groups())
    @rule(index=pick, name=st.sampled_from(NAMES), raw=st.sampled_from((b"1\n", b"", b"nonsense")))
    def write_others(self, index: int, name: str, raw: bytes) -> None:
        """Write files that are read-only or have no effect in any backend, and peaks, which accept anything."""
        group = chosen(self.model.groups(), index)
        if name in WRITES:
            return
        found = answer(lambda: self.write(self.path(group) / name, raw))
        if not raw:
            assert found == 0
        elif name in PEAKS:
            assert found == len(raw)
            # The peak was restarted for a file that is closed now, and for no other.
        elif name in ("compute.priority", "compute.weight", "compute.wait.max", "compute.migrate"):
            assert found == ("EINVAL" if raw == b"nonsense" else "EOPNOTSUPP").replace("EOPNOTSUPP", "ENOTSUP")
        else:
            assert found == "EINVAL"

    @precondition(lambda self: self.model.groups() and len(self.open_files) < 6)
    @rule(index=pick, name=st.one_of(st.sampled_from(NAMES), st.just("usermemfd")))
    def open(self, index: int, name: str) -> None:
        group = chosen(self.model.groups(), index)
        fd = os.open(self.path(group) / name, os.O_RDONLY)
        seen = self.model.do(lambda: self.controller.books(group).pressure_seq)
        self.open_files.append(Opened(fd, name, group, seen=seen))

    @precondition(lambda self: self.open_files)
    @rule(index=pick, offset=st.sampled_from((0, 0, 1, 5, 5000)), count=st.sampled_from((3, 16, 4096)))
    def read_open_file(self, index: int, offset: int, count: int) -> None:
        """Content that was read from the start stays until the file is read from the start again."""
        file = chosen(self.open_files, index)
        if file.name.endswith(".stat"):
            self.read_open_stat(file, offset, count)
            return
        found = answer(lambda: os.pread(file.fd, count, offset))
        if file.name == "usermemfd":
            assert found == self.pressure(file, count)
            return
        if offset == 0 or not isinstance(file.snapshot, str) or file.snapshot.isupper():
            file.snapshot = self.model.shows(file.name, file.group)
        text = file.snapshot
        assert found == (text if text.isupper() else text.encode()[offset : offset + count])

    def read_open_stat(self, file: Opened, offset: int, count: int) -> None:
        """The same for a file with figures that grow with time: the content is compared with itself, and the figures
        that do not grow with the model.
        """
        if offset == 0 or not isinstance(file.snapshot, bytes):
            whole = answer(lambda: os.pread(file.fd, 4096, 0))
            text = without_clock(whole.decode()) if isinstance(whole, bytes) else whole
            assert text == self.model.shows(file.name, file.group)
            file.snapshot = whole
        if offset and isinstance(file.snapshot, bytes):
            assert answer(lambda: os.pread(file.fd, count, offset)) == file.snapshot[offset : offset + count]

    def pressure(self, file: Opened, count: int) -> object:
        """Return the usermemfd record that an opener has not read yet."""
        if count < 16:
            return "EINVAL"
        books = self.model.do(self.controller.books, file.group)
        if isinstance(books, str):
            return books
        if books.pressure_seq == file.seen:
            return "EAGAIN"
        file.seen = books.pressure_seq
        return struct.pack("<QQ", books.pressure_bytes, books.pressure_seq)

    @precondition(lambda self: self.open_files)
    @rule(index=pick)
    def close(self, index: int) -> None:
        file = chosen(self.open_files, index)
        self.open_files.remove(file)
        os.close(file.fd)

    # Invariants

    @invariant()
    def sums_add_up(self) -> None:
        """Nothing is lost: what a process allocated is on the GPU or in the host, and the sums are right."""
        totals = [0, 0]
        for puppet in self.puppets:
            if not (self.mount / puppet.pid).exists():
                assert not puppet.tsgs
                assert not puppet.stamps
                continue
            held, swapped = (int((self.mount.group(puppet.pid) / f"gmem.{n}").read_text()) for n in HELD)
            assert held + swapped == PAGE * sum(map(len, puppet.stamps)), "current + swap = allocated"
            totals = [totals[0] + held, totals[1] + swapped]
        assert int((self.mount / "gpus/0/gmem.current").read_text()) == totals[0]
        for group in self.model.groups():
            stat = flat((self.path(group) / "gmem.stat").read_text())
            least = sum(BUS.usec(stat[f"{way}_bytes"]) - stat[way] for way in ("swapin", "swapout"))
            assert least <= stat["move_usec"] <= (least + stat["swapin"] + stat["swapout"]) * SHARERS
            if group.node == Slice(f"/{TOP}"):
                assert [int((self.path(group) / f"gmem.{n}").read_text()) for n in HELD] == totals

    @invariant()
    def directories_agree(self) -> None:
        groups = self.model.groups()
        pids = {str(group.node.pid) for group in groups if isinstance(group.node, Process)}
        assert {name for name in os.listdir(self.mount.path) if name.isdigit()} == pids
        for slice_ in SLICES:
            there = SliceOn(slice_, 0) in groups
            path = self.mount.path / f"slice{slice_.path}"
            # What a process left behind is removed a moment later, once the kernel was told.
            what = f"{path} is there: {there}"
            eventually(lambda path=path, there=there: path.is_dir() == there, what, 1.0, self.mount.watch())

    @invariant()
    def a_group_agrees(self) -> None:
        """Compare one group, a different one each time; at the end all of them."""
        groups = self.model.groups()
        if groups:
            self._turn = getattr(self, "_turn", 0) + 1
            self.compare(chosen(groups, self._turn), NAMES)


HELD = ("current", "swap.current")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[MountMachine]]:
    """Yield the machine, with a mount, cgroups and puppets."""
    cgroup = cgroup2() / TOP
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    words = [sys.executable, "-m", "tests.t4_mounts.t4_mount_machine", str(far.fileno())]
    (cgroup / "a").mkdir(parents=True)
    (cgroup / "b").mkdir()
    try:
        with near, subprocess.Popen(words, pass_fds=[far.fileno()]) as director:
            far.close()
            with mounted(tmp_path_factory.mktemp("ggroup"), "soft.gmem=256M,soft.switch=0,scheduler=off") as mount:
                yield type("Machine", (MountMachine,), {"mount": mount, "stage": near, "cgroup": cgroup})
            near.close()
            assert director.wait() == 0
    finally:
        for path in (cgroup / "a", cgroup / "b", cgroup):
            eventually(lambda p=path: p.rmdir() or True, "the cgroup is empty")


def test_histories(machine: type[MountMachine]) -> None:
    run_state_machine_as_test(machine, settings=history(40, shrink=False))


def test_a_swap_max_that_is_no_multiple_of_a_page(mount: Mounted) -> None:
    """The host has room for one page and a half, so for one page: no more can be moved, and nothing is lost by
    trying.
    """
    with Device(mount.path) as device:
        device.join()
        group = mount.group(os.getpid())
        pages = device.alloc(4 * PAGE)
        (group / "gmem.swap.max").write_text(str(PAGE + MIB))
        (group / "gmem.limit.high").write_text(str(3 * PAGE))
        assert answer(lambda: (group / "gmem.limit.high").write_text(str(2 * PAGE + MIB))) in ("EBUSY", "EAGAIN")
        assert answer(lambda: (group / "gmem.reclaim").write_text(str(MIB))) == "EAGAIN"
        assert answer(lambda: device.alloc(PAGE)) == "ENOMEM"
        assert [int((group / f"gmem.{name}").read_text()) for name in HELD] == [3 * PAGE, PAGE]
        device.free(pages)
        assert [int((group / f"gmem.{name}").read_text()) for name in HELD] == [0, 0]


if __name__ == "__main__":
    theater(socket.socket(fileno=int(sys.argv[1])))
