"""Open files: what they show, refuse and report, and their behaviour after the death of their group."""

from __future__ import annotations

import errno
import re
import select
from collections.abc import Mapping

import pytest

import ggroupfs.fs.operations
from backend.core.records import Activity, Footprint
from backend.process.identity import Member, Process
from ggroupfs.fs.controls import CONTROLS
from ggroupfs.fs.files import EVENT, GONE, READY
from ggroupfs.view.figures import SOURCES
from tests.support.harness import MIB, Spawn, StubGpu, Waker, answers, running, virtual


@virtual
async def test_files_keep_to_their_mode(spawn: Spawn) -> None:
    """Writing a read-only file or reading a write-only one is EINVAL, even for root; more than 4095 bytes are E2BIG."""
    async with running() as h:
        pid = spawn().pid
        await h.arrive(pid)
        for control in CONTROLS:
            fh = await h.open(f"{pid}/0/{control.name}")
            if not control.mode & 0o200:
                assert await answers(h.operations.write(fh, 0, b"1")) == errno.EINVAL, control.name
                assert await answers(h.operations.write(fh, 0, b"1" * 5000)) == errno.E2BIG, control.name
            else:
                assert await answers(h.operations.write(fh, 0, b"1" * 4096)) == errno.E2BIG, control.name
            if not control.mode & 0o444:
                assert await answers(h.operations.read(fh, 0, 4096)) == errno.EINVAL, control.name
            await h.operations.release(fh)


class Open(StubGpu):
    """A GPU that reports every figure."""

    def activity(self, process: Process) -> Activity:
        return Activity(4, 3, 1, 2000, 2, 16, 2, managed=True)

    def footprint(self, process: Process) -> Footprint:
        return Footprint(implicit=1, unmovable=2, disputed=3, exchanged=4)


@virtual
async def test_every_line_of_every_file_is_a_figure(spawn: Spawn) -> None:
    """The readers of the tree know each figure by one name: a line of gmem.events is an event, a line of gcgroup.stat
    that begins with off_ is a reason. Files for the owner alone hold no figures."""
    async with running(Open()) as h:
        pid = (await h.arrive(spawn().pid)).pid
        await h.write(f"{pid}/0/compute.timeslice", "2.5")
        for control in CONTROLS:
            if control.show is not None and control.mode & 0o004:
                text = await h.read(f"{pid}/0/{control.name}")
                told = SOURCES[control.name].parse(text.rstrip("\n"))
                figures = sum(len(value) if isinstance(value, Mapping) else 1 for value in told.values())
                has_two = control.name == "compute.max"  # on one line, as in cpu.max
                assert figures == text.count("\n") + has_two, control.name


@virtual
async def test_open_files_of_a_dead_group(spawn: Spawn) -> None:
    """Text that was read stays readable to its end, until a read starts over; all else is ENODEV, and close works."""
    async with running() as h:
        process = spawn()
        who = await h.arrive(process.pid, gmem=2 * MIB)
        op = h.operations
        handles = {control.name: await h.open(f"{process.pid}/0/{control.name}") for control in CONTROLS}
        stat_ = await op.read(handles["gmem.stat"], 0, 10)
        process.kill()
        await h.gone(who)
        whole = stat_ + await op.read(handles["gmem.stat"], 10, 4096)
        assert whole.startswith(
            b"resident %d\nswapped 0\nswapin 0\nswapin_bytes 0\nswapout 0\nswapout_bytes 0\nmove_usec 0\n" % (2 * MIB)
        )
        assert re.search(rb"move_usec 0\nbyte_seconds [0-9]+\n\Z", whole)
        for control in CONTROLS:
            fh = handles[control.name]
            if control.mode & 0o444:
                assert await answers(op.read(fh, 0, 4096)) == errno.ENODEV, control.name
                assert await answers(op.read(fh, 10, 4096)) == errno.ENODEV, control.name
            if control.mode & 0o200:
                values = {"compute.timeslice": b"2", "compute.migrate": b"0", "compute.max": b"max"}
                value = values.get(control.name, b"1")
                assert await answers(op.write(fh, 0, value)) == errno.ENODEV, control.name
            await op.release(fh)
        assert not any(count for what, count in h.leftovers().items() if what not in ("slices", "accounts")), (
            h.leftovers()
        )


