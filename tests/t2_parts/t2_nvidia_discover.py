"""Discovery of a process's RM objects by trying handles."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.nvidia import discover, rm
from backend.nvidia.deadline import Precedence
from backend.nvidia.discover import ClientCounter, Engine, Handles, Tsg, indices
from tests.support.fake_nvidia import GPU_IDS, FakeSystem, Object, Program


@pytest.fixture
def fake() -> FakeSystem:
    return FakeSystem()


@pytest.fixture
def counter(fake: FakeSystem) -> ClientCounter:
    return ClientCounter(fake)


def found(fake: FakeSystem, counter: ClientCounter, program: Program) -> Handles:
    handles = Handles(fake, counter, program.identity, Precedence(1.0))
    handles.wide()
    assert len(fake.open) == 1  # the descriptor of the counter
    return handles


def gr(tsgs: Sequence[Tsg]) -> list[Tsg]:
    return [tsg for tsg in tsgs if tsg.engine is Engine.GR]


def test_one_context(fake: FakeSystem, counter: ClientCounter) -> None:
    program = fake.program(5, 0)
    tsgs = found(fake, counter, program).tsgs()
    assert [(tsg.engine, len(tsg.channels), tsg.default_us) for tsg in tsgs] == [
        (Engine.GR, 8, 2048),
        (Engine.COPY, 4, 1024),
        (Engine.COPY, 4, 1024),
        (Engine.COPY, 4, 1024),
    ]
    assert {tsg.gpu_id for tsg in tsgs} == {GPU_IDS[0]}
    assert sorted(channel for tsg in tsgs for channel in tsg.channels) == program.channels()


def test_two_gpus_of_one_process(fake: FakeSystem, counter: ClientCounter) -> None:
    program = fake.program(5, 0, 1)
    tsgs = found(fake, counter, program).tsgs()
    for gpu_id in GPU_IDS:
        mine = [tsg for tsg in tsgs if tsg.gpu_id == gpu_id]
        assert len(mine) == 4
        assert len({tsg.subdevice for tsg in mine}) == 1


def test_a_process_from_before_our_time(fake: FakeSystem) -> None:
    program = fake.program(5, 0, start=1)
    assert len(found(fake, ClientCounter(fake), program).tsgs()) == 4


def test_clients_of_others_are_not_ours(fake: FakeSystem, counter: ClientCounter) -> None:
    fake.program(5, 0)
    other = fake.program(6, 1)
    assert {tsg.client for tsg in found(fake, counter, other).tsgs()} == {other.client}


def test_quick_look_finds_a_new_context(fake: FakeSystem, counter: ClientCounter) -> None:
    program = fake.program(5, 0)
    handles = found(fake, counter, program)
    before = handles.tsgs()
    assert handles.tsgs() is before  # nothing is recomputed
    program.context()
    with rm.borrowed(fake, program.identity, handles.fds()) as controls:
        handles.quick(controls)
    assert len(handles.tsgs()) == 8
    assert len(gr(handles.tsgs())) == 2


def test_quick_look_is_short(fake: FakeSystem, counter: ClientCounter) -> None:
    program = fake.program(5, 0)
    handles = found(fake, counter, program)
    fake.calls.clear()
    with rm.borrowed(fake, program.identity, handles.fds()) as controls:
        handles.quick(controls)
    assert len(fake.calls) <= 50


def test_wide_look_stands_aside_before_each_handle(fake: FakeSystem, counter: ClientCounter) -> None:
    class Polite(Precedence):
        aside = 0

        def stand_aside(self) -> None:
            assert self.aside <= tried(), "twice for one"
            self.aside += 1

    def tried() -> int:
        return sum(cmd == rm.CLIENT_GET_HANDLE_INFO for cmd, _, _ in fake.calls)

    program = fake.program(5, 0)
    handles = found(fake, counter, program)
    polite = handles.levers = Polite(1.0)
    fake.calls.clear()
    with rm.borrowed(fake, program.identity, handles.fds()) as controls:
        handles.quick(controls)
    assert not polite.aside, "a part of the lever itself"
    fake.calls.clear()
    assert handles.wide(force=True)
    assert polite.aside > 2 * discover.WIDE_RUN
    assert tried() - polite.aside < 100, "those that are known"


def test_wide_look_jumps_a_gap(fake: FakeSystem, counter: ClientCounter) -> None:
    program = fake.program(5, 0)
    handles = found(fake, counter, program)
    program.tsg(skip=900)  # as if that many allocations had come and gone
    with rm.borrowed(fake, program.identity, handles.fds()) as controls:
        handles.quick(controls)
    assert len(handles.tsgs()) == 4
    assert handles.wide()
    assert len(handles.tsgs()) == 5


def test_deep_look_reaches_any_gap_in_the_end(fake: FakeSystem, counter: ClientCounter) -> None:
    program = fake.program(5, 0)
    handles = found(fake, counter, program)
    program.tsg(skip=20_000)
    for _ in range(40):
        handles.wide(force=True)
        if len(handles.tsgs()) == 5:
            return
    raise AssertionError("never found")


def test_nothing_is_tried_while_the_totals_stand_still(fake: FakeSystem, counter: ClientCounter) -> None:
    program = fake.program(5, 0)
    handles = found(fake, counter, program)
    fake.calls.clear()
    assert not handles.wide()
    assert [cmd for cmd, _, _ in fake.calls] == [rm.GET_CLIENT_DATABASE_INFO]


def test_same_program_again_is_found_although_the_totals_repeat(fake: FakeSystem, counter: ClientCounter) -> None:
    first = fake.program(5, 0)
    found(fake, counter, first)
    totals = counter.totals()
    fake.kill(5)
    second = fake.program(6, 0)
    assert counter.totals() == totals
    assert len(found(fake, counter, second).tsgs()) == 4


def test_searches_use_up_no_numbers_for_memory_that_comes_and_goes(fake: FakeSystem, counter: ClientCounter) -> None:
    program = fake.program(5, 0)
    handles = found(fake, counter, program)
    index = fake.index
    for _ in range(10):
        program.add(0x40, program.device(0))
        assert handles.wide()
    assert fake.index == index


def test_freed_objects_are_forgotten(fake: FakeSystem, counter: ClientCounter) -> None:
    program = fake.program(5, 0)
    handles = found(fake, counter, program)
    doomed = handles.tsgs()[0]
    for channel in doomed.channels:
        del program.objects[channel]
    del program.objects[doomed.handle]
    handles.wide(force=True)
    assert doomed.handle not in [tsg.handle for tsg in handles.tsgs()]
    assert len(handles.tsgs()) == 3


def test_a_descriptor_that_became_another_file(fake: FakeSystem, counter: ClientCounter) -> None:
    program = fake.program(5, 0)
    handles = found(fake, counter, program)
    old = program.files.pop(9)
    replacement = fake.program(6, 1)
    program.files[9] = replacement.files[9]
    program.client = replacement.client
    handles.wide(force=True)
    assert {tsg.client for tsg in handles.tsgs()} == {replacement.client}
    assert old.references == 1


def test_a_new_client_of_the_same_descriptor(fake: FakeSystem, counter: ClientCounter) -> None:
    program = fake.program(5, 0)
    handles = found(fake, counter, program)
    program.client = 0xC1D00000 + fake.index
    program.devices.clear()
    fake.index += 1
    program.files[9].clients[program.client] = {program.client: Object(0x41, 0)}
    program.context(1)
    handles.wide()
    assert {tsg.gpu_id for tsg in handles.tsgs()} == set(GPU_IDS)


def test_gone_in_the_middle(fake: FakeSystem, counter: ClientCounter) -> None:
    program = fake.program(5, 0)
    handles = Handles(fake, counter, program.identity, Precedence(1.0))
    fake.kill(5)
    with pytest.raises(ProcessLookupError):
        handles.wide()
    assert len(fake.open) == 1


def test_tsg_in_the_making_is_unknown_until_it_has_an_engine(fake: FakeSystem, counter: ClientCounter) -> None:
    program = fake.program(5)
    tsg = program.add(rm.CLASS_TSG, program.device(0), timeslice=2048)
    handles = found(fake, counter, program)
    assert [found.engine for found in handles.tsgs()] == [Engine.UNKNOWN]
    program.add(0xCBC0, program.add(0xC86F, tsg))
    handles.wide()
    assert [found.engine for found in handles.tsgs()] == [Engine.GR]


@given(st.integers(0, rm.CLIENT_COUNT - 1), st.integers(0, 300))
def test_indices_wrap(low: int, count: int) -> None:
    high = (low + count) % rm.CLIENT_COUNT
    values = list(indices(low, high))
    assert len(values) == count
    assert all(0 <= value < rm.CLIENT_COUNT for value in values)
    assert set(values) == {(low + n) % rm.CLIENT_COUNT for n in range(count)}


@given(st.lists(st.booleans(), max_size=200))
def test_trying_handles_finds_every_one_within_reach(used: list[bool]) -> None:
    fake = FakeSystem()
    program = fake.program(5)
    present = [discover.HANDLE_BASE + 1 + n for n, is_used in enumerate(used) if is_used]
    for handle in present:
        program.objects[handle] = Object(rm.CLASS_TSG, 1)
    with rm.borrowed(fake, program.identity, [9]) as controls:
        result = discover.try_handles(controls[9], program.client, discover.HANDLE_BASE, 256)
    assert sorted(result.objects) == present
    assert result.top == max(present, default=0)
