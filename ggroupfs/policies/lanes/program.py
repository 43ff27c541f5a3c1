"""``ggroupfs policy lanes``: the policy of Salus over a tree, for programs that announce the end of each iteration.

:class:`ggroupfs.policies.lanes.Lanes`, the object that the simulator runs as well, decides which job runs. This module
does the rest: jobs connect to a Unix socket (:mod:`ggroupfs.client.protocol`) and wait there for permission, and a
waiting job is frozen as well.

In a switch, the next job is thawed, and told to go as soon as the thaw holds; only then is the job that ended its
iteration frozen. Nothing waits for that freeze: a job does nothing before it is told to, and the freeze is for one that
does so all the same. Where memory is withdrawn the steps run one after the other, because the memory has to be free
before another job uses it. The freeze loses no work, as the iteration is over; anything the job still has on the GPU
continues in its next turn.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import attrs
import trio

from ggroupfs.client import Tree, emit
from ggroupfs.client.protocol import BYE, DEFAULT_SOCKET, END, GO, REFUSED, Announcement
from ggroupfs.policies.config import Table
from ggroupfs.policies.face import Decision, Job, Pause, Policy, Progress, Refuse, Run, Withdraw, carry_out
from ggroupfs.policies.lanes.door import Speaker, comers, listening
from ggroupfs.policies.lanes.levers import Levers
from ggroupfs.policies.lanes.orders import Order
from ggroupfs.policies.lanes.policy import Lanes

log = logging.getLogger(__name__)

T = TypeVar("T")

NS = 1_000_000_000
MS = 1_000_000
ANNOUNCE_S = 5.0
"""Seconds for which a program may be connected before it announces itself."""
TAKE_BACK_S = 10.0
"""Seconds within which all jobs have to be thawed at the end."""
MOST = 256
"""Connections at a time. Each also needs a pidfd, and a process may have 1024 descriptors by default."""


@attrs.frozen
class Settings:
    """The configuration."""

    socket: Path
    """Socket to which jobs connect."""
    gpu: int
    """Index of the GPU that the jobs share."""
    order: Order
    """Order in which the jobs run."""
    lanes: int | None
    """Largest number of lanes; None: the default of the order."""
    capacity: int | None
    """Bytes of GPU memory for jobs; None: all."""
    report: bool
    """Whether an event is emitted for each switch."""

    @classmethod
    def of(cls, config: Table) -> Settings:
        """Read the configuration. UsageError if it contains a mistake."""
        settings = cls(
            Path(config.text("socket", str(DEFAULT_SOCKET))),
            config.whole("gpu", 0),
            Order(config.choice("order", list(Order), Order.FIFO)),
            config.whole("lanes", low=1) if "lanes" in config else None,
            config.size("capacity") if "capacity" in config else None,
            config.flag("report", False),
        )
        config.finish()
        return settings


@attrs.define(eq=False)
class Guest:
    """A connected job."""

    name: str
    """Unique name: the name that the job announced, and its pid."""
    pid: int
    speaker: Speaker
    runs: bool = False
    """Whether the job was told to go and has not ended its iteration since."""
    since: int = 0
    """Time at which the job was told to go, time.monotonic_ns()."""
    ran: int = 0
    """Time during which an iteration of the job was under way, nanoseconds."""
    iterations: int = 0
    """Number of iterations that ended."""

    def go(self) -> None:
        """Tell the job to run its next iteration."""
        if self.speaker.say(GO):
            self.runs, self.since = True, time.monotonic_ns()


@attrs.frozen
class Ended:
    """The end of an iteration, or of a job."""

    guest: Guest
    """Job that ended it, or ended."""
    at: int
    """Time of the end, time.monotonic_ns()."""


@attrs.define
class Switches:
    """Durations of switches: from the end of one job or iteration until another job may begin."""

    count: int = 0
    total_ms: float = 0.0
    longest_ms: float = 0.0

    def add(self, ms: float) -> None:
        """Add one switch."""
        self.count += 1
        self.total_ms += ms
        self.longest_ms = max(self.longest_ms, ms)


class Hall:
    """All connected jobs, and the policy that decides among them, one event at a time in order of arrival."""

    def __init__(self, levers: Levers, policy: Policy, *, report: bool) -> None:
        self._levers = levers
        self._policy = policy
        self._report = report
        self._guests: dict[str, Guest] = {}
        self._lock = trio.Lock()  # protects all state here, including the levers and the policy
        self.connected = 0
        """Number of connections."""
        self._switches = Switches()

    async def serve(self, connection: socket.socket) -> None:
        """Serve one connection to its end. When cancelled, an admitted job is left for :meth:`close`."""
        speaker, guest = Speaker(connection), None
        self.connected += 1
        try:
            if self.connected > MOST:
                log.info("more than %d connections", MOST)
                return
            with trio.move_on_after(ANNOUNCE_S):
                line = await speaker.hear()
                if line is None:
                    return
                announcement = Announcement.parse(line)
                pid = speaker.pid
                guest = Guest(f"{announcement.name or 'job'}-{pid}", pid, speaker)
            if guest is not None:
                await self._stay(guest, announcement)
        except ValueError as error:
            log.info("hung up on %s: %s", guest.name if guest else "somebody", error)
        finally:
            self.connected -= 1
            if guest is None or self._guests.get(guest.name) is not guest:  # otherwise :meth:`close` closes it
                connection.close()

    async def close(self) -> None:
        """Thaw all jobs, and tell those that wait."""
        for guest in list(self._guests.values()):
            await _in_thread(partial(self._levers.discard, guest.name))
            guest.speaker.say(BYE)
            guest.speaker.connection.close()
            del self._guests[guest.name]
        if switches := self._switches.count:
            mean = self._switches.total_ms / switches
            emit("switches", count=switches, mean_ms=round(mean, 3), longest_ms=round(self._switches.longest_ms, 3))

    # The life of a job, from its arrival to its end

    async def _stay(self, guest: Guest, announcement: Announcement) -> None:
        """Serve a job until it ends. A job that violates the protocol is treated as if it had hung up."""
        try:
            pidfd = os.pidfd_open(guest.pid)
        except OSError:  # pid 0, or the process ended before this call
            guest.speaker.say(f"{REFUSED}there is no process {guest.pid} in this pid namespace")
            return
        try:
            if not await self._arrive(guest, announcement):
                return
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_at_death, pidfd, guest.speaker)
                    await self._iterate(guest)
                    nursery.cancel_scope.cancel()
            except* ValueError as group:
                log.info("hung up on %s: %s", guest.name, group.exceptions[0])
            guest.speaker.hang_up()
            await self._depart(guest)
        finally:
            os.close(pidfd)

    async def _arrive(self, guest: Guest, announcement: Announcement) -> bool:
        """Freeze a job and announce it to the policy; return whether it was accepted."""
        job = Job(guest.name, announcement.persistent, announcement.ephemeral, announcement.duration)
        async with self._lock:
            if any(other.pid == guest.pid for other in self._guests.values()):
                guest.speaker.say(f"{REFUSED}process {guest.pid} is a job already")
                return False
            try:
                await _in_thread(partial(self._levers.add, guest.name, guest.pid))
            except OSError as error:
                log.warning("%s cannot be frozen: %s", guest.name, error.strerror)
                guest.speaker.say(f"{REFUSED}it cannot be frozen: {error.strerror}")
                return False
            self._guests[guest.name] = guest
            emit("arrive", job=guest.name, persistent=job.persistent, ephemeral=job.ephemeral)
            decisions = await self._decide(partial(self._policy.job_arrive, job))
            if Refuse(guest.name) not in decisions:
                return True
            await self._forget(guest)
            emit("refuse", job=guest.name)
            guest.speaker.say(f"{REFUSED}it does not fit into {self._levers.capacity} bytes, not even alone")
            return False

    async def _iterate(self, guest: Guest) -> None:
        """Read the job's messages until it hangs up. ValueError for a message that the protocol does not allow."""
        while (line := await guest.speaker.hear()) is not None:
            at = time.monotonic_ns()
            if line != END or not guest.runs:
                raise ValueError(f"said {line[:20]!r} where that means nothing")
            guest.runs = False
            guest.ran += at - guest.since
            guest.iterations += 1
            async with self._lock:
                # FAIR equalizes the time for which a job held its lane, used or not, because it kept others out of the
                # lane.
                progress = Progress(guest.ran, guest.ran)
                event = partial(self._policy.iteration_end, guest.name, progress)
                if Pause(guest.name) not in await self._decide(event, Ended(guest, at)):
                    guest.go()

    async def _depart(self, guest: Guest) -> None:
        at = time.monotonic_ns()
        async with self._lock:
            if guest.runs:
                guest.ran += at - guest.since
            await self._decide(partial(self._policy.job_finish, guest.name), Ended(guest, at))
            await self._forget(guest)
            emit("finish", job=guest.name, iterations=guest.iterations, ran_s=round(guest.ran / NS, 6))

    async def _forget(self, guest: Guest) -> None:
        await _in_thread(partial(self._levers.discard, guest.name))
        del self._guests[guest.name]

    # Events

    async def _decide(self, event: Callable[[], Sequence[Decision]], ended: Ended | None = None) -> Sequence[Decision]:
        """Pass an event to the policy, carry out its decisions, tell the jobs that may go, and return the decisions.

        A job that goes in place of the one that `ended` an iteration, or ended, counts as a switch.
        """
        decisions = event()
        turns = [one for one in decisions if isinstance(one, Run | Pause)]
        if any(isinstance(one, Withdraw) for one in decisions) or len({one.job for one in turns}) < len(turns):
            await _in_thread(partial(carry_out, decisions, self._levers))
            for decision in decisions:
                if isinstance(decision, Withdraw):
                    emit("withdraw", job=decision.job)
                elif isinstance(decision, Run):
                    self._let(decision.job, ended)
        else:
            # The next job first: in the driver its thaw would queue behind the freeze of the other.
            for kind in (Run, Pause):
                async with trio.open_nursery() as nursery:
                    for turn in turns:
                        if isinstance(turn, kind):
                            nursery.start_soon(self._turn, turn, ended)
        return decisions

    async def _turn(self, decision: Run | Pause, ended: Ended | None) -> None:
        await _in_thread(partial(carry_out, [decision], self._levers))
        if isinstance(decision, Run):
            self._let(decision.job, ended)

    def _let(self, job: str, ended: Ended | None) -> None:
        """Tell a job that has been thawed to go."""
        guest = self._guests[job]
        if job in self._levers.stuck:
            guest.speaker.hang_up()  # the other jobs continue without this one
            return
        guest.go()
        if ended is not None and guest.runs:
            ms = (guest.since - ended.at) / MS
            self._switches.add(ms)
            log.debug("%s to %s: %.3f ms", ended.guest.name, job, ms)
            if self._report:
                ran_s, monotonic_s = round(ended.guest.ran / NS, 6), round(guest.since / NS, 6)
                fields = {"ms": round(ms, 3), "ran_s": ran_s, "monotonic_s": monotonic_s}
                emit("switch", **{"from": ended.guest.name, "to": job, **fields})


async def run(tree: Tree, config: Table) -> None:
    """Run the policy until it is cancelled."""
    settings = Settings.of(config)
    capacity = await tree.capacity(settings.gpu) if settings.capacity is None else settings.capacity
    levers = await _in_thread(partial(Levers, tree.mount, settings.gpu, capacity))
    hall = Hall(levers, Lanes(capacity, settings.order, settings.lanes), report=settings.report)
    try:
        with listening(settings.socket) as listener:  # closed first, so that released jobs do not connect again
            async with trio.open_nursery() as nursery:
                await tree.ready()
                async for connection in comers(listener):
                    nursery.start_soon(hall.serve, connection)
    finally:
        with trio.move_on_after(TAKE_BACK_S, shield=True):
            await hall.close()


async def _at_death(pidfd: int, speaker: Speaker) -> None:
    """Hang up on a process that has ended; its children may still hold the socket."""
    await trio.lowlevel.wait_readable(pidfd)
    speaker.hang_up()


async def _in_thread(work: Callable[[], T]) -> T:
    return await trio.to_thread.run_sync(work)
