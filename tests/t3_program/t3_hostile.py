"""Level 3: programs that fight their settings, against a driver in memory whose calls take realistic time."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import random
import resource
import socket
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import backend.cuda.server
import backend.soft.server
from backend.common.errors import fail
from backend.cuda.holding import AWAY_MOST
from backend.door import tenants
from backend.door.peers import peer_of
from backend.door.wire import CUDA, VERSION, Message, Op
from backend.nvidia import discover, rm, tenant
from backend.nvidia.keeper import QUESTIONS, TICK
from backend.nvidia.nvml import Nvml
from backend.nvidia.opening import open_gpus
from backend.process.identity import Process
from backend.scheduler.use import ACTIVE_US, LEAD_US, WORD_US, Sample, Use
from tests.support.cuda_session import CONTEXT, U64, Drive, drive, pieces
from tests.support.cuda_session import Rig as Session
from tests.support.fake_nvidia import FakeBookkeeper, FakeNvml, FakeSystem, Program, patient
from tests.support.harness import REAL_S, Spawn, until, virtual
from tests.support.nvidia_rig import Rig, running
from tests.support.nvidia_rig import drive as plain

__all__ = ["drive", "pieces"]  # fixtures

COSTS = {rm.FIFO_GET_CHANNEL_STATE: 200e-6, rm.SET_TIMESLICE: 300e-6}
"""Seconds that a call of the driver takes (docs/nvidia.md)."""
LOOK_UP = 5e-6
"""Seconds of any other call, which the driver answers from its own memory; our part included."""
A_CHANNEL = 50e-6
"""Seconds of FIFO_DISABLE_CHANNELS for each channel: 0.94 ms for 20."""
SECOND = 1.0 + 0.001


@pytest.fixture(autouse=True)
def patient_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extend a real-time wait: a thousand threads contend for this machine and for the interpreter."""
    monkeypatch.setattr(discover, "WAIT_S", 60.0)


@attrs.define
class Costly(Rig):
    """A rig whose virtual clock advances by the cost of the driver's calls."""

    clock: MockClock
    spent: float = 0.0
    """Seconds spent in the driver."""
    calls: Counter[int] = attrs.field(factory=Counter)

    def undo(self, program: Program, channels: Sequence[int] | None = None) -> None:
        """Enable channels of a program, as its own FIFO_DISABLE_CHANNELS would."""
        for channel in program.channels() if channels is None else channels:
            program.objects[channel].disabled = 0

    async def until_all(self, condition: Callable[[], bool], seconds: float) -> float:
        """Wait for a condition, for `seconds` at most; return how long it took, in virtual seconds."""
        began = trio.current_time()
        with trio.move_on_after(seconds):
            while not condition():  # noqa: ASYNC110 - it is found by polling
                await trio.sleep(0.01)
        assert condition(), f"not within {seconds} s"
        return trio.current_time() - began


def costly(test: Callable[[Costly], Awaitable[None]], trace: bool = True) -> None:
    """Run a test with two GPUs whose calls cost time."""
    fake, nvml = FakeSystem(), FakeNvml()
    if not trace:
        fake.trace = None
    clock = MockClock(autojump_threshold=0.005)

    async def main() -> None:
        gpus = await open_gpus(system=fake, nvml=Nvml(nvml), selftest=False)  # type: ignore[arg-type]
        rig = Costly(fake, nvml, gpus, FakeBookkeeper(), clock)

        def cost(cmd: int) -> None:
            seconds = COSTS.get(cmd, LOOK_UP)
            if cmd == rm.FIFO_DISABLE_CHANNELS:
                seconds = A_CHANNEL * 20
            rig.spent += seconds
            rig.calls[cmd] += 1
            clock.jump(seconds)

        fake.before = cost
        await test(rig)

    with patient(clock, lambda: False):
        trio.run(main, clock=clock)


class KnowsAll(FakeBookkeeper):
    def knows(self, process: Process, gpu: int) -> bool:
        return True


def frozen(programs: Sequence[Program]) -> bool:
    return all(program.objects[channel].disabled for program in programs for channel in program.channels())


@pytest.mark.logs(r"undid its freeze")
@pytest.mark.parametrize(("many", "contexts"), [(1, 1), (1, 8), (20, 3), (100, 3)])
def test_all_who_undo_their_freeze_at_once_are_frozen_again_within_a_second(many: int, contexts: int) -> None:
    """No channel is disabled twice, so each program runs after its thaw."""

    async def test(rig: Costly) -> None:
        programs = [rig.busy(pid, *[0] * contexts) for pid in range(100, 100 + many)]
        async with running(rig):
            for program in programs:
                await rig.gpus[0].detach(program.identity)
            await trio.sleep(3)
            for program in programs:
                rig.undo(program)
            await rig.until_all(lambda: frozen(programs), SECOND)
            await trio.sleep(3)
            counts = {program.objects[channel].disabled for program in programs for channel in program.channels()}
            assert counts == {1}
            assert all(rig.bookkeeper.brought_back[program.identity] == 1 for program in programs), "counted once"

    costly(test, trace=False)


