"""Slices that were made go with their cgroups: how cgroups are observed, what outlives a daemon, and what is left."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from unittest import mock

import pytest
import trio
import trio.lowlevel

import backend.core.lives
from backend.core.entries import FOREVER, Life
from backend.core.lives import SWEEP_MOST, SWEEP_S
from backend.core.records import Activity
from backend.ledgers.journal.file import Journal
from backend.ledgers.journal.ledger import JournaledLedger
from backend.ledgers.journal.lives import WrittenLives
from backend.ledgers.journal.totals import WrittenTotals
from backend.process import cgroups, procfs
from backend.process.delegated import HIERARCHIES
from backend.process.identity import Process, Slice
from ggroupfs.fs.made import HEARD_S
from ggroupfs.text.spans import milliseconds
from ggroupfs.units import Units
from tests.support.harness import MIB, Harness, Spawn, StubGpu, World, answers, running, settle, virtual
from tests.support.journaled import BOOT, let_go
from tests.support.units import FakeManager, manager, policy

__all__ = ["manager"]

SOON_S = 2 * SWEEP_S
"""Seconds within which a few cgroups have been looked at."""


@pytest.fixture
def world() -> World:
    """A machine whose only cgroup is the root."""
    world = World()
    world.ids = {}
    return world


def there(world: World) -> dict[str, int]:
    """The cgroups of a machine, as inode numbers by path."""
    assert world.ids is not None
    return world.ids


def end_unseen(process: subprocess.Popen[bytes]) -> None:
    """End a process without reaping it."""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


async def make(h: Harness, *paths: str) -> None:
    """Make slices by mkdir."""
    for path in paths:
        above, _, name = f"slice{path}".rpartition("/")
        await h.operations.mkdir(await h.inode(above), name.encode(), 0o755, h.ctx)


async def slices(h: Harness) -> set[str]:
    """Return the paths of all slices but the root."""
    return {slice_.path for slice_ in h.controller.population.slices()} - {"/"}


async def told(h: Harness) -> dict[str, tuple[str, int, str]]:
    """Return ggroup.slices as (state, age, time left) by path."""
    rows = [line.split(" ", 3) for line in (await h.read("ggroup.slices")).splitlines()]
    return {path: (state, int(age), left) for state, age, left, path in rows}


@pytest.fixture(autouse=True)
def clock() -> Iterator[None]:
    """Make the time since boot virtual; the machine was started an hour before."""
    boot = 3600 * 10**9
    now = lambda _: int(trio.current_time() * 10**9) + boot  # noqa: E731
    with mock.patch.object(backend.core.lives.time, "clock_gettime_ns", now):
        yield


@virtual
async def test_a_slice_made_ahead_goes_with_its_cgroup(world: World) -> None:
    async with running(StubGpu(), world=world) as h:
        before = h.leftovers()
        await make(h, "/job")
        await h.write("slice/job/0/gmem.limit.high", "8M")
        await trio.sleep(60)
        assert (await told(h))["/job"] == ("awaited", 60, "-"), "nobody said that it ends"
        there(world)["/job"] = 77
        await trio.sleep(SOON_S)
        assert (await told(h))["/job"] == ("there", 60, "-")
        await trio.sleep(3600)
        assert await slices(h) == {"/job"}, "it is there, if nobody is in it"
        del there(world)["/job"]
        await trio.sleep(SOON_S)
        assert await slices(h) == set()
        assert await told(h) == {}
        assert h.leftovers() == before


@virtual
async def test_a_process_proves_its_cgroup(world: World, spawn: Spawn) -> None:
    """A cgroup that comes and goes between two looks is known by the process that was in it."""
    async with running(StubGpu(), world=world) as h:
        await make(h, "/a", "/a/job")
        process = spawn()
        who = await h.arrive(process.pid, "/a/job")
        assert {path: state for path, (state, _, _) in (await told(h)).items()} == {"/a": "there", "/a/job": "there"}
        process.kill()
        process.wait()
        await h.gone(who)
        await trio.sleep(SOON_S)
        assert await slices(h) == set()


@virtual
async def test_a_cgroup_that_is_made_again_at_once_has_a_slice_of_its_own(world: World, spawn: Spawn) -> None:
    """With or without a look meanwhile, and with a process of the former cgroup whose end was not noticed yet."""
    async with running(StubGpu(), world=world) as h:
        there(world)["/job"] = 77
        await make(h, "/job")
        await h.write("slice/job/0/gmem.limit.high", "8M")
        former = spawn()
        await h.arrive(former.pid, "/job")
        former.kill()
        former.wait()
        there(world)["/job"] = 78
        await h.arrive(spawn().pid, "/job")
        assert await h.read("slice/job/0/gmem.limit.high") == "max\n", "what was set is the former's"
        assert await told(h) == {}, "it came by itself"
        await h.write("slice/job/0/gmem.limit.high", "4M")
        await trio.sleep(SOON_S)
        assert await h.read("slice/job/0/gmem.limit.high") == f"{4 * MIB}\n"


@virtual
async def test_one_on_which_something_is_set_has_a_cgroup(world: World, spawn: Spawn) -> None:
    """It came with its process, whether or not there was a look before both went."""
    async with running(StubGpu(), world=world) as h:
        for identities in ({}, {"/job": 5}):
            there(world).update(identities)
            process = spawn()
            who = await h.arrive(process.pid, "/job")
            await h.write("slice/job/0/gmem.limit.high", "8M")
            process.kill()
            process.wait()
            await h.gone(who)
            there(world).clear()
            await trio.sleep(SOON_S)
            assert await slices(h) == set()


@virtual
async def test_one_made_ahead_again_is_for_the_next_cgroup(world: World) -> None:
    """mkdir notices that the cgroup of the existing slice has gone."""
    async with running(StubGpu(), world=world) as h:
        there(world)["/job"] = 77
        await make(h, "/job")
        await trio.sleep(SOON_S)
        assert await answers(make(h, "/job")) == errno.EEXIST
        del there(world)["/job"]
        await make(h, "/job")
        await trio.sleep(SOON_S)
        assert (await told(h))["/job"][0] == "awaited"


@virtual
async def test_what_is_below_holds_it(world: World, spawn: Spawn) -> None:
    """Slices made ahead below a cgroup that goes are kept, and so are the limits above them until they go; what was
    below the cgroup itself goes with it."""
    async with running(StubGpu(), world=world) as h:
        there(world).update({"/a": 5, "/a/was": 6, "/a/was/in": 7})
        await make(h, "/a", "/a/was", "/a/was/in", "/a/later")
        await h.write("slice/a/0/gmem.limit.high", "8M")
        await trio.sleep(SOON_S)
        there(world).clear()
        await trio.sleep(SOON_S)
        assert await slices(h) == {"/a", "/a/later"}
        assert await h.read("slice/a/0/gmem.limit.high") == f"{8 * MIB}\n"
        there(world).update({"/a": 8, "/a/later": 9})
        await trio.sleep(SOON_S)
        there(world).clear()
        await trio.sleep(SOON_S)
        assert await slices(h) == set()


@virtual
async def test_a_process_that_lives_holds_it(world: World, spawn: Spawn) -> None:
    """The process was moved away, which the tree notices later."""
    async with running(StubGpu(), world=world) as h:
        there(world)["/job"] = 5
        await make(h, "/job")
        pid = spawn().pid
        await h.arrive(pid, "/job")
        with mock.patch.object(h.controller._membership, "_follow_cgroup", return_value=None):
            there(world).clear()
            await trio.sleep(SOON_S)
            assert await slices(h) == {"/job"}
            assert await told(h) == {}, "it stays no longer than that process"
        world.cgroups.clear()
        await trio.sleep(SOON_S)
        assert await slices(h) == set()


@virtual
async def test_a_process_that_was_moved_leaves_nothing_to_the_next_cgroup(world: World, spawn: Spawn) -> None:
    """The tree had not followed the process before its cgroup went and another was made in its place."""
    async with running(StubGpu(), world=world) as h:
        there(world)["/job"] = 77
        await make(h, "/job")
        await h.write("slice/job/0/gmem.limit.high", "8M")
        h.tree.chown(await h.inode("slice/job"), 1000, None, None)
        former, later = spawn(), spawn()
        await h.arrive(former.pid, "/job")
        world.cgroups[former.pid] = Slice("/other")
        there(world)["/job"] = 78
        await h.arrive(later.pid, "/job")
        assert await h.read("slice/job/0/gmem.limit.high") == "max\n"
        assert h.tree.attributes(await h.inode("slice/job")).uid == 0
        assert await slices(h) == {"/job", "/other"}


@virtual
async def test_another_cgroup_has_nothing_of_one_whose_slice_stayed(world: World, spawn: Spawn) -> None:
    """An awaited slice below keeps it; and the files of the next cgroup's slice are root's."""
    async with running(gpu := StubGpu(), world=world) as h:
        there(world)["/job"] = 77
        await make(h, "/job", "/job/later")
        await h.write("slice/job/0/gmem.limit.high", "8M")
        await h.write("slice/job/0/compute.freeze", 1)
        for path in ("slice/job", "slice/job/0/gmem.limit.high"):
            h.tree.chown(await h.inode(path), 1000, None, None)
        await trio.sleep(SOON_S)
        del there(world)["/job"]
        await trio.sleep(SOON_S)
        assert await h.read("slice/job/0/gmem.limit.high") == f"{8 * MIB}\n"
        there(world)["/job"] = 78
        who = await h.arrive(spawn().pid, "/job")
        assert await h.read("slice/job/0/gmem.limit.high") == "max\n"
        assert await h.read("slice/job/0/compute.freeze") == "0\n"
        for path in ("slice/job", "slice/job/later", "slice/job/0/gmem.limit.high"):
            assert h.tree.attributes(await h.inode(path)).uid == 0, path
        await settle()
        assert who not in gpu.detached


@virtual
async def test_what_root_made_ahead_below_a_users_slice_stays(world: World) -> None:
    """What the user made ahead there goes with the user's cgroup, since it would keep that slice the user's."""
    async with running(StubGpu(), world=world) as h:
        there(world)["/u"] = 77
        await make(h, "/u")
        h.tree.chown(await h.inode("slice/u"), 1000, None, None)
        await h.write("ggroup.slices", "infinity /u/nightly")
        await h.write("slice/u/nightly/0/gmem.limit.high", "8M")
        h.ctx.uid = 1000
        await make(h, "/u/own", "/u/own/too")
        h.ctx.uid = 0
        await trio.sleep(SOON_S)
        del there(world)["/u"]
        await trio.sleep(SOON_S)
        assert await slices(h) == {"/u", "/u/nightly"}
        assert await h.read("slice/u/nightly/0/gmem.limit.high") == f"{8 * MIB}\n"


class Steps(trio.abc.Instrument):
    """Counts the lives that end while no other task has a turn."""

    def __init__(self, h: Harness) -> None:
        self._lives = h.controller.lives
        self._before = len(self._lives)
        self.most = 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        now = len(self._lives)
        self.most, self._before = max(self.most, self._before - now), now


@virtual
async def test_thousands_that_go_let_others_have_turns(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a write finds that the cgroup above them has gone."""
    monkeypatch.setattr("backend.core.lives.TURN_S", 0.0)
    async with running(StubGpu(), world=world) as h:
        paths = ["/u", *(f"/u/n{number}" for number in range(1000))]
        await make(h, *paths)
        there(world).update({path: 5 + place for place, path in enumerate(paths)})
        await trio.sleep(len(paths) / SWEEP_MOST * SWEEP_S + SOON_S)
        there(world).clear()
        steps = Steps(h)
        trio.lowlevel.add_instrument(steps)
        await h.write("slice/u/0/gmem.limit.high", "8M")
        await trio.sleep(SOON_S)
        assert {path for path in await slices(h) if path != "/u"} == set()
        trio.lowlevel.remove_instrument(steps)
    assert steps.most == 1


