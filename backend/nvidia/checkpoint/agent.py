"""The agent: a process that carries out one request on one program.

It reads the request from stdin and writes a line to stdout for each step that begins or ends, the outcome last. If
the request says that the agent asks first, another line comes on stdin once the program may be acted on, or end of
file if it may not. An optional argument is the descriptor of the page of a program that stands by then
(:mod:`backend.cuda.page`).

It is a process of its own because calls of libcuda can hang, because no part of CUDA may live in the daemon, and
because the daemon may end: a locked or checkpointed program is helpless, so once a request is read only SIGKILL keeps
the agent from finishing it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
import traceback

import attrs

from backend.common.errors import errno_of
from backend.cuda.page import stands
from backend.nvidia.checkpoint.journal import Journal
from backend.nvidia.checkpoint.library import Library
from backend.nvidia.checkpoint.machine import Machine
from backend.nvidia.checkpoint.pinned import Pinned
from backend.nvidia.checkpoint.records import Action, Driver, Outcome, Progress, Request, State, Step

IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGQUIT)
LINE = 1 << 16
LANDED = {Step.RESERVE: False, Step.LOCK: False, Step.RETURN: False, Step.RESTORE: True}
"""Steps from which on a locked program is at the destination (True), or is not (False). A restore goes on in the
program when its agent dies, so a restore that began counts. The first two are those with which an action begins to
have an effect.
"""


class Agent:
    """One request, and the journal of its steps."""

    def __init__(self, request: Request, driver: Driver, page: int | None = None) -> None:
        self._request = request
        self._page = page
        self._driver = driver
        self._journal: Journal | None = None

    def run(self) -> Outcome:
        """Carry out the request and return its outcome. Raises only on a bug."""
        try:
            return self._run()
        except OSError as error:
            gone = isinstance(error, ProcessLookupError)
            words = "the program has ended" if gone else error.strerror or str(error)
            return Outcome(None, "", errno_of(error), Step.STATE, words)

    def _run(self) -> Outcome:
        pinned = Pinned(self._request.process)
        try:
            if self._request.action is Action.STATE:
                return self._machine(pinned).run(self._request)
            if self._request.action is not Action.RECOVER:
                pinned.responds()
            self._journal = Journal(self._request.process, wait=self._request.action is Action.RECOVER)
            return self._journalled(pinned, self._journal)
        finally:
            pinned.close()

    def _journalled(self, pinned: Pinned, journal: Journal) -> Outcome:
        before = journal.before
        place = "" if self._request.action is Action.RESUME else self._request.source
        if self._request.action is Action.RECOVER:
            # What the dead agent knew is more reliable than what the caller believes.
            place = "" if before is None else before.place
            self._request = self._request if before is None else attrs.evolve(before.request, action=Action.RECOVER)
        outcome = None
        try:
            outcome = self._machine(pinned).run(self._request, place)
            return outcome
        finally:
            # The file is kept while the program waits for another agent; not if another process has locked the program.
            journal.close(keep=journal.written and not (outcome is not None and _settled(outcome)))

    def _machine(self, pinned: Pinned) -> Machine:
        return Machine(
            *(self._driver, pinned.check, self._report, time.monotonic, time.sleep),
            ready=_allowed,
            stands=lambda: self._page is not None and stands(self._page),
        )

    def _report(self, progress: Progress) -> None:
        if self._journal is not None and progress.ms is None and progress.step in LANDED:
            place = self._request.destination if LANDED[progress.step] else self._request.source
            self._journal.write(self._request, progress.step, place)
        _say(progress)


def _allowed() -> None:
    if not sys.stdin.buffer.readline(LINE):
        raise OSError(errno.ECANCELED, "it is not wanted any more")


def _settled(outcome: Outcome) -> bool:
    others = outcome.step is Step.LOCK and outcome.errno == errno.EBUSY
    return others or outcome.errno == errno.ESRCH or outcome.state in (State.RUNNING, State.FAILED)


def _say(what: Progress | Outcome) -> None:
    """Write a line to stdout, even if it is not read: a pipe has room for the thirty or so lines of a request."""
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), what.line())


def main() -> int:
    """Read a request and carry it out."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.readline(LINE)
    try:
        if not line.endswith(b"\n"):
            raise ValueError("no whole request")
        request = Request.read(line)
    except ValueError as error:
        print(f"{__package__}: {error}", file=sys.stderr)
        return 2
    try:
        outcome = Agent(request, Library(), int(sys.argv[1]) if len(sys.argv) > 1 else None).run()
    except Exception as error:
        traceback.print_exc()
        outcome = Outcome(None, "", errno.EIO, None, f"{type(error).__name__}: {error}")
    _say(outcome)
    return 0
