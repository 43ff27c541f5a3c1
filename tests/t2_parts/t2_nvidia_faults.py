"""Faults of every call that the NVIDIA code makes, in every way in which it can fail.

A lever, or a look, is run once to see which calls it makes. Then each of these calls fails, with each status of the
driver (nvstatuscodes.h has 0x01 to 0x8A, warnings from 0x10001, and GENERIC) or each errno of the manual page. The
result must be an OSError with the right number or none, no descriptor left open, and no other process touched; and once
the fault is gone, repeating the operation brings about exactly what is wanted.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

import attrs
import pytest
import trio
from trio.testing import MockClock

from backend.core.reasons import Engines
from backend.nvidia import discover, rm
from backend.nvidia.deadline import Deadline, Narrow, Precedence
from backend.nvidia.discover import ClientCounter, Handles
from backend.nvidia.nvml import ERRNOS, Nvml, Samples
from backend.nvidia.readback import ChannelStates
from backend.nvidia.tenant import Tenant
from backend.nvidia.trace import Trace
from tests.support.fake_nvidia import GPU_IDS, FakeNvml, FakeNvmlError, FakeSystem, Program
from tests.support.faults import Fault, FaultyNvml, FaultySystem, Plan

STATUSES = (*range(0x01, 0x8B), 0xFFFF, *range(0x10001, 0x10008), 0xDEAD)
"""All existing statuses, and one that does not exist."""

CLASSES = (0x0F, 0x1B, 0x33, 0x51, 0x63, 0x65, 0xFFFF)
"""One status for each errno that statuses become."""

ERRNOS_OF = {
    "open_control": "EACCES EINTR EIO EMFILE ENFILE ENODEV ENOENT ENOMEM ENXIO EPERM",
    "open_gpu": "EACCES EINTR EIO EMFILE ENFILE ENODEV ENOENT ENOMEM ENXIO EPERM",
    "control_fds": "EACCES EIO EMFILE ENFILE ENOMEM EPERM ESRCH",
    "pidfd_open": "EINVAL EMFILE ENFILE ENODEV ENOMEM ESRCH",
    "pidfd_getfd": "EBADF EINVAL EMFILE ENFILE EPERM ESRCH",
    "start_time": "EACCES EMFILE ENFILE ENOMEM ESRCH",
    "map": "EACCES EAGAIN ENFILE ENODEV ENOMEM EPERM",
    "ioctl": "EBADF EFAULT EINVAL ENOTTY EAGAIN EINTR EIO ENODEV ENOMEM EPERM",
}
"""Errnos by call: open(2), proc(5), pidfd_open(2), pidfd_getfd(2), mmap(2), ioctl(2), and those of drivers."""

READ_BACK = {rm.FIFO_GET_CHANNEL_STATE}
"""Controls that only read: a lever does without the answer."""


def errnos(call: str) -> list[int]:
    words = ERRNOS_OF.get(call, ERRNOS_OF["ioctl"])
    return [getattr(errno, word) for word in words.split()]


@attrs.define
class World:
    """Two programs on two GPUs; one of them is acted upon, on the first GPU."""

    fake: FakeSystem
    plan: Plan
    tenant: Tenant
    program: Program
    other: Program

    @property
    def mine(self) -> list[int]:
        return [self.program.objects[channel].disabled for channel in self.program.channels()[:20]]

    @property
    def slices(self) -> list[int]:
        return [o.timeslice for o in self.program.objects.values() if o.class_ == rm.CLASS_TSG][:4]

    def holds(self) -> bool:
        """Return whether the hardware is as wanted, to the last count."""
        wanted = self.tenant.applied
        slices = [wanted.timeslice_us or 2048, 1024, 1024, 1024]
        return set(self.mine) == {int(wanted.engines is Engines.ALL)} and self.slices == slices

    def check_others(self) -> None:
        assert all(self.other.running())
        assert all(o.timeslice in (2048, 1024) for o in self.other.objects.values() if o.class_ == rm.CLASS_TSG)
        assert all(self.program.running()[20:]), "its other GPU"
        assert len(self.fake.open) == 1 + 2 * (self.fake.readback), "descriptors"


def world(*, readback: bool = True, known: bool = True) -> World:
    fake, plan = FakeSystem(readback=readback), Plan()
    system = FaultySystem(fake, plan)
    counter = ClientCounter(system)
    states = ChannelStates(system, rm.Card(GPU_IDS[0], "0000:01:00.0", 0))
    other, program = fake.program(4, 0, 1), fake.program(5, 0, 1)
    waits = Deadline("it", 1.0)
    handles = Handles(system, counter, program.identity, Precedence(1.0))
    tenant = Tenant(program.identity, handles, waits, waits, system, GPU_IDS[0], states, began=0)
    if known:
        tenant._look(False)
    return World(fake, plan, tenant, program, other)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try fewer handles where there are none."""
    monkeypatch.setattr(discover, "FIRST_RUN", 32)
    monkeypatch.setattr(discover, "WIDE_RUN", 32)