@virtual
async def test_ggroup_slices_is_made_once_a_second(world: World) -> None:
    """However many readers there are; and at once when something happens."""
    async with running(StubGpu(), world=world) as h:
        await make(h, *(f"/n{number}" for number in range(100)))
        h.controller.lives.timeout_of = mock.Mock(return_value=None)
        for _ in range(50):
            assert len(await told(h)) == 100
        assert h.controller.lives.timeout_of.call_count == 100
        await make(h, "/more")
        assert len(await told(h)) == 101
        await trio.sleep(1)
        assert (await told(h))["/more"] == ("awaited", 1, "-")


@virtual
async def test_a_writer_waits_for_no_directory_that_is_kept_locked(world: World) -> None:
    async with running(StubGpu(), world=world) as h:
        h.controller.lives.heard = trio.sleep_forever
        began = trio.current_time()
        await h.write("ggroup.slices", "10 /job")
        assert trio.current_time() - began == HEARD_S
        assert await slices(h) == {"/job"}


@virtual
async def test_units_that_are_not_known_yet_keep_theirs(world: World, spawn: Spawn) -> None:
    """A slice of an active unit without a cgroup is not ended by a look before systemd has answered."""
    async with running(StubGpu(), world=world) as h:
        h.controller.lives.knows_units = lambda: False
        await h.arrive((process := spawn()).pid, "/job")
        await h.write("slice/job/0/gmem.limit.high", "8M")
        process.kill()
        process.wait()
        await trio.sleep(SOON_S)
        assert await slices(h) == {"/job"}
        h.controller.lives.knows_units = lambda: True
        await trio.sleep(SOON_S)
        assert await slices(h) == set()


