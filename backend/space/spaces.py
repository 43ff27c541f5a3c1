"""The spaces of a tree: which programs are in one, and its control daemon from the first program to the last.

A program is in the space of the outermost slice above it with compute.spatial, if it asked before it used a GPU: the
library does (``library/daemon/space.c``), and so does a context of the software GPU, whose spaces need no server. It
stays there until it ends, whatever becomes of the setting, since no client can be taken from its server.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import attrs
import trio

from backend.common.errors import fail
from backend.common.lasting import lasting
from backend.common.threads import in_a_thread
from backend.core.population import Population
from backend.core.protocols import Ledger
from backend.process import procfs
from backend.process.exits import ExitWatch
from backend.process.identity import ROOT, Process, Slice, SliceOn, has_exited
from backend.process.looks import look
from backend.space.control import Control
from backend.space.space import RECORD, Record, Space, read_records

log = logging.getLogger(__name__)

AGAIN_S, AGAIN_MOST_S = 0.1, 30.0
"""Seconds until a control daemon that ended is started again: at first, which doubles each time, and the longest."""
LIVED_S = 10.0
"""Seconds that one has to live for the next to be started after AGAIN_S again."""
WAITED_S = 2.0
"""Seconds until the next one for which programs that start wait for it, at most; else they run by themselves."""
LOOK_S = 0.25
"""Seconds between two looks at the servers of a control daemon, and at whether its slice is still to have one."""
QUIT_S = 15.0
"""Seconds that a control daemon without a program has to end after ``quit``; then it is ended by its pidfd."""
SERVER_MOST = 2 << 30
"""Bytes of a GPU that a server holds itself, at most: some hundred MiB are usual. One that holds more is a program like
any other, with a directory and limits: its user could have put anything into it."""
SERVERS_MOST = 8
"""Number of servers of a space that are watched, each by a descriptor of this daemon: one is usual, two while one
follows another, and the user can have its control daemon start any number.
"""
SPACES_MOST, SPACES_EACH = 64, 16
"""Number of spaces that a tree has at the same time, of all users and of each: each has a process started."""


@attrs.define(eq=False)
class Running:
    """A space with its programs and, where it needs one, its control daemon."""

    space: Space
    """The space."""
    control: Control | None
    """Its control daemon; None where it needs none."""
    ready: trio.Event = attrs.field(factory=trio.Event)
    """Set once the control daemon listens, or could not be started the first time."""
    error: OSError | None = None
    """Why it does not run; None while it does."""
    retired: bool = False
    """Whether no further program comes in: the slice is not to have it any more."""
    servers: dict[int, int] = attrs.field(factory=dict)
    """A pidfd of each of its servers that is watched, by pid: SERVERS_MOST at most."""
    lost: int = 0
    """Number of its servers that ended, of themselves."""
    lost_at: float = -math.inf
    """When the last of them did, by trio's clock."""
    again_s: float = 0.0
    """Seconds from then until the next is started."""
    is_due: bool = False
    """Whether one is to be started then."""