@pytest.mark.logs(r"undid its freeze")
@pytest.mark.parametrize("many", [1, 20])
def test_one_channel_that_runs_kernels_is_enough(many: int) -> None:
    """Without a trace it is found in the round, which takes c / 200 s for c channels in total. With a trace, it is
    found within a second after its work shows there."""

    async def test(rig: Costly) -> None:
        programs = [rig.busy(pid, 0) for pid in range(100, 100 + many)]
        async with running(rig):
            for program in programs:
                await rig.gpus[0].detach(program.identity)
            await trio.sleep(3)
            channel = programs[-1].channels()[random.randrange(8)]
            rig.undo(programs[-1], [channel])
            law = max(1.0, many * 20 / 200)
            await rig.until_all(lambda: frozen(programs), 2 * law)  # at worst at the end of the second round
            await rig.until_all(lambda: rig.bookkeeper.brought_back[programs[-1].identity] == 1, SECOND)
            counts = {program.objects[channel].disabled for program in programs for channel in program.channels()}
            assert counts == {1}, "what was off is off as often as before"

    costly(test, trace=False)


@pytest.mark.logs(r"undid its freeze")
def test_who_had_the_engine_is_asked_before_the_others() -> None:
    """A hundred frozen programs with three contexts each have 6000 channels: one program enables a single channel."""

    async def test(rig: Costly) -> None:
        programs = [rig.busy(pid, 0, 0, 0) for pid in range(100, 200)]
        culprit = programs[57]
        used = Counter[int]()
        rig.gpus[0]._usage.exact = lambda process: used[process.pid]  # type: ignore[method-assign]
        rig.gpus[0]._keeper._used = rig.gpus[0]._usage.exact
        async with running(rig):
            for program in programs:
                await rig.gpus[0].detach(program.identity)
            await trio.sleep(3)
            rig.undo(culprit, [culprit.channels()[24]])  # a channel for kernels of its second context
            used[culprit.pid] += 5000
            await rig.until_all(lambda: frozen(programs), SECOND)
            await rig.until_all(lambda: rig.bookkeeper.brought_back[culprit.identity] == 1, SECOND)

    costly(test)