@virtual
async def test_a_unit_that_is_not_known_yet_keeps_what_was_made_for_a_while(world: World) -> None:
    async with running(StubGpu(), world=world) as h:
        await h.write("ggroup.slices", "1 /x.service")
        h.controller.population.hold(Slice("/x.service"))
        await trio.sleep(SOON_S)
        entry = h.controller.population.slice_entry(Slice("/x.service"))
        assert entry is not None
        entry.unit = False  # as it is after a restart
        h.controller.lives.knows_units = lambda: False
        await trio.sleep(60)
        assert await slices(h) == {"/x.service"}


@virtual
async def test_one_that_has_ended_is_not_let_in_again(world: World, spawn: Spawn) -> None:
    """A process that comes to another GPU is found to have ended when its cgroup is looked at."""
    async with running(StubGpu(0), StubGpu(1), world=world) as h:
        there(world)["/job"] = 77
        await make(h, "/job")
        process = spawn()
        who = await h.arrive(process.pid, "/job")
        del there(world)["/job"]
        end_unseen(process)
        with pytest.raises(ProcessLookupError):
            h.controller._membership.admit(who, {0, 1})
        assert h.controller.population.resident(who) is None
        assert await slices(h) == set()


@virtual
async def test_one_that_is_another_cgroups_has_what_files_ask_for(
    tmp_path: Path, manager: FakeManager, world: World, spawn: Spawn
) -> None:
    """Also where its process was in the tree already, and in another cgroup of that name."""
    (tmp_path / "a.conf").write_text("[/job]\nGMemHigh=8M\n")
    async with policy(tmp_path, manager, world=world) as h:
        there(world)["/job"] = 77
        await make(h, "/job", "/job/later")
        await h.arrive(spawn().pid, "/job")
        await h.write("slice/job/0/gmem.limit.high", "4M")
        there(world)["/job"] = 78
        await trio.sleep(SOON_S)
        assert await h.read("slice/job/0/gmem.limit.high") == f"{8 * MIB}\n"


