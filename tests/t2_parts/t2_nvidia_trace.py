"""GPU time of processes: the trace of context switches, the sums made of it, and the estimate where there is none."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from backend.nvidia import rm, subdevice, trace
from backend.nvidia.nvml import Nvml
from backend.nvidia.residency import SWITCH_MOST_NS, Edge, Residency, Switch
from backend.nvidia.trace import Trace
from backend.nvidia.usage import SAMPLE_S, Usage
from backend.process.identity import Process
from tests.support.fake_nvidia import RECORDS, FakeNvml, FakeSystem, patient
from tests.support.mounted import eventually
from tests.support.nvidia_rig import MS, Clock

A, B = 11, 22


@attrs.define
class Rig:
    fake: FakeSystem
    clock: Clock
    trace: Trace

    def log(self, tag: int, pid: int, ms: float, lost: int = 0) -> None:
        """Write a record at `ms` after the start."""
        assert self.fake.trace is not None
        self.fake.trace.log(tag, pid, 1_000_000 * MS + int(ms * MS), lost)

    def at(self, ms: float) -> None:
        """Set the clock to `ms` after the start."""
        self.clock.ns = 1_000_000 * MS + int(ms * MS)

    def read(self, ms: float) -> tuple[int, int]:
        """Look at `ms`; return the milliseconds of A and of B known by then."""
        self.at(ms)
        self.trace.read()
        self.clock.ns += trace.LAG_NS - trace.LATE_NS
        return self.trace.usec(A) // 1000, self.trace.usec(B) // 1000

    @property
    def binds(self) -> int:
        assert self.fake.trace is not None
        (reader,) = self.fake.trace.readers.values()
        return reader.binds


@contextmanager
def bound() -> Iterator[Rig]:
    fake, clock = FakeSystem(), Clock()
    assert fake.trace is not None
    fake.trace.clock = clock
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("backend.nvidia.trace.time.monotonic_ns", clock)
        rig = Rig(fake, clock, Trace(fake, rm.Card(0x100, "0000:01:00.0", 0)))
        yield rig
        rig.trace.close()
    assert not fake.open


ON, OFF = 6, 7


def test_turns() -> None:
    with bound() as rig:
        rig.log(ON, A, 1)
        rig.log(OFF, A, 3)
        rig.log(ON, B, 3.5)  # the switch is charged to B
        rig.log(OFF, B, 7.5)
        assert rig.read(100) == (2, 4)
        rig.log(0x05, A, 8)  # tags of the full level of detail
        rig.log(0x03, A, 10)
        rig.log(0x01, A, 10)  # and one without that information
        assert rig.read(200) == (4, 4)
        assert [rig.trace.residency.stays(pid) for pid in (A, B, 1)] == [2, 1, 0]


def test_who_stays_is_charged_until_now() -> None:
    with bound() as rig:
        rig.log(ON, A, 1)
        assert rig.read(200) == (129, 0)  # without the last 70 ms, whose records may be in flight
        assert rig.read(300) == (229, 0)
        rig.log(OFF, A, 301)
        assert rig.read(400) == (300, 0)
        assert rig.read(900) == (300, 0)  # the rest is charged to no process


def test_a_figure_is_as_old_whenever_somebody_read() -> None:
    """Otherwise a window would be measured longer or shorter than it was, by up to the time between two looks."""
    with bound() as rig:
        rig.log(ON, A, 0)
        for looked in (100, 203, 303, 407, 497):
            rig.at(looked)
            rig.trace.read()
            for asked in (looked, looked + 50, looked + 90):
                rig.at(asked)
                assert rig.trace.usec(A) == max(0, asked * 1000 - trace.LAG_NS // 1000)


def test_who_was_there_before_us() -> None:
    with bound() as rig:
        rig.log(OFF, A, 4)
        rig.log(ON, B, 4)
        assert rig.read(75) == (4, 1)


def test_a_record_that_comes_late_takes_nothing_twice() -> None:
    with bound() as rig:
        rig.log(ON, A, 0)
        assert rig.read(200) == (130, 0)
        rig.log(OFF, A, 120)  # A was charged for 10 ms of B's
        rig.log(ON, B, 120)
        assert rig.read(300) == (130, 100)


def test_an_engine_without_a_context_is_nobodys() -> None:
    with bound() as rig:
        rig.log(ON, A, 0)
        rig.log(OFF, A, 10)  # then its process ends
        rig.log(ON, B, 50)
        assert rig.read(130) == (10, 10)


def test_the_ring_wraps() -> None:
    with bound() as rig:
        at = 0.0
        for _ in range(3):
            for _ in range(RECORDS // 4):
                rig.log(ON, A, at)
                rig.log(OFF, A, at + 0.5)
                rig.log(ON, B, at + 0.5)
                at += 1
                rig.log(OFF, B, at)
                if int(at) % 1000 == 0:
                    rig.read(at + 70)
        assert rig.read(at + 70) == (at // 2, at // 2)


def test_what_did_not_fit_is_nobodys() -> None:
    with bound() as rig:
        for n in range(RECORDS // 2 + 10):
            rig.log(ON, A, n)
            rig.log(OFF, A, n + 1)
        end = RECORDS // 2 + 10
        rig.read(end)
        rig.log(ON, B, end)
        used, others = rig.read(end + 100)
        assert end - 12 <= used < end
        assert others == 30


def test_a_lost_record() -> None:
    with bound() as rig:
        rig.log(ON, A, 0)
        rig.log(OFF, A, 10)
        rig.log(ON, A, 40, lost=2)  # unknown which process was on the engine in between
        assert rig.read(120) == (20, 0)


def test_a_record_without_a_time() -> None:
    with bound() as rig:
        rig.log(ON, A, 0)
        rig.log(OFF, A, -2000)
        rig.log(ON, B, 10)
        rig.log(OFF, B, 20)
        assert rig.read(90) == (10, 10)
        rig.log(ON, A, -2000)
        rig.log(OFF, A, 60)
        assert rig.read(190) == (10, 10)  # unknown since when


def test_an_old_record_ends_the_binding_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    with bound() as rig, caplog.at_level(logging.INFO):
        rig.log(ON, A, 10)
        rig.log(OFF, B, 5)
        assert rig.read(100) == (0, 0)
        assert "bound again" in caplog.text
        rig.log(ON, A, 100)  # to no process
        rig.read(140)
        assert rig.binds == 1
        rig.read(160)
        assert rig.binds == 2
        rig.log(ON, B, 170)
        assert rig.read(260) == (0, 20)


def _refusing(refused: int) -> Callable[[int, int, int], int]:
    return lambda cmd, client, handle: 0x1B if cmd == refused else 0


def test_nothing_is_left_open_where_it_is_refused() -> None:
    for refused in (trace.FECS_BIND, trace.BUFFER_ENABLE, subdevice.TIMER_GET_TIME, rm.GPU_GET_ID_INFO):
        fake = FakeSystem(refuse=_refusing(refused))
        with pytest.raises(OSError, match="INSUFFICIENT_PERMISSIONS"):
            Trace(fake, rm.Card(0x100, "0000:01:00.0", 0))
        assert not fake.open


def test_in_a_pid_namespace_the_pids_are_others() -> None:
    fake = FakeSystem(namespace=4026532000)
    with pytest.raises(OSError, match="pid namespace") as raised:
        Trace(fake, rm.Card(0x100, "0000:01:00.0", 0))
    assert raised.value.errno == errno.EOPNOTSUPP
    assert not fake.open


turns = st.lists(
    st.tuples(st.sampled_from((A, B)), st.integers(0, 2 * SWITCH_MOST_NS), st.integers(0, 10 * MS), st.booleans()),
    max_size=30,
)


@given(turns, st.integers(0, 100 * MS))
def test_every_instant_is_charged_once(history: list[tuple[int, int, int, bool]], late: int) -> None:
    """Whatever the trace says, and whenever it is read: no figure falls, and the sum of all is the stays and the
    switches, without what was lost."""
    residency = Residency(0)
    now = expected = 0
    for n, (pid, gap, stay, asked) in enumerate(history):
        begin, end = now + gap, now + gap + stay
        residency.note(Switch(Edge.ON, pid, begin))
        before = residency.usec(A), residency.usec(B)
        if asked:
            residency.advance(begin + stay // 2)
        residency.note(Switch(Edge.OFF, pid, end))
        assert residency.usec(A) >= before[0]
        assert residency.usec(B) >= before[1]
        expected += stay + (gap if n and gap <= SWITCH_MOST_NS else 0)
        now = end
    residency.advance(now + late)
    assert abs(residency.usec(A) + residency.usec(B) - expected // 1000) <= 1


def test_the_dead_are_forgotten() -> None:
    residency = Residency(0)
    for pid in range(2000):
        residency.note(Switch(Edge.ON, pid, pid * MS))
    residency.drop(1500)
    assert (residency.usec(1500), residency.stays(1500)) == (0, 0)
    residency.prune(lambda pid: pid >= 1900)
    assert (residency.usec(10), residency.stays(10)) == (0, 0)
    assert (residency.usec(1950), residency.stays(1950)) == (1000, 1)


def estimated(fake: FakeSystem, nvml: FakeNvml, caplog: pytest.LogCaptureFixture) -> tuple[int | None, int | None]:
    """Return the exact and estimated microseconds of A after three samples."""
    process, clock = Process(A, 1), MockClock(autojump_threshold=0.005)

    async def main() -> tuple[int | None, int | None]:
        usage = Usage(0, Nvml(nvml), lambda: Trace(fake, rm.Card(0x100, "0000:01:00.0", 0)))  # type: ignore[arg-type]
        async with trio.open_nursery() as nursery:
            await nursery.start(usage.run)
            await trio.sleep(SAMPLE_S / 2)  # halfway between two looks
            for n in range(3):
                nvml.samples = [(A, 1000 + n, 25), (B, 1000 + n, 100)]
                await trio.sleep(SAMPLE_S)
            result = usage.exact(process), usage.estimate(process)
            usage.forget(process)
            assert usage.estimate(process) in (None, 0)
            nursery.cancel_scope.cancel()
        return result

    with patient(clock, lambda: False), caplog.at_level(logging.INFO):
        result = trio.run(main, clock=clock)
    assert not fake.open
    return result


def test_without_a_trace_it_is_an_estimate(caplog: pytest.LogCaptureFixture) -> None:
    exact, estimate = estimated(FakeSystem(trace=None), FakeNvml(), caplog)
    assert exact is None
    assert estimate == pytest.approx(750_000, rel=0.01)
    assert "times are estimates" in caplog.text


def test_with_neither_there_is_no_figure(caplog: pytest.LogCaptureFixture) -> None:
    nvml = FakeNvml(error=FakeNvml.NVML_ERROR_NOT_SUPPORTED)
    assert estimated(FakeSystem(trace=None), nvml, caplog) == (None, None)


def test_a_trace_that_comes_too_late_is_ended() -> None:
    """The driver hangs in the request and comes back later: nothing would read the trace."""
    fake, clock = FakeSystem(hang={trace.FECS_BIND}), MockClock(autojump_threshold=0.005)

    async def main() -> None:
        usage = Usage(
            0,
            Nvml(FakeNvml()),  # type: ignore[arg-type]
            lambda: Trace(fake, rm.Card(0x100, "0000:01:00.0", 0)),
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(usage.run)
            assert fake.stuck == 1
            assert usage.exact(Process(A, 1)) is None
            nursery.cancel_scope.cancel()

    with patient(clock, lambda: True):
        trio.run(main, clock=clock)
    assert fake.open
    fake.release.set()
    eventually(lambda: not fake.open, "its files are closed")


@pytest.mark.logs("GPU 0: the trace of context switches ended")
def test_a_trace_that_ends(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeSystem()
    calls = iter(range(1000))
    fake.refuse = lambda cmd, client, handle: 0xFFFF if cmd == subdevice.TIMER_GET_TIME and next(calls) > 5 else 0
    exact, estimate = estimated(fake, FakeNvml(), caplog)
    assert exact is None
    assert estimate is not None


def test_a_read_that_begins_after_the_end() -> None:
    """The GPU is lost between the order to read and the thread that reads: the reader does not wait for ever."""
    with bound() as rig:
        rig.trace.close()
        with pytest.raises(OSError, match="closed"):
            rig.trace.read()


@pytest.mark.parametrize("refused", [False, True])
def test_an_end_while_it_is_read(*, refused: bool) -> None:
    """The daemon ends, or the GPU is lost, while a thread reads: its files stay until it is done, and no longer."""
    with bound() as rig:
        opened = dict(rig.fake.open)
        assert opened

        def close(cmd: int) -> None:
            rig.trace.close()
            assert rig.fake.open == opened

        rig.fake.before = close
        rig.fake.refuse = lambda cmd, client, handle: 0x40 if refused else 0
        with pytest.raises(OSError, match="INVALID_STATE") if refused else contextlib.nullcontext():
            rig.trace.read()
        assert not rig.fake.open


@pytest.mark.parametrize("step_ms", [-500_000, 3_600_000])
def test_the_clock_of_the_gpu_is_set(step_ms: int) -> None:
    """As after a suspend: no process is charged for the jump, and later time is charged as before."""
    with bound() as rig:
        host = Clock()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("backend.nvidia.trace.time.monotonic_ns", host)
            rig.log(ON, A, 1)
            for now in (100, 200, 300, 400):
                host.ns, rig.clock.ns = (1_000_000 + now) * MS, (1_000_000 + now) * MS
                rig.trace.read()
            before = rig.trace.usec(A)
            assert before > 0
            for now in (500, 600, 700):
                host.ns, rig.clock.ns = (1_000_000 + now) * MS, (1_000_000 + now + step_ms) * MS
                rig.trace.read()
                rig.trace.account()
            assert rig.binds == 2
            assert rig.trace.usec(A) - before < 200_000
            now_usec = rig.trace.usec(A)
            rig.log(ON, A, 750 + step_ms)
            rig.log(OFF, A, 850 + step_ms)
            for now in (900, 1000, 1100, 1200, 1300):
                host.ns, rig.clock.ns = (1_000_000 + now) * MS, (1_000_000 + now + step_ms) * MS
                rig.trace.read()
                rig.trace.account()
            assert 99_000 <= rig.trace.usec(A) - now_usec <= 102_000