class Spaces:
    """See the module."""

    def __init__(
        self,
        ledger: Ledger,
        gpus: Iterable[int],
        population: Population,
        lost: Callable[[Space], None],
        program: Path | None = None,
        directory: Path | None = None,
    ) -> None:
        """`lost` is called with a space whose server ended while it was to have one. `program` is that of the control
        daemon, and `directory` that of the tree's spaces; without them there are no servers, as on software GPUs.
        """
        self._ledger = ledger
        self._gpus = tuple(gpus)
        self._population = population
        self._tell_lost = lost
        self.program, self.directory = program, directory
        self._running: dict[Space, Running] = {}
        self._members: dict[Process, Space] = {}
        self._exits = ExitWatch(self._exited)
        self._nursery: trio.Nursery | None = None
        self._found = trio.Event()  # set once those of earlier daemons are known
        self.changed: Callable[[], None] = lambda: None
        """Called when a program came into a space or left one."""

    async def run(self) -> None:
        """Keep the control daemons running until cancelled. At the end they are told to quit, unless another daemon
        goes on: one that has programs ends after the last of them.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._exits.run)
            for record in read_records(self.directory) if self.program is not None and self.directory else ():
                running = self._add(record.space)
                running.retired = record.is_over
                if record.control is None or running.control is None or not await running.control.adopt(record.control):
                    running.retired = True  # its programs lost their server
                running.ready.set()
                self._begin(running)
            self._found.set()
            await trio.sleep_forever()

    async def close(self, *, handed_over: bool) -> None:
        """End what is not for the next daemon; the last call. All are told at once, as `quit` waits for programs."""
        controls = [running.control for running in self._running.values() if running.control is not None]
        try:
            async with trio.open_nursery() as nursery:
                for running in self._running.values() if not handed_over else ():
                    nursery.start_soon(self._quit, running)
        finally:
            for control in controls:
                control.close()
            for running in self._running.values():
                _forget_servers(running)
            self._running.clear()
            self._exits.close()

    # Programs

    def of(self, process: Process) -> Space | None:
        """Return the space that a program is in."""
        return self._members.get(process)

    def any(self) -> bool:
        """Return whether any program is in one."""
        return bool(self._members)

    def members(self, space: Space) -> Iterator[Process]:
        """Yield the programs of a space, those included that use no GPU yet."""
        return (process for process, one in self._members.items() if one == space)

    def spatial(self, slice_: Slice) -> Slice | None:
        """Return the outermost slice at or above one that is to have a space, on any GPU; None where none is."""
        found, level = None, slice_
        while level is not None and level != ROOT:
            if self._population.slice_entry(level) is not None and self._asked(level):
                found = level
            level = level.parent  # type: ignore[assignment]
        return found

    def _asked(self, slice_: Slice) -> bool:
        with contextlib.suppress(OSError):
            return any(self._ledger.books(SliceOn(slice_, gpu)).spatial for gpu in self._gpus)
        return False

    async def enter(self, process: Process, slice_: Slice, uid: int, given: int = 0) -> int:
        """Have a program that starts in the space of its slice, if there is to be one, and return its number once its
        server can be connected to; 0: it runs by itself. `given` is the number that it was told before, by this daemon
        or an earlier one.
        """
        if given:
            await self._found.wait()
        for known in [*self._running] if given else ():
            if known.number == given and known.uid == uid:
                await self._admit(process, known)
                return given
        top = self.spatial(slice_)
        if given or top is None or not await self._is_here(process):
            return 0
        running = self._find(top, uid)
        if running is None:
            return 0
        await running.ready.wait()
        if running.error is not None or running.retired:
            return 0
        await self._admit(process, running.space)
        return running.space.number

    async def _is_here(self, process: Process) -> bool:
        """Return whether a program could speak with a server of ours, with which it shares memory."""
        if self.program is None:
            return True
        try:
            own = os.readlink("/proc/self/ns/ipc")
            return own == await look(process.pid, partial(os.readlink, f"/proc/{process.pid}/ns/ipc"))
        except OSError:
            return False

    async def _admit(self, process: Process, space: Space) -> None:
        if process not in self._members:
            await self._exits.watch(process)
            self._members[process] = space
            self.changed()

    def _exited(self, process: Process) -> None:
        space = self._members.pop(process, None)
        if space is not None:
            self.changed()
            running = self._running.get(space)
            if running is not None and running.control is None and self._is_over(running):
                self._drop(running)

    # Servers

    def is_server(self, pid: int, nbytes: int) -> bool:
        """Return whether a process with so many bytes of a GPU is a server of ours, and so no program of its own."""
        controls = (running.control for running in self._running.values())
        return nbytes <= SERVER_MOST and any(control is not None and control.is_server(pid) for control in controls)

    def servers(self) -> Mapping[Space, tuple[int, ...]]:
        """Return the pids of the servers of each space that are watched."""
        return {space: tuple(running.servers) for space, running in self._running.items()}

    def _find(self, slice_: Slice, uid: int) -> Running | None:
        """Return the space of a user in a slice that takes programs; it is made where there is none."""
        for running in list(self._running.values()):
            if self._is_over(running):
                if running.control is None:
                    self._drop(running)
            elif (running.space.slice, running.space.uid) == (slice_, uid):
                return running
        own = sum(space.uid == uid for space in self._running)
        if self._nursery is None or len(self._running) >= SPACES_MOST or own >= SPACES_EACH:
            log.warning("user %d in %.200r: no server: there are %d", uid, slice_.path, len(self._running))
            return None
        numbers = {space.number for space in self._running}
        number = next(n for n in iter(lambda: secrets.randbits(32), -1) if n and n not in numbers)
        running = self._add(Space(slice_, uid, number))
        if running.control is None:
            running.ready.set()
        else:
            self._begin(running)
        return running

    def _begin(self, running: Running) -> None:
        assert self._nursery is not None
        what = f"the server of user {running.space.uid} in {running.space.slice.path!r}"
        self._nursery.start_soon(lasting, what, partial(self._keep, running))

    def _add(self, space: Space) -> Running:
        control = None
        if self.program is not None and self.directory is not None:
            control = Control(self.program, self.directory, space)
        running = self._running[space] = Running(space, control)
        return running

    async def _keep(self, running: Running) -> None:
        """Keep the control daemon of a space running until the slice is not to have it any more and its last program
        has ended.
        """
        control, wait = running.control, AGAIN_S
        assert control is not None
        while not self._is_over(running):
            began = trio.current_time()
            try:
                if control.has_ended():
                    await self._start(running)
                await self._watch(running)
            except OSError as error:
                log.warning(
                    "user %d in %.200r: no server: %s", running.space.uid, running.space.slice.path, error.strerror
                )
                if control.has_ended():
                    running.error = error
                    running.ready.set()
                else:  # it was not looked at, and runs
                    await trio.sleep(LOOK_S)
            if control.has_ended():
                control.close()
                if trio.current_time() - began > LIVED_S:
                    wait = AGAIN_S
                if wait > WAITED_S and not running.ready.is_set():
                    running.error = running.error or fail(errno.ECHILD)
                    running.ready.set()
                with trio.move_on_after(wait):
                    while not self._is_over(running):  # noqa: ASYNC110 - writes to the books are not told
                        await trio.sleep(min(wait, LOOK_S))
                wait = min(AGAIN_MOST_S, 2 * wait)
        await self._end(running)

    async def _start(self, running: Running) -> None:
        control = running.control
        assert control is not None
        assert self.directory is not None
        await in_a_thread("the directory", self._make_directory)
        directory = self.directory
        await control.start(lambda process: Record(running.space, process).write(directory))
        running.error = None
        running.ready.set()
        await control.ask(f"start_server -uid {running.space.uid}")

    def _make_directory(self) -> None:
        assert self.directory is not None
        self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        if self.directory.stat().st_uid != os.geteuid():
            raise fail(errno.EPERM)

    async def _watch(self, running: Running) -> None:
        """Return once the control daemon has ended, or is not to run any more; look at its servers meanwhile."""
        control = running.control
        assert control is not None
        while not control.has_ended() and not self._is_over(running):
            await self._look(running, control)
            with trio.move_on_after(LOOK_S):
                await control.ended()
        await self._look(running, control)
        if control.has_ended():  # what becomes of its servers is told with it
            _forget_servers(running)
        if control.has_ended() and not self._is_over(running):
            log.warning(
                "user %d in %.200r: the control daemon ended, and is started again",
                *(running.space.uid, running.space.slice.path),
            )
            running.ready = trio.Event()
            self._tell_lost(running.space)

    async def _look(self, running: Running, control: Control) -> None:
        """Note servers that came, and that one is gone: its programs are with it, and a new one takes its place."""
        for pid in control.servers():
            if len(running.servers) >= SERVERS_MOST:
                break
            if pid not in running.servers:
                with contextlib.suppress(OSError):
                    if procfs.descent(pid).parent == (control.process and control.process.pid):
                        pidfd = os.pidfd_open(pid)
                        if has_exited(pidfd):  # it is noted already, and its parent does not know yet
                            os.close(pidfd)
                        else:
                            running.servers[pid] = pidfd
        for pid, pidfd in list(running.servers.items()):
            if has_exited(pidfd):
                os.close(pidfd)
                del running.servers[pid]
                if not self._is_over(running) and not control.has_ended():
                    self._lose(running)
        if running.is_due and trio.current_time() >= running.lost_at + running.again_s:
            running.is_due = False
            if not control.has_ended():  # a program that comes before that has one started, too
                await control.ask(f"start_server -uid {running.space.uid}")

    def _lose(self, running: Running) -> None:
        """Note that a server ended; the next is started at once, and ever later if that goes on."""
        now = trio.current_time()
        again_s = 0.0 if now - running.lost_at > LIVED_S else min(AGAIN_MOST_S, 2 * running.again_s or AGAIN_S)
        running.lost, running.lost_at, running.again_s, running.is_due = running.lost + 1, now, again_s, True
        if again_s <= WAITED_S:
            log.warning("user %d in %.200r: its server ended", running.space.uid, running.space.slice.path)
        self._tell_lost(running.space)

    async def _quit(self, running: Running) -> None:
        """Have a control daemon end with its last program. It takes no further one, by the next daemon neither."""
        control = running.control
        if control is None or control.has_ended():
            return
        if self.directory is not None:
            with contextlib.suppress(OSError):  # no room: the next daemon would have programs come to it
                Record(running.space, control.process, is_over=True).write(self.directory)
        await control.ask("quit")

    def _is_over(self, running: Running) -> bool:
        """Return whether a space takes no further program: its slice is gone, or is not to have one. It stays so."""
        if not running.retired and self.spatial(running.space.slice) != running.space.slice:
            running.retired = True
        return running.retired

    def _drop(self, running: Running) -> None:
        """Forget a space without programs that takes no further one."""
        if not any(self.members(running.space)):
            self._running.pop(running.space, None)

    async def _end(self, running: Running) -> None:
        """End a control daemon after its last program; a program that runs is not ended for it."""
        control = running.control
        assert control is not None
        running.ready.set()  # what waits for it runs by itself
        await self._quit(running)
        empty_at: float | None = None
        while not control.has_ended():
            if any(self.members(running.space)):
                empty_at = None
            elif empty_at is None:
                empty_at = trio.current_time()
            elif trio.current_time() - empty_at > QUIT_S:
                control.kill()
            with trio.move_on_after(LOOK_S):
                await control.ended()
        _forget_servers(running)
        control.close()
        try:
            await in_a_thread("the directory", control.remove)
        except OSError as error:  # a process of its user writes there, say
            log.warning("%.200s was not removed: %s", control.path, error.strerror)
        if self.directory is not None:
            with contextlib.suppress(OSError):
                (self.directory / f"{running.space.name}{RECORD}").unlink(missing_ok=True)
        self._running.pop(running.space, None)


def _forget_servers(running: Running) -> None:
    for pidfd in running.servers.values():
        os.close(pidfd)
    running.servers.clear()