@virtual
async def test_one_that_is_kept_anew_is_not_over_for_the_next_daemon(tmp_path: Path, world: World) -> None:
    kept = Kept(tmp_path / "journal", world)
    async with kept.daemon() as (h, journal):
        there(world)["/job"] = 77
        await make(h, "/job", "/job/later")
        await trio.sleep(SOON_S)
        del there(world)["/job"]
        await trio.sleep(SOON_S)
        assert journal.state.lives[Slice("/job")].is_over
        await h.write("slice/job/0/gmem.limit.high", "4M")
        assert not journal.state.lives[Slice("/job")].is_over


@virtual
async def test_one_that_is_awaited_ages_out_where_its_maker_said_so(world: World, spawn: Spawn) -> None:
    async with running(StubGpu(), world=world) as h:
        await h.write("ggroup.slices", "1min /a/job")
        await h.write("ggroup.slices", "1min /a/kept")
        await h.write("ggroup.slices", "infinity /b")
        await h.write("slice/a/job/0/gmem.limit.high", "8M")
        there(world)["/a/kept"] = 5
        await trio.sleep(30)
        assert (await told(h)) == {
            "/a/job": ("awaited", 30, "30"), "/a/kept": ("there", 30, "-"), "/b": ("awaited", 30, "-")
        }  # fmt: skip
        await trio.sleep(29)
        assert await slices(h) == {"/a", "/a/job", "/a/kept", "/b"}
        await trio.sleep(1 + SOON_S)
        assert await slices(h) == {"/a", "/a/kept", "/b"}
        await trio.sleep(3600)
        assert await slices(h) == {"/a", "/a/kept", "/b"}, "one that is there has no age"