@pytest.mark.logs(r"undid its timeslice")
@pytest.mark.parametrize(("many", "contexts"), [(1, 8), (20, 3), (100, 3)])
def test_all_who_take_longer_timeslices_lose_them_within_a_second(many: int, contexts: int) -> None:
    async def test(rig: Costly) -> None:
        programs = [rig.busy(pid, *[0] * contexts) for pid in range(100, 100 + many)]
        gr = [o for p in programs for o in p.objects.values() if o.class_ == rm.CLASS_TSG and o.timeslice == 2048]
        async with running(rig):
            for program in programs:
                await rig.gpus[0].set_timeslice(program.identity, 600)
            share = {tsg.timeslice for tsg in gr}
            assert share == {600 // contexts}
            await trio.sleep(3)
            for tsg in gr:
                tsg.timeslice = 1_000_000
            await rig.until_all(lambda: {tsg.timeslice for tsg in gr} == share, SECOND)
            await trio.sleep(2)
            assert all(rig.bookkeeper.brought_back[program.identity] == 1 for program in programs)

    costly(test, trace=False)


@pytest.mark.logs(r"undid its timeslice")
@pytest.mark.parametrize("late", [0.0, 0.2, 0.8, 3.0])
def test_who_sets_the_timeslice_of_a_new_context_has_undone_nothing(late: float) -> None:
    """The CUDA library sets it some time after the TSG was made: ours is set again, and the program is not blamed. A
    program that does so once more is."""

    async def test(rig: Costly) -> None:
        program = rig.busy(100, 0)
        gr = [o for o in program.objects.values() if o.class_ == rm.CLASS_TSG and o.timeslice == 2048]
        async with running(rig):
            await rig.gpus[0].set_timeslice(program.identity, 600)
            await trio.sleep(late)
            assert {tsg.timeslice for tsg in gr} == {600}
            for tsg in gr:
                tsg.timeslice = 2048
            await rig.until_all(lambda: {tsg.timeslice for tsg in gr} == {600}, SECOND)
            await trio.sleep(2)
            assert rig.bookkeeper.brought_back[program.identity] == 0
            again = [1] if late > 1 else [0, 1]  # the excuse is not used up within the first second
            for count in again:
                for tsg in gr:
                    tsg.timeslice = 2048
                await rig.until_all(lambda: {tsg.timeslice for tsg in gr} == {600}, SECOND)
                await trio.sleep(2)
                assert rig.bookkeeper.brought_back[program.identity] == count

    costly(test, trace=False)


@pytest.mark.parametrize("many", [20, 100, 1000])
def test_what_keeping_costs_does_not_grow_with_the_programs(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 200 questions a second are asked, 4 percent of a CPU, and looks for new objects take a tenth of a CPU.
    Each program is checked every max(0.5, n / 200) s."""

    monkeypatch.setattr(discover, "FIRST_RUN", 64)  # the first looks are not measured here

    async def test(rig: Costly) -> None:
        gpu, asked = rig.gpus[0], dict[int, list[float]]()
        for pid in range(100, 100 + many):
            rig.fake.program(pid).tsg(channels=2)
        identities = [program.identity for program in rig.fake.programs.values()]
        cost, rig.fake.before = rig.fake.before, lambda cmd: None
        with monkeypatch.context() as first:
            first.setattr(discover, "WIDE_RUN", 64)
            async with trio.open_nursery() as nursery:
                for identity in identities:
                    nursery.start_soon(gpu.detach, identity)
        rig.fake.before = cost
        gpu.managed.bookkeeper = KnowsAll()  # type: ignore[assignment]
        law = max(0.5, many / 200)
        real = gpu._states.enabled

        def enabled(client: int, channel: int) -> bool | None:
            asked.setdefault(client, []).append(rig.clock.current_time())
            return real(client, channel)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(gpu._keeper.run)
            await trio.sleep(law)
            gpu._states.enabled = enabled  # type: ignore[method-assign]
            before, seconds = rig.spent, 2.5 * law
            await trio.sleep(seconds)
            assert rig.spent - before < 0.14 * seconds
            nursery.cancel_scope.cancel()
        assert len(asked) == many
        assert sum(map(len, asked.values())) <= QUESTIONS / TICK * seconds + QUESTIONS
        for times in asked.values():
            assert max(b - a for a, b in itertools.pairwise(times)) <= law * 1.1 + TICK

    costly(test, trace=False)


@pytest.mark.logs(r"undid its freeze")
def test_one_who_never_stops_costs_a_bounded_share_and_hides_nobody() -> None:
    """Twenty programs undo it in a loop, and one undoes it once: that one is found as soon as ever, and for more than a
    third of the time no thread is in the driver."""

    async def test(rig: Costly) -> None:
        loop = [rig.busy(pid, *[0] * 8) for pid in range(100, 120)]
        once = rig.busy(500, 0)
        async with running(rig):
            for program in [*loop, once]:
                await rig.gpus[0].detach(program.identity)
            await trio.sleep(3)

            async def undo() -> None:
                while True:
                    for program in loop:
                        rig.undo(program)
                    await trio.sleep(0.01)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(undo)
                await trio.sleep(1)
                before, began = rig.spent, trio.current_time()
                rig.undo(once)
                await rig.until_all(lambda: frozen([once]), SECOND)
                await trio.sleep(5)
                elapsed = trio.current_time() - began
                assert rig.spent - before < 2 / 3 * elapsed + 0.05  # the last round rests after the end
                nursery.cancel_scope.cancel()
            assert min(rig.bookkeeper.brought_back[program.identity] for program in loop) > 5

    costly(test, trace=False)


# ---- identities ------------------------------------------------------------------------------------------------------


def test_a_program_that_renumbers_its_files_is_frozen_all_the_same() -> None:
    """It uses dup2 and close; its objects are reached through the file, whatever number that has."""

    async def test(rig: Rig) -> None:
        program = rig.busy(5, 0)
        async with running(rig):
            await trio.sleep(1)
            program.files[50], program.ctl = program.files.pop(9), 50
            await rig.gpus[0].detach(program.identity)
            assert frozen([program])
            await rig.gpus[0].attach(program.identity)
            assert all(program.running())

    plain(test)


def test_a_program_that_never_stops_renumbering_is_not_said_to_be_frozen() -> None:
    async def test(rig: Rig) -> None:
        program = rig.busy(5, 0)
        real = rig.fake.pidfd_open

        def renumber(pid: int) -> int:
            after = program.ctl + 1
            program.files[after], program.ctl = program.files.pop(program.ctl), after
            return real(pid)

        async with running(rig):
            await trio.sleep(3)
            rig.fake.pidfd_open = renumber  # type: ignore[method-assign]
            with pytest.raises(OSError, match=r"files of this program change|no channel group"):
                await rig.gpus[0].detach(program.identity)
            rig.fake.pidfd_open = real  # type: ignore[method-assign]

    plain(test)


def test_a_client_that_outlived_its_maker_is_not_put_down_to_who_has_the_pid_now() -> None:
    """NVML reports the pid that made a client. Its file may be a child's by now, and the pid another process's."""

    async def test(rig: Rig) -> None:
        stranger = rig.fake.program(7)
        files, stranger.files = stranger.files, {}
        rig.nvml.compute[0] = [(7, 80 << 30)]
        async with running(rig):
            await trio.sleep(2)
            assert rig.bookkeeper.arrived == []
            assert rig.bookkeeper.seen == {}
            stranger.files = files  # it uses the GPU on its own
            stranger.context()
            await trio.sleep(1)
            assert rig.bookkeeper.arrived == [(stranger.identity, 0)]

    plain(test)


STEPS = ("pidfd_open", "start_time", "pidfd_getfd", "control_fds", "ioctl")
"""Calls between which a process can die, and another be born with its pid."""


async def _freeze(rig: Rig, program: Program) -> None:
    await rig.gpus[0].detach(program.identity)


async def _slice(rig: Rig, program: Program) -> None:
    await rig.gpus[0].set_timeslice(program.identity, 500)


async def _thaw(rig: Rig, program: Program) -> None:
    await rig.gpus[0].attach(program.identity)


async def _look(rig: Rig, program: Program) -> None:
    await rig.gpus[0]._tenant(program.identity).look(True)


async def _again(rig: Rig, program: Program) -> None:
    known = rig.gpus[0]._tenant(program.identity)
    if known.questions.is_thawed() or known.timeslices.is_stretched(0.0):
        await known.enforce(again=True)


@pytest.mark.logs
@pytest.mark.parametrize("operation", [_freeze, _slice, _thaw, _look, _again])
def test_a_pid_that_is_recycled_between_any_two_steps_is_nobody_we_act_on(
    operation: Callable[[Rig, Program], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new process has the pid, the same descriptors and, where RM could reuse them, the very same handles."""
    monkeypatch.setattr(tenant.log, "warning", lambda *words: None)
    for name in ("FIRST_RUN", "WIDE_RUN"):
        monkeypatch.setattr(discover, name, 64)
    tried = 0

    async def attempt(rig: Rig, at: int) -> bool:
        """Replace the process before step `at`; return whether there is such a step."""
        program = rig.fake.program(5, 0)
        await rig.gpus[0].set_timeslice(program.identity, 900)
        await rig.gpus[0].detach(program.identity)
        if operation in (_freeze, _look):
            await rig.gpus[0].attach(program.identity)
        if operation is _again:
            for channel in program.channels():
                program.objects[channel].disabled = 0
        steps, newcomer = itertools.count(), list[Program]()

        def replace() -> None:
            if next(steps) != at:
                return
            file, index, start = program.files[9], program.client - 0xC1D00000, program.start + 1
            rig.fake.kill(5)
            if not file.clients:  # otherwise RM still has the client
                rig.fake.index = index
            newcomer.append(rig.fake.program(5, 0, start=start))

        for name in STEPS:
            real = getattr(FakeSystem, name)

            def step(*words: Any, real: Callable[..., Any] = real) -> Any:
                replace()
                return real(rig.fake, *words)

            setattr(rig.fake, name, step)
        try:
            await operation(rig, program)
        except (ProcessLookupError, rm.RmError):
            pass
        finally:
            for name in STEPS:
                rig.fake.__dict__.pop(name, None)
        if not newcomer:
            return False
        assert all(newcomer[0].running()), at
        tsgs = [found.timeslice for found in newcomer[0].objects.values() if found.class_ == rm.CLASS_TSG]
        assert tsgs == [2048, 1024, 1024, 1024], at
        rig.gpus[0].forget(program.identity)
        rig.fake.kill(5)
        rig.fake.index += 100
        return True

    async def test(rig: Rig) -> None:
        nonlocal tried
        while await attempt(rig, tried):
            # Looks at handles are many and all alike: a sample is enough.
            tried += 1 if tried < 60 else 7

    plain(test)
    assert tried > 20


def recycled(start: Callable[[], subprocess.Popen[bytes]], pid: int) -> subprocess.Popen[bytes] | None:
    """Return a process with that very pid, unless another process takes it first."""
    for _ in range(200):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        process = start()
        if process.pid == pid:
            return process
    return None


def test_who_connects_and_dies_does_not_speak_for_who_has_its_pid_then(tmp_path: Path, spawn: Spawn) -> None:
    """Its child keeps the connection, and waits until the pid is another process's."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        program = (
            "import os, socket, sys, time\n"
            "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1])\n"
            "if os.fork(): os._exit(0)\n"
            "s.recv(1)\n"
        )
        with subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "socket")]) as child:
            child.wait()
        newcomer = recycled(spawn, child.pid)
        assert newcomer is not None, "the pid never came back"
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4) == child.pid.to_bytes(4, "little")
            with pytest.raises(ProcessLookupError):
                trio.run(peer_of, connection)
        # A process that lives is itself.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            assert trio.run(peer_of, ours).pid == os.getpid()


# ---- the socket ------------------------------------------------------------------------------------------------------


class Echo:
    """A session that answers every request."""

    def __init__(self, process: Process, line: tenants.Line) -> None:
        self.process, self._line = process, line

    async def run(self) -> None:
        while message := await self._line.receive():
            await self.answer(message)

    async def answer(self, message: Message) -> None:
        await self._line.send(message.answer())

    def close(self) -> None:
        pass


async def connected(path: str) -> trio.socket.SocketType:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.setblocking(False)
    while True:
        try:
            end.connect(path)
        except BlockingIOError:  # the queue is full
            await trio.lowlevel.checkpoint()
        else:
            return trio.socket.from_stdlib_socket(end)


async def answered(end: trio.socket.SocketType, seq: int = 1) -> bool:
    """Return whether the peer answers; False if the connection was dropped."""
    try:
        await end.send(Message(Op.LIMITS, seq).encode())
        raw = await end.recv(64)
    except (BrokenPipeError, ConnectionResetError):
        return False
    assert not raw or Message.decode(raw).seq == seq
    return bool(raw)


@pytest.mark.parametrize("door", [backend.soft.server.Session, backend.cuda.server.Session])
@pytest.mark.parametrize("requests", [1, 3])
def test_who_is_killed_leaves_no_garbage(tmp_path: Path, door: Callable[..., tenants.Session], requests: int) -> None:
    """Thirty clients are killed with an answer unread (ECONNRESET), or with requests unread (EPIPE for the answer).
    Cyclic garbage would stay for hours, since the daemon rarely collects it; it was eighty objects each."""
    path, many, ended = tmp_path / "socket", 30, trio.Event()
    sessions: list[tenants.Session] = []

    class Watched:
        """A session that records that it has ended."""

        def __init__(self, process: Process, line: tenants.Line) -> None:
            self.process, self._session = process, door(process, {}, line)
            sessions.append(self)

        async def run(self) -> None:
            await self._session.run()

        def close(self) -> None:
            self._session.close()
            ended.set()

    async def main() -> None:
        nonlocal ended
        with tenants.listening(path) as listener:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tenants.serve, listener, Watched)
                for _ in range(many):
                    ended = trio.Event()
                    with await connected(str(path)) as end:
                        for number in range(requests):
                            await end.send(Message(Op.HELLO, number + 1, args=(VERSION, CUDA)).encode())
                        if requests == 1:
                            await trio.lowlevel.wait_readable(end)
                    await ended.wait()
                sessions.clear()
                await wait_all_tasks_blocked()
                assert gc.collect() < many, "what was found is not from each of them"
                nursery.cancel_scope.cancel()

    gc.collect()
    gc.disable()
    try:
        trio.run(main)
    finally:
        gc.enable()


async def come(path: Path, uid: int) -> trio.socket.SocketType:
    """Return a connection of another user."""
    os.seteuid(uid)
    try:
        return await connected(str(path))
    finally:
        os.seteuid(0)


@pytest.mark.logs("user 1000: more than 3 connections: dropped")
def test_connections_of_one_user_are_bounded(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next connection is dropped until the user closes another. Existing ones go on, and other users come in."""
    monkeypatch.setattr(tenants, "CONNECTIONS", 3)

    async def main() -> None:
        path = public / "socket"
        with tenants.listening(path) as listener, contextlib.ExitStack() as stack:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tenants.serve, listener, Echo)
                his = [stack.enter_context(await come(path, 1000)) for _ in range(3)]
                assert [await answered(end) for end in his] == [True] * 3
                for _ in range(5):
                    with await come(path, 1000) as end:
                        assert not await answered(end)
                for uid in (1001, 0):
                    others = [stack.enter_context(await come(path, uid)) for _ in range(3)]
                    assert [await answered(end) for end in others] == [True] * 3
                assert [await answered(end, 2) for end in his] == [True] * 3
                his[0].close()
                with trio.fail_after(REAL_S):
                    while True:  # the daemon hears of the close a moment later
                        with await come(path, 1000) as end:
                            if await answered(end):
                                break
                nursery.cancel_scope.cancel()

    trio.run(main)


class Full:
    """A listener whose next calls of accept(2) fail."""

    def __init__(self, listener: trio.socket.SocketType, *codes: int) -> None:
        self._listener, self.codes, self.tries = listener, list(codes), 0

    async def accept(self) -> Any:
        self.tries += 1
        if self.codes:
            await trio.lowlevel.checkpoint()
            raise fail(self.codes.pop(0))
        return await self._listener.accept()


@pytest.mark.logs("no room for another program: ", "a program cannot be served: Too many open files", "were left out")
@virtual
async def test_no_room_for_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connected programs are served all the time. A new one waits, or is dropped where no descriptor is left to
    identify it; none of them makes the daemon retry without a pause."""
    path = tmp_path / "socket"
    with tenants.listening(path) as listener:
        door = Full(listener)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tenants.serve, door, Echo)
            with await connected(str(path)) as early:
                assert await answered(early)
                door.codes = list(tenants.ACCEPT_AGAIN) * 10
                wanted, tries, began = len(door.codes), door.tries, trio.current_time()
                with await connected(str(path)) as raised, await connected(str(path)) as late:
                    assert await answered(raised), "it was waited for already"
                    assert await answered(early, 2)
                    await trio.sleep(wanted * tenants.ACCEPT_AGAIN_S / 2)
                    assert door.tries - tries <= wanted / 2 + 2
                    assert await answered(early, 3)
                    await trio.sleep(wanted * tenants.ACCEPT_AGAIN_S)
                    assert await answered(late)
                    assert trio.current_time() - began >= wanted * tenants.ACCEPT_AGAIN_S
                with monkeypatch.context() as patch:
                    patch.setattr(tenants, "Caller", lambda connection: full())
                    with await connected(str(path)) as unknown:
                        assert not await answered(unknown)
                with await connected(str(path)) as known:
                    assert await answered(known)
                assert await answered(early, 4)
            nursery.cancel_scope.cancel()


@pytest.mark.logs("no room for another program: Too many open files")
@virtual
async def test_who_comes_with_hardly_a_descriptor_left_is_not_hung_up_on(tmp_path: Path) -> None:
    """It is accepted once there are enough descriptors to identify and serve it."""
    path = tmp_path / "socket"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with tenants.listening(path) as listener, contextlib.ExitStack() as stack:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tenants.serve, listener, Echo)
            with await connected(str(path)) as early, await connected(str(path)) as late:
                assert await answered(early)
                stack.callback(late.close)
                stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 32, hard))
                newcomer = await connected(str(path))
                stack.callback(newcomer.close)
                taken: list[int] = []
                with contextlib.suppress(OSError):
                    while True:
                        taken.append(os.eventfd(0))
                os.close(taken.pop())
                there: bool | None = None
                with trio.move_on_after(1):
                    there = await answered(newcomer)
                assert there is not False, "it is not hung up on"
                assert await answered(early, 2)
                while taken:
                    os.close(taken.pop())
                assert there or await newcomer.recv(64)
            nursery.cancel_scope.cancel()


def full() -> Process:
    """Fail as any call does that needs a descriptor."""
    raise fail(errno.EMFILE)


def test_a_flood_takes_one_turn_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three hundred connections of one user send all they can. A neighbour's request waits for a few of their messages,
    not for one of each. Other connections send garbage: the log has one line a second."""
    many, handled, lines = 300, [0], list[str]()
    monkeypatch.setattr(tenants.log, "warning", lambda *words: lines.append(words[0]))
    uids = itertools.chain([1000] * many, itertools.repeat(1001))
    monkeypatch.setattr(tenants, "user_of", lambda connection: next(uids))

    class Counted(Echo):
        async def answer(self, message: Message) -> None:
            handled[0] += 1
            await super().answer(message)

    async def flood(path: str) -> None:
        with await connected(path) as end:
            async with trio.open_nursery() as nursery:

                async def read() -> None:
                    while True:
                        await end.recv(64)

                nursery.start_soon(read)
                while True:
                    await end.send(Message(Op.LIMITS, 1).encode())

    async def garbage(path: str) -> None:
        while True:
            with await connected(path) as end:
                await end.send(b"x")
                await end.recv(1)

    async def main() -> None:
        path = tmp_path / "socket"
        with tenants.listening(path) as listener:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tenants.serve, listener, Counted)
                for _ in range(many):
                    nursery.start_soon(flood, str(path))
                await until(lambda: handled[0] > 2 * many, "all are there")
                with await connected(str(path)) as end:
                    waits = []
                    for seq in range(20):
                        before = handled[0]
                        await end.send(Message(Op.LIMITS, seq + 1).encode())
                        assert Message.decode(await end.recv(64)).seq == seq + 1
                        waits.append(handled[0] - before)
                    assert max(waits[1:]) <= 20, waits
                for _ in range(20):
                    nursery.start_soon(garbage, str(path))
                connections = handled[0]
                await until(lambda: handled[0] > connections + 500, "it goes on")
                nursery.cancel_scope.cancel()

    trio.run(main)
    assert 1 <= len(lines) <= 60


