"""The daemon's side of the usher (:mod:`backend.process.ushering`): start it, tell it what is frozen, replace it.

Without the usher, a program that starts in a frozen slice runs until NVML lists it and its channels are off: 34 to
155 ms. With the usher it comes no further than the library of CUDA, which it has to open first.

The time for an answer is counted in parts, and a part counts once, however long it took, as for looks (``looks.py``):
a daemon that had no processor meanwhile finds the answer there. A part in which the usher itself could have answered
but had no processor does not count either: then it delays programs no more than everything else on such a machine.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence

import trio

from backend.common import interpreter
from backend.process import procfs
from backend.process.identity import Slice
from backend.process.ushering import CUDA, HEARD, LEASE_S, REFUSED_MOST, SAID, SAID_MOST

log = logging.getLogger(__name__)

BEAT_S = 1.0
"""Longest time between two messages, seconds: a third of the time for which one counts."""
ANSWER_S = 2.0
"""Time limit of an answer, seconds; it takes 0.1 ms. An usher without one is killed, and all waiting
programs go on.
"""
PARTS = 20
"""Parts in which the time for an answer is counted."""
STARVED_S = 10.0
"""Additional time in which the usher has no processor, seconds. After that it is replaced, and does not
count as hung.
"""
START_S = 30.0
"""Time limit of a start, seconds, with no file marked yet: an interpreter starts in 0.1 s on an idle machine."""
HANGS_S = 3600.0
"""Seconds within which a second usher that does not answer is the last one: each has held up all programs that open
the files, in any slice.
"""
TOLD_S = 1.0
"""Seconds that a writer of a freeze waits until the usher knows of it."""
AGAIN_S, AGAIN_MOST_S = 0.1, 30.0
"""Seconds until an usher that ended is replaced: the first delay, which doubles with each failure, and its maximum."""
GONE_S = 0.5
"""Seconds that a killed usher is waited for; the daemon does nothing else meanwhile."""
STEADY_S = 60.0
"""Seconds of service after which the delay of the next replacement is AGAIN_S again."""

assert BEAT_S + ANSWER_S <= LEASE_S


class Usher:
    """The usher's daemon side. Runs in the daemon's main thread, since the usher ends with that thread."""

    def __init__(
        self, files: Sequence[str], frozen: Callable[[], Collection[Slice]], facts: MutableMapping[str, str]
    ) -> None:
        """`frozen` returns the slices below which programs wait; `facts` are the facts of ``ggroup.backend``."""
        self._files = tuple(CUDA if file == CUDA else os.path.abspath(file) for file in files)
        self._frozen = frozen
        self._facts = facts
        self._wake = trio.Event()
        self._begun = trio.Event()
        self._progress = trio.Event()
        self._asked = 0  # how often the frozen slices changed
        self._heard = 0  # of these changes, how many the usher knows
        self._number = 0
        self._idle = False  # whether the log says that there is no file
        self._refused: Sequence[str] = ()
        self._hung: float | None = None  # when an usher last did not answer
        self._waiting = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._show(None)

    @property
    def pid(self) -> int | None:
        """The pid of the usher; None while there is none."""
        return None if self._process is None else self._process.pid

    def changed(self) -> None:
        """Note that the frozen slices changed; the usher is told soon."""
        self._asked += 1
        self._wake.set()

    async def told(self) -> None:
        """Return once programs that come to a slice frozen by now will wait; or after TOLD_S, or if
        there is no usher.
        """
        asked = self._asked
        with trio.move_on_after(TOLD_S):
            while self._heard < asked and self._process is not None:
                await self._progress.wait()

    async def begun(self) -> None:
        """Return once the first usher is there, or has failed."""
        await self._begun.wait()

    async def run(self) -> None:
        """Keep an usher running until cancelled; stop once two have not answered."""
        again = AGAIN_S
        while True:
            began = trio.current_time()
            try:
                with self._usher() as end:
                    await self._serve(end)
            except (OSError, trio.TooSlowError) as error:
                why = "no answer in time" if isinstance(error, trio.TooSlowError) else error.strerror
                if isinstance(error, trio.TooSlowError) and self._hangs_again():
                    break
                if trio.current_time() - began >= STEADY_S:
                    again = AGAIN_S
                log.error(
                    "usher: %s: programs that open CUDA's library in a frozen slice go on, %d that waited among them;"
                    " replaced in %g s",
                    *(why, self._waiting, again),
                )
            finally:
                self._show(None)
                self._begun.set()
            await trio.sleep(again)
            again = min(AGAIN_MOST_S, 2 * again)
        self._facts["usher"] = "off"
        log.error(
            "usher: no answer in time, again within %g s: off until the daemon is replaced (`ggroupfs upgrade`):"
            " programs that start in a frozen slice run until they are found",
            HANGS_S,
        )

    def _hangs_again(self) -> bool:
        before, self._hung = self._hung, trio.current_time()
        return before is not None and self._hung - before < HANGS_S

    async def _serve(self, end: trio.socket.SocketType) -> None:
        self._number = 0
        with trio.move_on_after(START_S) as start:
            await self._hear(end)
        if start.cancelled_caught:
            raise OSError(errno.ETIMEDOUT, "it does not start")
        while True:
            self._wake = trio.Event()
            asked = self._asked
            await self._ask(end)
            self._heard = asked
            self._step()
            self._begun.set()
            with trio.move_on_after(BEAT_S):
                await self._wake.wait()

    async def _ask(self, end: trio.socket.SocketType) -> None:
        """Tell the usher what is frozen, and wait for its answer. Raises TooSlowError where there is none, and
        OSError where it has no processor to answer, or has ended.
        """
        done, errors = trio.Event(), list[OSError]()

        async def tell() -> None:
            try:
                await self._tell(end)
            except OSError as error:
                errors.append(error)
            done.set()

        part_s, left, starved = ANSWER_S / PARTS, PARTS, round(STARVED_S / ANSWER_S * PARTS)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tell)
            while left and starved and not done.is_set():
                with trio.move_on_after(part_s):
                    await done.wait()
                if self._process is not None and lacks_processor(self._process.pid):
                    starved -= 1
                else:
                    left -= 1
            nursery.cancel_scope.cancel()
        if errors:
            raise errors[0]
        if not done.is_set():
            raise trio.TooSlowError if not left else OSError(errno.ETIMEDOUT, "it has no processor")

    async def _tell(self, end: trio.socket.SocketType) -> None:
        """Send the frozen slices, and take the answer."""
        self._number += 1
        frozen = self._frozen()
        parts = list(_parts(frozen))
        for left, part in zip(reversed(range(len(parts))), parts, strict=True):
            await end.send(SAID.pack(self._number, not left) + part)
        marked, waiting = await self._hear(end)
        if frozen and (not marked and not self._refused) != self._idle:
            self._idle = not self._idle
            if self._idle:
                log.warning("usher: none of %s is there: no program waits", ", ".join(self._files))
        if waiting != self._waiting:
            log.info("usher: %d programs of frozen slices wait to open CUDA's library", waiting)
        self._show(waiting)

    async def _hear(self, end: trio.socket.SocketType) -> tuple[int, int]:
        """Receive an answer; return how many files are marked, and how many programs wait."""
        raw = await end.recv(HEARD.size + REFUSED_MOST)
        if not raw:
            raise OSError(errno.ECHILD, "it has ended")
        number, marked, waiting, lapsed, over, paused = HEARD.unpack_from(raw)
        if number != self._number:
            raise OSError(errno.EPROTO, "it is of another version")
        refused = tuple(os.fsdecode(file) for file in raw[HEARD.size :].split(b"\0") if file)
        if number and refused != self._refused:
            self._refused = refused
            for file in refused:
                log.warning("usher: %s: its filesystem may not answer by itself: no program waits to open it", file)
        if lapsed:
            log.error("usher: heard nothing of the daemon for %g s: %d programs that waited went on", LEASE_S, lapsed)
        if over:
            log.error("usher: too many programs wait in frozen slices: %d went on", over)
        if paused:
            log.info("usher: %d programs that waited went on, as their cgroup is frozen", paused)
        return marked, waiting

    def _step(self) -> None:
        """Wake the callers that wait until the usher knows something."""
        self._progress.set()
        self._progress = trio.Event()

    def _show(self, waiting: int | None) -> None:
        self._waiting = waiting or 0
        self._facts["usher"] = "no" if waiting is None else "yes"
        self._facts["usher.waiting"] = str(self._waiting)

    @contextlib.contextmanager
    def _usher(self) -> Iterator[trio.socket.SocketType]:
        """Yield the socket of a new usher, which lasts as long as the body."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with its:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "backend.process.ushering", str(os.getpid()), *self._files],
                    stdin=its.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env=interpreter.environment(),
                    start_new_session=True,  # a terminal stops and kills groups of processes
                )
            try:
                yield trio.socket.from_stdlib_socket(ours)
            finally:
                process, self._process = self._process, None
                self._step()
                process.kill()  # even if it is stopped
                try:
                    process.wait(GONE_S)
                except subprocess.TimeoutExpired:  # it waits for a processor, or for a file
                    threading.Thread(target=process.wait, daemon=True).start()


def lacks_processor(pid: int) -> bool:
    """Return whether a process would run if it had a processor, or runs right now."""
    try:
        return procfs.status(pid).state == b"R"
    except OSError:
        return False


def _parts(slices: Collection[Slice]) -> Iterator[bytes]:
    """Yield the paths of slices in parts of at most SAID_MOST bytes, at least one part."""
    part = b""
    for slice_ in slices:
        path = os.fsencode(slice_.path) + b"\0"
        if len(path) > SAID_MOST:  # no cgroup has a path of more than PATH_MAX
            continue
        if len(part) + len(path) > SAID_MOST:
            yield part
            part = b""
        part += path
    yield part