@virtual
async def test_one_with_something_in_it_does_not_age_out(world: World) -> None:
    async with running(StubGpu(), world=world) as h:
        await h.write("ggroup.slices", "10 /a")
        await make(h, "/a/b")
        await trio.sleep(60)
        assert await slices(h) == {"/a", "/a/b"}
        await h.operations.rmdir(await h.inode("slice/a"), b"b", h.ctx)
        await trio.sleep(SOON_S)
        assert await slices(h) == set()


@virtual
async def test_what_ggroup_slices_refuses(world: World) -> None:
    async with running(StubGpu(), world=world) as h:
        for word in ("", "10", "/a", "10 a", "10 /", "x /a", "10 /a/../b", "-1 /a", "0 /a", "10 /a\n/b"):
            assert await h.refused("ggroup.slices", word) == errno.EINVAL, word
        assert await h.refused("ggroup.slices", f"10 /{'n' * 256}") == errno.ENAMETOOLONG
        assert await h.refused("ggroup.slices", f"10 {'/d' * 129}") == errno.EAGAIN
        assert await slices(h) == set()
        assert await told(h) == {}
        name = "\N{LATIN SMALL LETTER A WITH GRAVE}"  # its last byte is a no-break space in Latin-1
        fh = await h.open("ggroup.slices")
        await h.operations.write(fh, 0, f"10 /{name}/".encode())
        await h.operations.release(fh)
        assert await slices(h) == {f"/{name}"}


@virtual
async def test_slices_d_says_how_long(tmp_path: Path, manager: FakeManager, world: World) -> None:
    """It says so for slices whose maker did not. In the section of a unit the key is a mistake."""
    (tmp_path / "a.conf").write_text("[/pods/*]\nTimeoutStartSec=1h\n[/pods/p]\nTimeoutStartSec=\n")
    async with policy(tmp_path, manager, world=world) as h:
        await make(h, "/pods", "/pods/a", "/pods/p", "/jobs")
        await h.write("ggroup.slices", "infinity /pods/b")
        await trio.sleep(3590)
        assert (await told(h))["/pods/a"] == ("awaited", 3590, "10")
        await trio.sleep(11)
        assert await slices(h) == {"/pods", "/pods/b", "/pods/p", "/jobs"}
        (tmp_path / "a.conf").write_text("[/jobs]\nTimeoutStartSec=1h\n")
        manager.reload()
        await trio.sleep(SOON_S)
        assert await slices(h) == {"/pods", "/pods/b", "/pods/p"}


@virtual
async def test_the_slice_of_a_unit_is_the_units(tmp_path: Path, manager: FakeManager, world: World) -> None:
    """It exists while the unit is active, with or without a cgroup, and gets the file's settings at each start."""
    manager.unit("/x.service", "GMemHigh=8M")
    async with policy(tmp_path, manager, world=world) as h:
        assert (await told(h))["/x.service"][0] == "unit"
        for identity in (4, None, 5):
            there(world).clear()
            there(world).update({} if identity is None else {"/x.service": identity})
            await trio.sleep(SOON_S)
            assert await h.read("slice/x.service/0/gmem.limit.high") == f"{8 * MIB}\n"
        manager.stop("x.service")
        await settle()
        assert await slices(h) == set()
        assert await told(h) == {}


@virtual
async def test_the_slice_of_a_unit_that_ended_meanwhile(
    tmp_path: Path, manager: FakeManager, world: World, spawn: Spawn
) -> None:
    """The unit ended while no daemon ran: its slice goes, with or without a cgroup before; active units keep theirs."""
    names = ("ended.service", "without.service", "active.service")
    for name in names:
        manager.unit(f"/{name}", "GMemHigh=8M")
    there(world)["/ended.service"] = 5
    kept = Kept(tmp_path / "journal", world)
    async with kept.daemon() as (h, _), trio.open_nursery() as nursery:
        await nursery.start(Units(h.controller, tmp_path, manager).run)
        await trio.sleep(SOON_S)
        assert await slices(h) == {f"/{name}" for name in names}
        nursery.cancel_scope.cancel()
    there(world).clear()
    for name in names[:2]:
        del manager.units[name]
    async with kept.daemon() as (h, _), trio.open_nursery() as nursery:
        await nursery.start(Units(h.controller, tmp_path, manager).run)
        await trio.sleep(SOON_S)
        assert await slices(h) == {"/active.service"}
        assert (await told(h))["/active.service"][0] == "unit"
        nursery.cancel_scope.cancel()