@virtual
async def test_the_socket_is_where_nobody_else_can_put_one(tmp_path: Path) -> None:
    """Directories that another user owns or may write to, on the way and at the end, through links too, are refused."""

    def refused(path: Path) -> str:
        with pytest.raises(OSError, match=r"socket|directory") as caught, tenants.listening(path):
            raise AssertionError("it listens")
        return caught.value.strerror or ""

    good = tmp_path / "good"
    with tenants.listening(good / "socket"):
        assert (good / "socket").stat().st_mode & 0o777 == 0o666
    theirs = tmp_path / "theirs"
    (theirs / "ours").mkdir(parents=True)
    os.chown(theirs, 1000, 1000)
    assert "user 1000 owns" in refused(theirs / "socket")
    assert "user 1000 owns" in refused(theirs / "ours" / "socket")
    (tmp_path / "link").symlink_to(theirs / "ours")
    assert "user 1000 owns" in refused(tmp_path / "link" / "socket")
    for mode in (0o777, 0o1777, 0o775):
        public = tmp_path / f"public{mode:o}"
        public.mkdir()
        public.chmod(mode)
        assert "others may write" in refused(public / "socket")
        (public / "ours").mkdir()
        if mode & 0o1000:  # sticky, as /tmp
            with tenants.listening(public / "ours" / "socket"):
                pass
        else:
            assert "others may write" in refused(public / "ours" / "socket")
    # A path that is no socket is left alone, and so is the target of a link.
    (good / "precious").write_text("data")
    (good / "socket").symlink_to("precious")
    assert "no socket" in refused(good / "socket")
    assert "no socket" in refused(good / "precious")
    assert (good / "precious").read_text() == "data"
    assert (good / "precious").stat().st_mode & 0o777 == 0o644