def ways(call: str, number: int | None, first: bool) -> Iterator[Fault]:
    """Yield the faults of a call: all statuses for the first call of a kind, one for each errno for the others."""
    if call in ("control", "alloc", "free", "map_memory"):
        for status in STATUSES if first else CLASSES:
            yield Fault(call, number, status=status)
            if number in (rm.SET_TIMESLICE, rm.FIFO_DISABLE_CHANNELS):
                yield Fault(call, number, status=status, late=True)
    for code in errnos(call):
        yield Fault(call, number, errno=code)


def sites(calls: Sequence[tuple[str, int | None]]) -> Iterator[tuple[str, int | None, int]]:
    """Yield each call with the number of such calls before it; of the many that only try handles, a few."""
    met: dict[tuple[str, int | None], int] = {}
    for call in calls:
        met[call] = met.get(call, 0) + 1
    for (name, number), count in met.items():
        every = range(count) if count <= 6 else sorted({0, 1, count // 4, count // 2, count - 2, count - 1})
        for nth in every:
            yield name, number, nth


def right(error: OSError, fault: Fault) -> bool:
    """Return whether an error is the one of the fault."""
    if isinstance(error, ProcessLookupError):
        return fault.errno == errno.ESRCH
    if fault.errno:
        return error.errno == fault.errno
    with pytest.raises(rm.RmError) as meant:
        rm.check(fault.status, "")
    return error.errno == meant.value.errno


def caught(call: Callable[[], object]) -> OSError | None:
    """Return what a call raises."""
    try:
        call()
    except OSError as error:
        return error
    return None


def absorbed(fault: Fault) -> bool:
    """Return whether no error is due: the named object is gone, or was only read."""
    if fault.number in READ_BACK or (fault.call == "pidfd_getfd" and fault.errno == errno.EBADF):
        return True
    return bool(fault.status) and rm.RmError(fault.status, "").gone


LEVERS: dict[str, tuple[tuple[bool, int], tuple[bool, int]]] = {
    "freeze": ((False, 0), (True, 0)),
    "thaw": ((True, 0), (False, 0)),
    "timeslice": ((False, 0), (False, 500)),
    "default": ((True, 500), (True, 0)),
    "both": ((False, 0), (True, 500)),
}
"""Frozen state and timeslice, before and after, by lever."""


@pytest.mark.parametrize("readback", [True, False])
@pytest.mark.parametrize("lever", LEVERS)
def test_levers(lever: str, readback: bool) -> None:
    w = world(readback=readback)
    before, after = LEVERS[lever]

    def want(what: tuple[bool, int]) -> None:
        _set(w, what)

    want(before)
    w.tenant.enforcement.enforce(False)
    assert w.holds()
    w.plan.calls.clear()
    want(after)
    w.tenant.enforcement.enforce(False)
    assert w.holds()
    calls = tuple(w.plan.calls)
    seen: set[tuple[str, int | None]] = set()
    tried = 0
    for call, number, nth in sites(calls):
        first = (call, number) not in seen
        seen.add((call, number))
        for fault in ways(call, number, first):
            want(before)
            w.tenant.enforcement.enforce(True)
            assert w.holds()
            fault.after, fault.times = nth, 1
            tried += 1
            _once(w, fault, lambda: want(after))
    assert tried > 300, "it tries"


def _once(w: World, fault: Fault, ask: Callable[[], None]) -> None:
    ask()
    w.plan.faults = [fault]
    error = caught(lambda: w.tenant.enforcement.enforce(False))
    assert right(error, fault) if error else w.holds() or absorbed(fault), (fault, error)
    w.check_others()
    w.plan.heal()
    w.tenant.enforcement.enforce(True)
    assert w.holds(), (fault, w.mine, w.slices)
    w.check_others()


@pytest.mark.parametrize("lever", LEVERS)
def test_a_lever_that_is_refused_all_the_time(lever: str) -> None:
    """Each of its calls fails again and again: the driver's error is passed on, and nothing is left half frozen."""
    w = world()
    before, after = LEVERS[lever]
    for status in STATUSES:
        for number in (rm.SET_TIMESLICE, rm.FIFO_DISABLE_CHANNELS):
            _set(w, before)
            w.tenant.enforcement.enforce(True)
            assert w.holds()
            _once(w, Fault("control", number, status=status), lambda: _set(w, after))


def _set(w: World, what: tuple[bool, int]) -> None:
    w.tenant.applied.engines, w.tenant.applied.timeslice_us = (Engines.ALL if what[0] else Engines.NONE), what[1]


def test_a_lever_that_says_it_did_and_did_not() -> None:
    """Where the result can be read back the lie is found out, and what is wanted is done."""
    w = world()
    w.plan.faults = [Fault("control", rm.SET_TIMESLICE, nothing=True)]
    w.tenant.applied.timeslice_us = 500
    w.tenant.enforcement.enforce(False)
    assert w.slices[0] == 2048, "nothing happened"
    w.plan.heal()
    assert w.tenant.enforcement.enforce(True) == "", "it never held, so nobody has undone it"
    assert w.holds()


def test_looks() -> None:
    """After each fault the next look finds everything."""
    w = world(known=False)
    w.plan.calls.clear()
    w.tenant.enforcement.look(False)
    calls = tuple(w.plan.calls)
    counter, index = w.tenant.applied.handles._counter, w.fake.index
    seen: set[tuple[str, int | None]] = set()
    tried = stranger = 0
    for call, number, nth in sites(calls):
        first = (call, number) not in seen
        seen.add((call, number))
        for fault in ways(call, number, first):
            fault.after, fault.times = nth, 1
            tried += 1
            w.fake.index = index  # otherwise more numbers would have to be tried each time
            del counter._samples[1:]
            w.tenant.applied.handles = Handles(w.tenant._system, counter, w.program.identity, Precedence(1.0))
            w.plan.faults = [fault]
            error = caught(lambda: w.tenant.enforcement.look(False))
            assert error is None or right(error, fault), (fault, error)
            w.check_others()
            w.plan.heal()
            w.tenant.enforcement.look(True)
            tsgs = [len(tsg.channels) for tsg in w.tenant.tsgs()]
            if not w.tenant.applied.handles.fds():  # its client was taken for another's, as such a refusal says
                assert (call, number) == ("control", rm.CLIENT_GET_HANDLE_INFO)
                assert rm.RmError(fault.status, "").errno not in rm.PASSING
                stranger += 1
            else:
                assert tsgs == [8, 4, 4, 4], fault
            w.check_others()
    assert tried > 300, "it tries"
    assert stranger < 0.4 * tried


@pytest.mark.parametrize("make", ["counter", "states", "trace"])
def test_what_is_opened_for_good(make: str) -> None:
    """Either all of it is there, or nothing is left open."""
    card = rm.Card(GPU_IDS[0], "0000:01:00.0", 0)
    fake, plan = FakeSystem(), Plan()
    system = FaultySystem(fake, plan)

    def opened() -> bool:
        if make == "counter":
            ClientCounter(system).close()
        elif make == "states":
            states = ChannelStates(system, card)
            done = states._own is not None
            states.close()
            return done
        else:
            Trace(system, card).close()
        return True

    assert opened()
    for call, number, nth in sites(tuple(plan.calls)):
        for fault in ways(call, number, True):
            fault.after, fault.times = nth, 1
            plan.faults = [fault]
            done: list[bool] = []
            error = caught(lambda done=done: done.append(opened()))
            if make == "states":  # it works without
                assert done == [False], (fault, error)
            else:
                assert error is not None, fault
                assert right(error, fault), (fault, error)
            assert not fake.open, fault
    plan.heal()
    assert opened()


def test_a_trace_that_is_read() -> None:
    """Each call of each read, with each status: an OSError, and earlier counts are not lost."""
    card = rm.Card(GPU_IDS[0], "0000:01:00.0", 0)
    fake, plan = FakeSystem(), Plan()
    assert fake.trace is not None
    trace = Trace(FaultySystem(fake, plan), card)
    now = fake.trace.clock()
    fake.trace.stay(5, now, now + 1000)
    plan.calls.clear()
    trace.read()
    for call, number, nth in sites(tuple(plan.calls)):
        for fault in ways(call, number, True):
            fault.after, fault.times = nth, 1
            plan.faults = [fault]
            now = fake.trace.clock()
            fake.trace.stay(5, now, now + 1000)
            error = caught(trace.read)
            assert error is not None, fault
            assert right(error, fault), (fault, error)
            plan.heal()
            trace.read()
    trace.close()
    assert not fake.open


# NVML


def unhurried(main: Callable[[], Awaitable[None]]) -> None:
    """Run by a clock that stands still: no deadline passes, however busy the machine is."""
    trio.run(main, clock=MockClock())


RETURNS = (*range(1, 31), 999)
"""Values of nvmlReturn_t (nvml.h), without success."""


@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceGetHandleByUUID", "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"],
)
def test_nvml(function: str) -> None:
    """An OSError with the errno of the table; the other GPU still answers."""
    plan, fake = Plan(), FakeNvml(compute={0: [(5, 10)], 1: [(6, 20)]})

    async def main() -> None:
        nvml = Nvml(FaultyNvml(fake, plan))  # type: ignore[arg-type]
        await nvml.open()
        await nvml.gpus()
        names = {getattr(fake, f"NVML_ERROR_{name}"): code for name, code in ERRNOS.items()}
        for status in RETURNS:
            plan.faults = [Fault(function, gpu=0, status=status)]
            with pytest.raises(OSError, match="NVML") as caught:
                await nvml.usage(0)
            assert caught.value.errno == names.get(status, errno.EIO)
            assert await nvml.usage(1) == {6: 20}
            plan.heal()
            assert await nvml.usage(0) == {5: 10}

    unhurried(main)


@pytest.mark.logs("GPU 0 is left out", "GPU 1 is left out")
def test_a_gpu_that_nvml_cannot_tell_of_keeps_nobody_from_the_others() -> None:
    async def main() -> None:
        for status in RETURNS:
            plan = Plan([Fault("nvmlDeviceGetHandleByIndex", gpu=0, status=status)])
            nvml = Nvml(FaultyNvml(FakeNvml(), plan))  # type: ignore[arg-type]
            assert [info.index for info in await nvml.gpus()] == [1]
            plan.faults.append(Fault("nvmlDeviceGetHandleByIndex", gpu=1, status=status))
            with pytest.raises(OSError, match="NVML"):
                await nvml.gpus()

    unhurried(main)


def test_nvml_that_hangs_on_one_gpu() -> None:
    async def main() -> None:
        fault = Fault("nvmlDeviceGetComputeRunningProcesses", gpu=0, hangs=threading.Event())
        plan = Plan()
        nvml = Nvml(FaultyNvml(FakeNvml(compute={1: [(6, 20)]}), plan))  # type: ignore[arg-type]
        await nvml.gpus()
        plan.faults.append(fault)
        try:
            for _ in range(5):
                with pytest.raises(TimeoutError):
                    await nvml.usage(0)
            assert fault.stuck == 1, "it costs one thread"
            assert await nvml.usage(1) == {6: 20}
        finally:
            plan.heal()

    trio.run(main, clock=MockClock(autojump_threshold=0.05))


@pytest.mark.parametrize("jump", [-10 * 365 * 86400, 10 * 365 * 86400])
def test_samples_after_the_clock_was_set(jump: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples carry the time of day: those from before no longer count, and those from after do."""
    clock = [1.7e9]
    monkeypatch.setattr("backend.nvidia.nvml.time.time", lambda: clock[0])
    monkeypatch.setattr("backend.nvidia.nvml.time.monotonic", lambda: clock[0] - start[0])
    start = [1e9]
    fake = FakeNvml()

    async def main() -> None:
        nvml = Nvml(fake)  # type: ignore[arg-type]
        fake.samples = [(5, int(clock[0] * 1e6), 50)]
        assert await nvml.busy(0) == Samples({5: 0.5}, None)
        clock[0] += jump
        start[0] += jump  # the monotonic time goes on
        await nvml.busy(0)
        clock[0] += 1
        fake.samples.append((5, int(clock[0] * 1e6), 20))
        assert await nvml.busy(0) == Samples({5: 0.2}, 1_000_000)
        assert await nvml.busy(0) == Samples({}, 0)

    unhurried(main)


# Hangs


def test_one_that_hangs_in_what_all_pass_keeps_nobody_for_long() -> None:
    narrow, inside, go = Narrow("it", 0.01), threading.Event(), threading.Event()

    def hang() -> None:
        with narrow.passed():
            inside.set()
            go.wait()

    thread = threading.Thread(target=hang, daemon=True)
    thread.start()
    inside.wait()
    for _ in range(1000):  # ten seconds in total, if each waited
        with pytest.raises(TimeoutError), narrow.passed():
            raise AssertionError("two are in it")
    go.set()
    thread.join()
    with narrow.passed():
        pass


def test_who_stands_aside_goes_on_once_all_before_it_are_through() -> None:
    levers, aside = Precedence(60.0), threading.Event()

    def look() -> None:
        levers.stand_aside()
        aside.set()

    levers.stand_aside()  # no lever waits
    with levers.taken():
        with levers.taken():
            thread = threading.Thread(target=look, daemon=True)
            thread.start()
        assert not aside.wait(0.05), "one is through, and the other is not"
    thread.join(10)
    assert aside.is_set()


def test_one_that_hangs_before_others_keeps_them_for_a_moment_once() -> None:
    levers = Precedence(0.01)
    with levers.taken():
        began = time.monotonic()
        for _ in range(1000):  # ten seconds in total, if each waited
            levers.stand_aside()
        assert time.monotonic() - began < 5
    with levers.taken():
        began = time.monotonic()
        levers.stand_aside()
        assert time.monotonic() - began > 0.009, "the next one is waited for again"


def test_a_read_back_that_hangs_keeps_no_lever_of_others() -> None:
    w = world()
    fault = Fault("control", rm.FIFO_GET_CHANNEL_STATE, times=1, hangs=threading.Event())
    w.plan.faults = [fault]
    assert fault.hangs is not None
    question = partial(w.tenant.enforcement._states.enabled, w.program.client, w.program.channels()[0])
    thread = threading.Thread(target=question, daemon=True)
    thread.start()
    while not fault.stuck:
        pass
    w.tenant.applied.engines = Engines.ALL
    w.tenant.enforcement.enforce(False)
    assert w.holds()
    w.tenant.applied.engines = Engines.NONE
    w.tenant.enforcement.enforce(False)
    assert w.holds()
    fault.hangs.set()
    thread.join()


def test_no_thread_is_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """pthread_create(3) gives EAGAIN at the limit of processes; a RuntimeError of the call itself is a bug of ours."""

    async def main() -> None:
        deadline = Deadline("it", 1.0)
        with monkeypatch.context() as patch:

            def refuse(*_: object, **__: object) -> None:
                raise RuntimeError("can't start new thread")

            patch.setattr(trio.to_thread, "run_sync", refuse)
            with pytest.raises(OSError, match="can't start new thread") as caught:
                await deadline.call(lambda: 1)
            assert caught.value.errno == errno.EAGAIN
        assert await deadline.call(lambda: 1) == 1

        def bug() -> None:
            raise RuntimeError("a bug")

        with pytest.raises(RuntimeError, match="a bug"):
            await deadline.call(bug)

    unhurried(main)


def test_faults_are_counted_and_healed() -> None:
    plan = Plan([Fault("control", 7, after=1, times=2, status=0x51), Fault("control", 7, nothing=True)])
    met = [plan.meet("control", 7) for _ in range(4)]
    assert [fault.status if fault else None for fault in met] == [0, 0x51, 0x51, 0]
    assert plan.meet("control", 8) is None
    plan.heal()
    assert plan.meet("control", 7) is None
    assert len(plan.calls) == 6
    assert FakeNvmlError(15).value == 15