@virtual
async def test_a_time_for_one_that_is_there_is_of_no_use(world: World, spawn: Spawn) -> None:
    """A slice that came by itself belongs to its cgroup, even if it is told that it may wait."""
    async with running(StubGpu(), world=world) as h:
        process = spawn()
        who = await h.arrive(process.pid, "/job")
        await h.write("ggroup.slices", "infinity /job")
        process.kill()
        process.wait()
        await h.gone(who)
        await trio.sleep(SOON_S)
        assert await slices(h) == set()


@virtual
async def test_slices_d_is_for_every_start(tmp_path: Path, manager: FakeManager, world: World, spawn: Spawn) -> None:
    """The operator's limits for a cgroup that comes and goes are set anew from the file with each process; limits
    written by hand go."""
    (tmp_path / "a.conf").write_text("[/job]\nGMemHigh=8M\n")
    async with policy(tmp_path, manager, world=world) as h:
        for identity in range(5, 8):
            there(world)["/job"] = identity
            process = spawn()
            who = await h.arrive(process.pid, "/job")
            assert await h.read("slice/job/0/gmem.limit.high") == f"{8 * MIB}\n"
            assert await h.read("slice/job/0/gmem.limit.low") == "0\n"
            await h.write("slice/job/0/gmem.limit.low", "1M")
            await trio.sleep(SOON_S)
            process.kill()
            process.wait()
            await h.gone(who)
            assert await slices(h) == {"/job"}, "something was set on it, and its cgroup is there"
            there(world).clear()
            await trio.sleep(SOON_S)
            assert await slices(h) == set()


@virtual
async def test_nothing_goes_where_nobody_can_tell(world: World) -> None:
    async with running(StubGpu(), world=world) as h:
        there(world)["/job"] = 5
        await make(h, "/job")
        await h.write("ggroup.slices", "1 /other")
        await trio.sleep(SWEEP_S)
        world.ids = None
        await trio.sleep(3600)
        assert await slices(h) == {"/job", "/other"}


class Busy(StubGpu):
    """A GPU whose processes have done some work."""

    def activity(self, process: Process) -> Activity:
        return Activity(submitted=5, finished=4, gpu_usec=1000, tsgs=1, managed=True)


@virtual
async def test_what_it_had_used_goes_on_above_it(world: World, spawn: Spawn) -> None:
    async with running(Busy(), world=world) as h:
        there(world).update({"/a": 5, "/a/job": 6})
        await make(h, "/a", "/a/job")
        process = spawn()
        who = await h.arrive(process.pid, "/a/job", gmem=4 * MIB)
        await h.write("slice/a/job/0/gmem.limit.high", "2M")
        process.kill()
        process.wait()
        await h.gone(who)
        names = ("gcgroup.stat", "gmem.events", "gmem.peak", "gmem.swap.peak", "gmem.stat")
        before = {name: await h.read(f"slice/a/0/{name}") for name in names}
        assert "gpu_usec 1000\n" in before["gcgroup.stat"]
        assert "reclaim 1\n" in before["gmem.events"]
        del there(world)["/a/job"]
        await trio.sleep(SOON_S)
        assert await slices(h) == {"/a"}
        assert {name: await h.read(f"slice/a/0/{name}") for name in before} == before