IN_A_NAMESPACE = """
import errno, logging, os, socket, subprocess, sys
from pathlib import Path
import trio
from backend.door import tenants

def mount(*words): subprocess.run(["mount", *map(str, words)], check=True)

def bound(path):
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found.bind(str(path))
    found.listen()
    return found

def refused(path):
    try:
        with tenants.listening(path): return None
    except OSError as error:
        return error.errno

logging.basicConfig(format="%(message)s")
place = Path(sys.argv[1])
"""
"""Prefix of a mount namespace of its own, so that no other process sees its mounts."""


def in_a_namespace(place: Path, program: str) -> str:
    """Run a program in the namespace; return its complaint."""
    program = f"{IN_A_NAMESPACE}\nasync def main():\n{textwrap.indent(program, '    ')}\ntrio.run(main)\n"
    words = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", program]
    done = subprocess.run([*words, str(place)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_mount_over_the_directory_of_the_socket(tmp_path: Path) -> None:
    """A connected program goes on. The end of the daemon leaves alone what lies there now, although its inode has the
    same number; a later daemon, once the directory is uncovered, treats the old socket as a leftover."""
    said = in_a_namespace(
        tmp_path,
        """
mount("-t", "tmpfs", "-o", "mode=755", "none", place)
path = place / "socket"
with tenants.listening(path) as listener:
    ours = os.lstat(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as program:
        program.connect(str(path))
        mount("-t", "tmpfs", "-o", "mode=755", "none", place)
        impostor = bound(path)
        assert os.lstat(path).st_ino == ours.st_ino, "else this says nothing"
        end, _ = await listener.accept()
        await end.send(b"x")
        assert program.recv(1) == b"x"
assert path.exists()
impostor.close()
subprocess.run(["umount", str(place)], check=True)
assert os.path.samestat(os.lstat(path), ours)
with tenants.listening(path):
    assert not os.path.samestat(os.lstat(path), ours)
assert not path.exists()
""",
    )
    assert not said


def test_a_bind_mount_on_the_socket(tmp_path: Path) -> None:
    """Neither the daemon's end nor the next daemon removes it; the next one says so and does not listen."""
    said = in_a_namespace(
        tmp_path,
        """
path, other, plain = place / "socket", place / "other", place / "plain"
impostor = bound(other)
plain.write_text("data")
for what, code in ((other, errno.EADDRINUSE), (plain, errno.EEXIST)):
    with tenants.listening(path):
        mount("--bind", what, path)
    assert os.path.samestat(os.lstat(path), os.lstat(what))
    assert refused(path) == code, code
    subprocess.run(["umount", str(path)], check=True)
assert plain.read_text() == "data"
with tenants.listening(path):
    mount("--bind", path, path)
assert path.exists()
""",
    )
    assert said == f"the socket {tmp_path}/socket stays: Device or resource busy\n"


# ---- lies ------------------------------------------------------------------------------------------------------------


@pytest.mark.logs("past its library")
def test_memory_that_is_said_to_be_away_does_not_stay_in_the_books(drive: Drive) -> None:
    """A program charges 40 GiB, holds none, and claims that memory is just being exchanged: NVML's figure wins, except
    where the claim can be true."""

    async def test(session: Session) -> None:
        program = await session.program()
        program.lag = CONTEXT
        program.show()
        (await program.ask(Op.REPORT, 0, 0, 80 << 30)).check()
        (await program.ask(Op.CHARGE, 40 << 30)).check()
        await trio.sleep(2)
        assert await session.number(program.file + "gmem.current") <= CONTEXT + AWAY_MOST
        (await program.ask(Op.REPORT, U64, U64, U64)).check()
        program.lag = 60 << 30  # once found out, it takes more than it reported
        program.show()
        await trio.sleep(2)
        assert await session.number(program.file + "gmem.current") >= 60 << 30

    drive(test)


@pytest.mark.logs("past its library")
def test_what_is_said_to_live_by_descriptors_is_no_more_than_was_charged(drive: Drive) -> None:
    """It may have that much, and is charged for it. No other program is charged, and any further memory is seen."""

    async def test(session: Session) -> None:
        program = await session.program()
        program.lag = CONTEXT
        program.show()
        (await program.ask(Op.CHARGE, 40 << 30)).check()
        (await program.ask(Op.REPORT, 0, 0, 0, 0, U64)).check()
        await trio.sleep(2)
        assert await session.number(program.file + "gmem.current") <= CONTEXT + (40 << 30)
        program.lag = 60 << 30
        program.show()
        await trio.sleep(2)
        assert await session.number(program.file + "gmem.current") >= 60 << 30
        (await program.ask(Op.REPORT, 0, 0, 0, 0, 0)).check()
        program.lag = CONTEXT
        program.show()
        await trio.sleep(2)
        assert await session.number(program.file + "gmem.current") <= CONTEXT + (16 << 20)

    drive(test)


def test_what_a_program_says_of_its_kernels_keeps_no_place_for_it() -> None:
    """It claims for ever to have waiting work, and uses nothing: then no program yields to it. It is believed again
    once it has had its turn, and so is a program that could not run."""
    liar, other = Process(1, 1), Process(2, 2)
    use = Use()
    window = 100_000
    for _ in range(3):
        use.observe(window, [liar, other], {liar: Sample(5000, True), other: Sample(5000, True)})
    for _ in range((WORD_US + LEAD_US) // window + 2):
        use.observe(window, [liar, other], {liar: Sample(0, True), other: Sample(window, True)})
    assert not use.wants(liar, LEAD_US)
    assert use.wants(other, ACTIVE_US)
    use.observe(window, [liar, other], {liar: Sample(10, True), other: Sample(0, True)})
    assert use.wants(liar, ACTIVE_US)
    use.placed([liar])
    for _ in range(2 * (WORD_US + LEAD_US) // window):
        use.observe(window, [liar, other], {liar: Sample(0, True), other: Sample(window, True)})
    assert use.wants(liar, ACTIVE_US)


def test_nor_does_it_keep_a_turn_of_memory_by_that() -> None:
    """It is off the runlist between two turns, and does nothing in either of them. One that works in its turns wants
    more, also where the trace tells of it once it is off."""
    liar, other, late = Process(1, 1), Process(2, 2), Process(3, 3)
    use, window, rounds = Use(), 50_000, 0
    while use.wants(liar, LEAD_US):
        for at in range(20):
            has_turn = at < 4
            use.placed([] if has_turn else [liar, other, late])
            used = {liar: 0, other: window if has_turn else 0, late: window if 4 <= at < 8 else 0}
            use.observe(window, used, {process: Sample(us, waiting=True) for process, us in used.items()})
            assert use.wants(other, ACTIVE_US)
            assert use.wants(late, ACTIVE_US)
        rounds += 1
        assert rounds * 4 * window <= WORD_US + LEAD_US + 4 * window, "in its turns, which are a fifth of the time"
    use.placed([])
    use.observe(window, [liar], {liar: Sample(10, waiting=True)})
    assert use.wants(liar, ACTIVE_US)