@virtual
async def test_poll_handles(spawn: Spawn) -> None:
    """A handle is notified once per event; closed files are not notified; the end of the group notifies all."""
    async with running() as h:
        process = spawn()
        who = await h.arrive(process.pid)
        inode, fh, closed = 0, *[await h.open(f"{process.pid}/0/gmem.events") for _ in range(2)]
        plain = await h.open(f"{process.pid}/0/gmem.current")
        op, group = h.operations, Member(who, 0)
        assert await op.poll(inode, plain, None, h.ctx) == READY | EVENT, "as every file of cgroup2"
        assert await op.poll(inode, fh, None, h.ctx) == READY | EVENT, "before the first read there is news"
        await op.read(fh, 0, 4096)
        first, second, never = Waker(), Waker(), Waker()
        assert await op.poll(inode, fh, first, h.ctx) == READY
        await op.poll(inode, closed, never, h.ctx)
        await op.release(closed)
        h.ledger.note(group, "high")
        h.ledger.note(group, "high")
        assert (first.woken, never.woken) == (1, 0), "one notify a handle, until it is given again"
        assert await op.poll(inode, fh, second, h.ctx) == READY | EVENT
        await op.read(fh, 0, 4096)
        assert await op.poll(inode, fh, None, h.ctx) == READY
        process.kill()
        await h.gone(who)
        assert (first.woken, second.woken) == (1, 1)
        assert await op.poll(inode, fh, Waker(), h.ctx) == GONE
        await op.release(fh)
        await op.release(plain)
        assert h.leftovers()["pollers"] == 0


@virtual
async def test_files_that_one_user_has_open_are_bounded(spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user with too many gets ENFILE until it closes one; others, and root, go on."""
    monkeypatch.setattr(ggroupfs.fs.operations, "FILES", 3)
    async with running() as h:
        path = f"{spawn().pid}/0/gmem.current"
        await h.arrive(int(path.partition("/")[0]))
        opened = []
        for uid, most in ((1000, 3), (1001, 3), (0, 5)):
            h.ctx.uid = uid
            opened += [await h.open(path) for _ in range(most)]
            if uid:
                assert await answers(h.open(path)) == errno.ENFILE
        h.ctx.uid = 1000
        await h.operations.release(opened[0])
        opened[0] = await h.open(path)
        assert await answers(h.open(path)) == errno.ENFILE
        for fh in opened:
            await h.operations.release(fh)


@virtual
async def test_usermemfd_wakes_at_pressure_and_at_the_end(spawn: Spawn) -> None:
    async with running() as h:
        process = spawn()
        who = await h.arrive(process.pid)
        fh, waker, last = await h.open(f"{process.pid}/0/usermemfd"), Waker(), Waker()
        op = h.operations
        assert await op.poll(0, fh, waker, h.ctx) == 0
        assert await answers(op.read(fh, 0, 16)) == errno.EAGAIN
        assert await answers(op.read(fh, 0, 15)) == errno.EINVAL
        h.ledger.press(Member(who, 0), 4096)
        assert waker.woken == 1
        assert await op.poll(0, fh, last, h.ctx) == select.POLLIN | select.POLLRDNORM
        assert await op.read(fh, 0, 16) == (4096).to_bytes(8, "little") + (1).to_bytes(8, "little")
        process.kill()
        await h.gone(who)
        assert last.woken == 1
        assert await op.poll(0, fh, None, h.ctx) == GONE
        await op.release(fh)


@virtual
async def test_nopoll_is_said_once() -> None:
    async with running(poll=False) as h:
        fh = await h.open("gpus/0/uuid")
        assert await answers(h.operations.poll(0, fh, Waker(), h.ctx)) == errno.ENOSYS
        await h.operations.release(fh)


@virtual
async def test_a_recycled_pid_has_new_inodes_and_old_files_stay_dead(spawn: Spawn) -> None:
    """An open file, or a cached inode, of a dead process never shows the next process with that pid."""
    async with running() as h:
        pid = spawn().pid
        old = await h.arrive(pid, gmem=2 * MIB)
        fh, inode = await h.open(f"{pid}/0/gmem.current"), await h.inode(f"{pid}/0/gmem.current")
        h.world.later[pid] = 1
        new = await h.arrive(pid, gmem=4 * MIB)
        assert old != new
        assert await answers(h.operations.read(fh, 0, 10)) == errno.ENODEV
        assert await answers(h.operations.getattr(inode, h.ctx)) == errno.ENOENT
        assert await h.read(f"{pid}/0/gmem.current") == f"{4 * MIB}\n"
        assert await h.inode(f"{pid}/0/gmem.current") != inode
        await h.operations.release(fh)