@virtual
async def test_a_thousand_leave_nothing(tmp_path: Path, world: World, spawn: Spawn) -> None:
    """Cgroups come and go, each with a slice that was made ahead, and every other one with a process in it."""
    journal = Journal(tmp_path / "journal", boot=BOOT)
    ledger = JournaledLedger(journal, {0: "GPU-0"})
    process = spawn()
    there(world)["/pods"] = 5
    async with running(StubGpu(), world=world, ledger=ledger, lives=WrittenLives(journal)) as h:
        await make(h, "/pods")
        await trio.sleep(SOON_S)
        before, size = h.leftovers(), len(journal.state.groups)
        for number in range(0, 1000, 20):
            paths = [f"/pods/p{one}" for one in range(number, number + 20)]
            await make(h, *paths)
            for path in paths:
                await h.write(f"slice{path}/0/gmem.limit.high", "8M")
                there(world)[path] = 1000 + number
            await h.arrive(process.pid, paths[0])
            await trio.sleep(SOON_S)
            assert len(await slices(h)) == 21
            world.cgroups.clear()
            for path in paths:
                del there(world)[path]
            await trio.sleep(2 * SOON_S)
            assert await slices(h) == {"/pods"}
        h.controller._membership.expel(await h.arrive(process.pid))
        assert h.leftovers() == before
        assert len(h.controller.lives._queue) <= SWEEP_MOST
        assert (len(journal.state.groups), set(journal.state.lives)) == (size, {Slice("/pods")})
    let_go(journal)


# What outlives a daemon


class Kept:
    """A journal that is kept by one daemon after another."""

    def __init__(self, path: Path, world: World) -> None:
        self.path = path
        self.world = world
        self.gpus = (StubGpu(0), StubGpu(1))

    @asynccontextmanager
    async def daemon(self) -> AsyncIterator[tuple[Harness, Journal]]:
        """Run one daemon, which is killed in the end."""
        journal = Journal(self.path, boot=BOOT)
        names = {0: "GPU-0", 1: "GPU-1"}
        ledger = JournaledLedger(journal, names)
        lives, totals = WrittenLives(journal), WrittenTotals(journal, names)
        async with running(*self.gpus, world=self.world, ledger=ledger, lives=lives, memory=totals) as h:
            yield h, journal
            h.kill()
        let_go(journal)


@pytest.mark.parametrize("after", [{}, {"/job": 5}, {"/job": 6}], ids=["away", "same", "another"])
@pytest.mark.parametrize("state", ["awaited", "came", "process", "gone"])
@virtual
async def test_a_kill_in_each_state(
    tmp_path: Path, world: World, spawn: Spawn, state: str, after: Mapping[str, int]
) -> None:
    """A removed slice does not come back; one made ahead is kept; one whose cgroup went meanwhile goes."""
    kept = Kept(tmp_path / "journal", world)
    async with kept.daemon() as (h, _):
        await make(h, "/job")
        await h.write("slice/job/1/gmem.limit.high", "8M")
        if state != "awaited":
            there(world)["/job"] = 5
        if state == "process":
            process = spawn()
            await h.arrive(process.pid, "/job")
            process.kill()
            process.wait()
        else:
            await trio.sleep(SOON_S)
        if state == "gone":
            there(world).clear()
            await trio.sleep(SOON_S)
    there(world).clear()
    there(world).update(after)
    async with kept.daemon() as (h, journal):
        await trio.sleep(SOON_S)
        stays = {"awaited": True, "gone": False}.get(state, after.get("/job") == 5)
        assert await slices(h) == ({"/job"} if stays else set())
        if stays:
            assert await h.read("slice/job/1/gmem.limit.high") == f"{8 * MIB}\n"
            assert (await told(h))["/job"][0] == ("there" if after else "awaited")
        assert set(journal.state.lives) == ({Slice("/job")} if stays else set())


@virtual
async def test_an_age_goes_on_with_the_next_daemon(tmp_path: Path, world: World) -> None:
    kept = Kept(tmp_path / "journal", world)
    async with kept.daemon() as (h, journal):
        await h.write("ggroup.slices", "1min /job")
        await make(h, "/other")
        await trio.sleep(40)
        journal.commit()  # Journal.run() does so within a second
    async with kept.daemon() as (h, _):
        assert await told(h) == {"/job": ("awaited", 40, "20"), "/other": ("awaited", 40, "-")}
        await trio.sleep(21)
        assert await slices(h) == {"/other"}


@pytest.mark.parametrize("steps", range(12))
@virtual
async def test_a_kill_amid_a_removal(tmp_path: Path, world: World, steps: int) -> None:
    """The next daemon finishes the removal at any stage; and a half-made slice does not stay for ever."""
    kept = Kept(tmp_path / "journal", world)
    text = b""
    async with kept.daemon() as (h, _):
        await h.write("ggroup.slices", "1min /job")
        there(world)["/job"] = 5
        await trio.sleep(SOON_S)
        there(world).clear()
        await trio.sleep(SOON_S)
        assert await slices(h) == set()
        text = kept.path.read_bytes()
    kept.path.write_bytes(b"".join(text.splitlines(keepends=True)[: 1 + steps]))
    async with kept.daemon() as (h, journal):
        await trio.sleep(61 + SOON_S)
        assert await slices(h) == set()
        assert not journal.state.lives


