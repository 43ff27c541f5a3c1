"""gcgroup.record: what every part of the daemon knows of a process or slice, a name and a value a line."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Callable

import attrs
import trio

from backend.core import member
from backend.core.member import Failure, Throttle
from backend.core.reasons import Engines, Off, Reason
from backend.core.records import MAX, Place
from backend.core.settings import BY_CONTROL
from backend.core.totals import OF_WORK
from backend.process.identity import Member, Slice, SliceOn
from ggroupfs.fs import record
from ggroupfs.fs.inodes import FILE_SIZE
from tests.support.harness import Harness, StubGpu, answers, hang, refuses, running, settle, until, virtual

Spawn = Callable[..., subprocess.Popen[bytes]]

SHOWN_ELSEWHERE = {"since"}
"""Fields of slots that another line shows, by another clock."""


async def known(h: Harness, path: str) -> dict[str, str]:
    """Return the record of a group, by name."""
    lines = (await h.read(f"{path}/0/gcgroup.record")).splitlines()
    found = dict(line.split(" ", 1) for line in lines)
    assert len(found) == len(lines), "each name once"
    return found


@virtual
async def test_of_a_process(spawn: Spawn) -> None:
    """Settings as requested, wanted and applied, and what the scheduler adds."""
    gpu = StubGpu()
    async with running(gpu) as h:
        who = await h.arrive(spawn().pid, cgroup="/job", gmem=1 << 20)
        group, path = Member(who, 0), str(who.pid)
        found = await known(h, path)
        assert [found[name] for name in ("process", "start", "slice", "gpu", "contexts")] == [
            *(str(who.pid), str(who.start), "'/job'", "0", "1")
        ]
        assert {name.removeprefix("asked.") for name in found if name.startswith("asked.")} == {*BY_CONTROL}
        assert found["current"] == str(1 << 20)
        assert [found[f"compute.{name}.off"] for name in ("wanted", "applied")] == ["none", "none"]
        h.controller._follower.schedule(group, Place(timeslice_us=500, off=True, engines=Engines.GR))
        assert (await known(h, path))["compute.wanted.off"] == "turn/gr"
        assert (await known(h, path))["compute.applied.off"] == "none", "no lever was pulled yet"
        await h.controller._follower.apply(group)
        await h.write("slice/job/0/compute.freeze", 1)
        found = await known(h, path)
        for name in ("off", "compute.wanted.off", "compute.applied.off"):
            assert found[name] == "freeze,turn/gr", name
        assert (found["compute.place"], found["compute.applied.timeslice_us"]) == ("timeslice_us=500,off=gr", "500")
        h.controller._follower.schedule(group, Place(off=True, engines=Engines.GR, drain_us=2000))
        assert (await known(h, path))["compute.place"] == "off=gr,drain_us=2000"
        assert found["asked.compute.freeze"] == "0", "that is the slice's"
        assert (await known(h, "slice/job"))["asked.compute.freeze"] == "1"


@virtual
async def test_of_what_is_under_way_and_what_failed(spawn: Spawn) -> None:
    """A lever that hangs, one that failed and is put off, and a write that waits for it."""
    gpu = StubGpu()
    async with running(gpu) as h:
        who = await h.arrive(spawn().pid)
        path = str(who.pid)
        assert (await known(h, path))["compute.lever"] == "idle"
        gpu.script("detach", hang)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(h.write, f"{path}/0/compute.freeze", 1)
            await settle()
            found = await known(h, path)
            assert (found["compute.lever"], found["compute.doubtful"], found["written"]) == ("pulled", "yes", "yes")
            assert (found["off"], found["compute.wanted.off"]) == ("freeze", "freeze")
            nursery.cancel_scope.cancel()
        gpu.script("detach", *[refuses(errno.EIO)] * 3)
        h.controller._follower.background.later(Member(who, 0))
        assert (await known(h, path))["compute.pending"] == "yes"
        await settle()
        assert (await known(h, path))["compute.pending"] == "no"


@virtual
async def test_of_the_scheduler_and_of_figures(spawn: Spawn) -> None:
    """Counts of turns, a failure until its retry, a program that is not waited for, and totals that were saved."""
    async with running(StubGpu()) as h:
        who = await h.arrive(spawn().pid)
        kept = h.controller.population.record(Member(who, 0))
        assert (await known(h, str(who.pid)))["scheduled.failure"] == "none"
        now = trio.current_time()
        kept.scheduled.failure = Failure(now + 2.5, 4.0, True)
        kept.scheduled.throttle = Throttle(3, 1500, now)
        kept.memory.ignored_until = now + 10
        assert (await known(h, str(who.pid)))["memory.coming"] == "no"
        kept.memory.came_at = now
        assert (await known(h, str(who.pid)))["memory.coming"] == "yes"
        kept.memory.waiting = trio.lowlevel.ParkingLot()
        kept.taken.total["finished"] = 7
        found = await known(h, str(who.pid))
        assert found["scheduled.failure"] == "again_s=2.500,wait_s=4"
        assert [found[f"scheduled.throttle.{name}"] for name in ("times", "usec", "now")] == ["3", "1500", "yes"]
        assert (found["memory.ignored_s"], found["memory.waiting"], found["taken.total.finished"]) == (
            "10.000",
            "0",
            "7",
        )
        await trio.sleep(20)
        assert (await known(h, str(who.pid)))["memory.ignored_s"] == "0.000"
        kept.memory.waiting = kept.scheduled.failure = None


@virtual
async def test_every_field_of_a_slot_is_shown(spawn: Spawn) -> None:
    """A field that is added to a slot must be shown, too."""
    async with running(StubGpu()) as h:
        who = await h.arrive(spawn().pid)
        kept = h.controller.population.record(Member(who, 0))
        kept.scheduled.throttle, kept.taken.total["finished"], kept.taken.said["finished"] = Throttle(), 1, 1
        names = await known(h, str(who.pid))
        renamed = {"noted": "off", "lever": "compute.lever", "ignored_until": "memory.ignored_s"}
        renamed["came_at"] = "memory.coming"
        for slot in ("compute", "memory", "scheduled", "taken"):
            for field in attrs.fields(type(getattr(kept, slot))):
                name = field.name.lstrip("_")
                if name not in SHOWN_ELSEWHERE:
                    place = renamed.get(name, f"{slot}.{name}")
                    assert any(one == place or one.startswith(f"{place}.") for one in names), (slot, field.name)
        for field in attrs.fields(member.Record):
            name = {"_writing": "written", "_deciding": "undecided", "group": "process"}.get(field.name, field.name)
            assert any(one == name or one.startswith(f"{name}.") for one in names), field.name


@virtual
async def test_the_largest_is_less_than_a_page(spawn: Spawn) -> None:
    """One line a name, however long the cgroup's path and the figures are, so that sendfile copies all of it."""
    async with running(StubGpu()) as h:
        slice_ = "/" + "/".join(["\n\\\udcff" * 60] * 3)
        who = await h.arrive(spawn().pid, cgroup=slice_)
        for group in (Member(who, 0), SliceOn(Slice(slice_), 0)):
            kept = h.controller.population.record(group)
            kept.compute.noted = Off(*[Reason(32 - 1), Reason.MIGRATION])
            kept.scheduled.throttle = Throttle(MAX, MAX, 0.0)
            kept.scheduled.failure = Failure(trio.current_time() + 1e6, 1e6, True)
            for figures in (kept.taken.total, kept.taken.said):
                figures.update(dict.fromkeys((*OF_WORK, "exchanged", "nr_throttled", "throttled_usec"), MAX))
            text = record.show(h.controller, group)
            assert 1000 < len(text.encode()) < FILE_SIZE
            assert all(len(line.split(" ", 1)) == 2 for line in text.splitlines())
            assert text.isascii()
            kept.compute.noted, kept.scheduled.failure = Off(), None


@virtual
async def test_of_a_group_that_is_gone(spawn: Spawn) -> None:
    """ENODEV, as for any file of the group."""
    async with running(StubGpu()) as h:
        program = spawn()
        who = await h.arrive(program.pid)
        fh = await h.open(f"{who.pid}/0/gcgroup.record")
        program.kill()
        await h.gone(who)
        await until(lambda: not h.controller.population.holds(Member(who, 0)), "its record is gone")
        assert await answers(h.operations.read(fh, 0, 4096)) == errno.ENODEV
        await h.operations.release(fh)