@virtual
async def test_a_slice_that_an_older_daemon_kept_is_awaited(tmp_path: Path, world: World, spawn: Spawn) -> None:
    """No life was recorded for it: it goes with its cgroup, once that, or a process in it, has been seen."""
    kept = Kept(tmp_path / "journal", world)
    pid = spawn().pid
    async with kept.daemon() as (h, journal):
        await make(h, "/away", "/there", "/inside")
        await h.arrive(pid, "/inside")
        journal.commit(*[["live", f"/{name}", None] for name in ("away", "there", "inside")])
    there(world)["/there"] = 5
    async with kept.daemon() as (h, _):
        await settle()
        await trio.sleep(SOON_S)
        assert await slices(h) == {"/away", "/there", "/inside"}
        there(world).clear()
        world.cgroups.clear()
        await trio.sleep(SOON_S)
        assert await slices(h) == {"/away"}


def test_0_1_passes_over_it(tmp_path: Path) -> None:
    """The records of a life use only what 0.1 knows."""
    journal = Journal(tmp_path / "journal", boot=BOOT)
    journal.commit(["live", "/job", 10, 0, FOREVER, 1000, False])
    let_go(journal)
    assert b'[["forget","/\\u0000' in (tmp_path / "journal").read_bytes()
    journal = Journal(tmp_path / "journal", boot=BOOT)
    assert journal.state.lives == {Slice("/job"): Life(10, 0, FOREVER, 1000)}
    let_go(journal)


# What the kernel reports


def test_a_hybrid_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cgroup exists if it is in one of the hierarchies; where one cannot be seen, nothing is concluded."""
    found = {}
    for name in HIERARCHIES:
        place = tmp_path / name
        place.mkdir()
        (place / cgroups.WITNESS).touch()
        found[name] = procfs.Mount("0:1", "/", str(place), "cgroup2", frozenset())
    monkeypatch.setattr(procfs.trees, "of", found.get)
    assert cgroups.ids(Slice("/job")) == ()
    (tmp_path / "name=systemd" / "job").mkdir()
    one = (tmp_path / "name=systemd" / "job").stat().st_ino
    assert cgroups.ids(Slice("/job")) == (one,)
    (tmp_path / "cgroup2" / "job").mkdir()
    assert cgroups.ids(Slice("/job")) == ((tmp_path / "cgroup2" / "job").stat().st_ino, one)
    (tmp_path / "cgroup2" / "job").rmdir()
    (tmp_path / "cgroup2" / cgroups.WITNESS).unlink()
    assert cgroups.ids(Slice("/job")) is None, "it is unmounted"
    monkeypatch.setattr(procfs.trees, "of", {}.get)
    assert cgroups.ids(Slice("/job")) is None


def test_where_a_part_of_a_hierarchy_is_mounted_nothing_is_said_of_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that has a part of cgroup2, and the whole of systemd's own hierarchy."""
    found = {}
    for name, root in zip(HIERARCHIES, ("/system.slice", "/"), strict=True):
        place = tmp_path / name
        place.mkdir()
        (place / cgroups.WITNESS).touch()
        found[name] = procfs.Mount("0:1", root, str(place), "cgroup2", frozenset())
    monkeypatch.setattr(procfs.trees, "of", found.get)
    assert cgroups.ids(Slice("/job")) is None
    assert cgroups.ids(Slice("/system.slice/x")) == ()
    (tmp_path / "name=systemd" / "job").mkdir()
    assert cgroups.ids(Slice("/job")) == ((tmp_path / "name=systemd" / "job").stat().st_ino,)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("5", 5000),
        ("1h 30min", 5_400_000),
        ("2d", 172_800_000),
        ("0.5s", 500),
        ("infinity", FOREVER),
        ("1w1ms", 604_800_001),
    ],
)
def test_spans(text: str, ms: int) -> None:
    assert milliseconds(text) == ms
