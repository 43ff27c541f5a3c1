"""Every FUSE handler, called as the kernel calls it: its refusals, what it leaves behind, and that it never crashes."""

from __future__ import annotations

import errno
import inspect
import os
import stat
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyfuse3
import pytest
import trio
from pyfuse3 import FUSEError

from backend.process.identity import Member
from ggroupfs.fs.inodes import ROOT_INODE, SELF_INODE
from ggroupfs.fs.messenger import Messenger
from ggroupfs.fs.notify import NOTIFY_INTERVAL_S
from ggroupfs.fs.operations import Operations
from tests.support.harness import MIB, Spawn, Token, answers, running, settle, until, virtual

HANDLERS = sorted(name for name, member in inspect.getmembers(Operations) if inspect.iscoroutinefunction(member))

REFUSED = {
    "create": errno.EACCES,
    "mknod": errno.EACCES,
    "fsyncdir": errno.EINVAL,
    "unlink": errno.EPERM,
    "rename": errno.EPERM,
    "link": errno.EPERM,
    "symlink": errno.EPERM,
    # Missing on purpose: after one ENOSYS the kernel does not ask again.
    "flush": errno.ENOSYS,
    "getxattr": errno.ENOSYS,
    "listxattr": errno.ENOSYS,
    "removexattr": errno.ENOSYS,
    "setxattr": errno.ENOSYS,
}
"""Errnos of the operations that cgroup2 does not have."""

CANNOT_FAIL = {"statfs", "fsync"}
"""Handlers that use no other part."""


class Wreck:
    """Stand-in for a part with a bug: whatever is done with it raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the bug")

    def __getitem__(self, key: object) -> Any:
        raise RuntimeError("the bug")

    __setitem__ = __iter__ = __getitem__


def wrecked() -> Operations:
    """Return operations of which every part is broken."""
    operations = Operations(Wreck(), Wreck(), Wreck())  # type: ignore[arg-type]
    operations._files = operations._listings = Wreck()  # type: ignore[assignment]
    return operations


def call(operations: Operations, name: str) -> Any:
    """Call a handler with as many arguments as the kernel gives it."""
    words = list(inspect.signature(getattr(pyfuse3.Operations, name)).parameters)[1:]
    special = {
        "inode_list": [(ROOT_INODE, 1)],
        "fields": SimpleNamespace(
            update_atime=False, update_mtime=False, update_uid=True, update_gid=False, update_mode=False
        ),
        "attr": SimpleNamespace(st_uid=0, st_gid=0, st_mode=0),
        "ctx": SimpleNamespace(uid=0, gid=0, pid=os.getpid(), umask=0),
        "name": b"name",
        "buf": b"1",
        "flags": 0,
        "mode": stat.S_IFREG | 0o644,
    }
    return getattr(operations, name)(*(special.get(word, 1) for word in words))


@pytest.mark.parametrize("name", HANDLERS)
def test_only_fuse_errors_leave_a_handler(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A bug in any handler is EIO and one line in the log; handlers that are added later are tested, too."""
    error: BaseException | None = None
    try:
        trio.run(call, wrecked(), name)
    except BaseException as raised:
        error = raised
    records = list(caplog.records)
    caplog.clear()  # expected; the marker cannot be put on one handler of many
    if name in CANNOT_FAIL:
        assert error is None
    elif name in REFUSED:
        assert isinstance(error, FUSEError)
        assert error.errno == REFUSED[name]
    else:
        assert isinstance(error, FUSEError), error
        assert error.errno == errno.EIO
        assert [record.getMessage() for record in records] == [f"{name} failed"]
        assert records[0].exc_info is not None
        return
    assert records == []


@pytest.mark.logs("^write failed$")
@virtual
async def test_an_os_error_without_a_number_is_a_bug_too(spawn: Spawn) -> None:
    async with running() as h:
        await h.arrive(spawn().pid)
        fh = await h.open("gpus/0/uuid")
        h.operations._files[fh] = SimpleNamespace(write=_raise(OSError("no number")))  # type: ignore[assignment]
        with pytest.raises(FUSEError) as raised:
            await h.operations.write(fh, 0, b"1")
        assert raised.value.errno == errno.EIO


@pytest.mark.logs("^write failed$")
@pytest.mark.parametrize("code", [-600, -1, 512, 600, 4095, 2**31])
@virtual
async def test_a_number_that_the_kernel_does_not_take_stays_here(spawn: Spawn, code: int) -> None:
    """The kernel would reject such an answer, and its caller would wait for ever."""
    async with running() as h:
        await h.arrive(spawn().pid)
        fh = await h.open("gpus/0/uuid")
        h.operations._files[fh] = SimpleNamespace(  # type: ignore[assignment]
            write=_raise(OSError(code, "no such number")),
        )
        with pytest.raises(FUSEError) as raised:
            await h.operations.write(fh, 0, b"1")
        assert raised.value.errno == errno.EIO


@virtual
async def test_what_one_write_cannot_do_is_not_said_of_the_whole_mount(spawn: Spawn) -> None:
    """The kernel takes ENOSYS as an answer for all times."""
    async with running() as h:
        await h.arrive(spawn().pid)
        fh = await h.open("gpus/0/uuid")
        h.operations._files[fh] = SimpleNamespace(  # type: ignore[assignment]
            write=_raise(OSError(errno.ENOSYS, "not here")),
        )
        with pytest.raises(FUSEError) as raised:
            await h.operations.write(fh, 0, b"1")
        assert raised.value.errno == errno.EOPNOTSUPP


def _raise(error: Exception) -> Callable[..., Any]:
    async def fail(*_: object) -> None:
        raise error

    return fail


async def _stuck(_: bytes) -> None:
    await trio.sleep_forever()


@virtual
async def test_a_cancelled_write_is_no_error() -> None:
    """A cancellation, which ends the mount, passes through a handler untouched."""
    async with running() as h:
        fh = await h.open("gpus/0/uuid")
        h.operations._files[fh] = SimpleNamespace(write=_stuck)  # type: ignore[assignment]
        with trio.move_on_after(1) as scope:
            await h.operations.write(fh, 0, b"1")
        assert scope.cancelled_caught


@virtual
async def test_names(spawn: Spawn) -> None:
    """lookup, mkdir and rmdir of every kind of name, and the errno of each."""
    async with running() as h:
        pid = spawn().pid
        idle = spawn().pid
        await h.arrive(pid, "/a/b")
        op, ctx = h.operations, h.ctx
        gpus, slices, process = await h.inode("gpus"), await h.inode("slice"), await h.inode(str(pid))
        group = await h.inode(f"{pid}/0")
        for parent, name in (
            *((ROOT_INODE, name) for name in (b"", b"0", b"-1", b"\xff\xfe", b"9" * 255, b"\xef\xbc\x91")),
            *((ROOT_INODE, name) for name in (b"%d " % pid, b"0%d" % pid, b"1_0", b"gmem.current", b"x" * 255)),
            *((gpus, name) for name in (b"1", b"00", b"GPU-", b"self")),
            *((slices, name) for name in (b"0", b"b", b"_0")),
            *((process, name) for name in (b"1", b"gmem.current")),
            (group, b"0"),
        ):
            assert await answers(op.lookup(parent, name, ctx)) == errno.ENOENT, (parent, name)
        for parent, name, code in (
            (ROOT_INODE, b"1e3", errno.EINVAL),
            (ROOT_INODE, b"0%d" % idle, errno.EINVAL),
            (ROOT_INODE, b"new", errno.EINVAL),
            (ROOT_INODE, b"4194305", errno.ENOENT),
            (ROOT_INODE, b"9" * 200, errno.ENOENT),
            (ROOT_INODE, b"%d" % pid, errno.EEXIST),
            (slices, b"0", errno.EINVAL),
            (slices, b"a\nb", errno.EINVAL),
            (slices, b"a", errno.EEXIST),
            (process, b"1", errno.EPERM),
            (group, b"x", errno.EPERM),
            (gpus, b"1", errno.EPERM),
        ):
            assert await answers(op.mkdir(parent, name, 0o755, ctx)) == code, (parent, name)
        for parent, name, code in (
            (ROOT_INODE, b"gpus", errno.EPERM),
            (ROOT_INODE, b"slice", errno.EPERM),
            (ROOT_INODE, b"self", errno.ENOTDIR),
            (ROOT_INODE, b"ggroup.backend", errno.ENOTDIR),
            (ROOT_INODE, b"nothing", errno.ENOENT),
            (ROOT_INODE, b"%d" % pid, errno.EBUSY),
            (process, b"0", errno.EPERM),
            (group, b"gmem.current", errno.ENOTDIR),
            (gpus, b"0", errno.EPERM),
            (slices, b"a", errno.EBUSY),
        ):
            assert await answers(op.rmdir(parent, name, ctx)) == code, (parent, name)
        # Granted names: a process before it uses a GPU, and a slice that need not exist.
        assert stat.S_ISDIR((await op.mkdir(ROOT_INODE, b"%d" % idle, 0o755, ctx)).st_mode)
        assert await h.listdir(str(idle)) == ["0"]
        await op.rmdir(ROOT_INODE, b"%d" % idle, ctx)
        await op.mkdir(slices, b"\xff", 0o755, ctx)
        assert "\udcff" in await h.listdir("slice")
        await op.rmdir(slices, b"\xff", ctx)
        assert await h.listdir("slice") == ["a"]


@virtual
async def test_what_is_no_file(spawn: Spawn) -> None:
    """open and readlink of the wrong kind of inode, and every handler on an inode that is gone or never existed."""
    async with running() as h:
        process = spawn()
        who = await h.arrive(process.pid)
        op, ctx = h.operations, h.ctx
        directory, file = await h.inode(f"{process.pid}/0"), await h.inode(f"{process.pid}/0/gmem.current")
        assert await answers(op.open(directory, os.O_RDONLY, ctx)) == errno.EISDIR
        assert await answers(op.open(ROOT_INODE, os.O_RDONLY, ctx)) == errno.EISDIR
        assert await op.readlink(SELF_INODE, ctx) == b"%d" % os.getpid()
        assert await answers(op.readlink(SELF_INODE, SimpleNamespace(pid=1 << 22))) == errno.ENOENT
        process.kill()
        await h.gone(who)
        fields = SimpleNamespace(
            update_atime=False, update_mtime=False, update_uid=True, update_gid=False, update_mode=False
        )
        attr = SimpleNamespace(st_uid=1, st_gid=1, st_mode=0)
        for inode in (directory, file, 1 << 60):
            assert await answers(op.getattr(inode, ctx)) == errno.ENOENT
            assert await answers(op.setattr(inode, attr, fields, None, ctx)) == errno.ENOENT
            assert await answers(op.open(inode, os.O_RDWR, ctx)) == errno.ENOENT
            assert await answers(op.opendir(inode, ctx)) == errno.ENOENT
            assert await answers(op.access(inode, os.R_OK, ctx)) == errno.ENOENT
            assert await answers(op.lookup(inode, b"gmem.current", ctx)) == errno.ENOENT
            assert await answers(op.mkdir(inode, b"x", 0o755, ctx)) == errno.ENOENT
            assert await answers(op.rmdir(inode, b"x", ctx)) == errno.ENOENT


@virtual
async def test_readdir_pages(spawn: Spawn) -> None:
    """Every name comes once, however small the buffer. Only what fitted counts as looked up; vanished names are left
    out."""
    async with running() as h:
        processes = [spawn() for _ in range(5)]
        everybody = [await h.arrive(process.pid) for process in processes]
        whole = await h.listdir("/")
        assert set(whole) == {"ggroup.backend", "ggroup.capabilities", "ggroup.slices", "self", "gpus", "slice"} | {
            str(process.pid) for process in processes
        }
        for room in (1, 2, 3, 7):
            assert await h.listdir("/", room) == whole
        h.notifier._looked_up.clear()
        fh = await h.operations.opendir(ROOT_INODE, h.ctx)
        token = Token(3)
        await h.operations.readdir(fh, 0, token)
        assert dict(h.notifier._looked_up) == {inode: 1 for _, inode, _ in token.entries}
        processes[2].kill()
        await h.gone(everybody[2])
        await h.operations.readdir(fh, token.entries[-1][2], rest := Token(100))
        names = [os.fsdecode(name) for name, _, _ in token.entries + rest.entries]
        assert names == [name for name in whole if name != str(processes[2].pid)]
        await h.operations.releasedir(fh)
        assert h.operations._listings == {}


@virtual
async def test_lookups_are_counted_and_forgotten(spawn: Spawn) -> None:
    """lookup, mkdir and readdir each give the kernel a reference; forget returns them; nothing stays."""
    async with running() as h:
        pid = spawn().pid
        seen = h.notifier._looked_up
        await h.operations.mkdir(ROOT_INODE, b"%d" % pid, 0o755, h.ctx)
        directory = await h.inode(str(pid))
        assert seen[directory] == 2
        file = await h.inode(f"{pid}/0/gmem.current")
        await h.listdir(f"{pid}/0")
        assert seen[file] == 2
        await h.operations.forget([(file, 1)])
        assert seen[file] == 1
        await h.operations.forget([(inode, count) for inode, count in seen.items()])
        assert dict(seen) == {}
        await h.operations.forget([(file, 3), (1 << 50, 1)])
        assert dict(seen) == {}, "more than was given: no debt is kept"


@virtual
async def test_watchers_are_told_of_looked_up_files_only(spawn: Spawn, tmp_path: Path) -> None:
    """If the kernel has ever seen the events file, it is truncated through the mount, which inotify shows."""
    async with running(mountpoint=tmp_path) as h:
        known, unknown = spawn().pid, spawn().pid
        files = []
        for pid in (known, unknown):
            (tmp_path / f"{pid}/0").mkdir(parents=True)
            files.append(tmp_path / f"{pid}/0/gmem.events")
        who = [await h.arrive(pid) for pid in (known, unknown)]
        await trio.sleep(1)
        await h.inode(f"{known}/0/gmem.events")
        await h.inode(f"{unknown}/0")
        for file in files:
            file.write_text("untouched")
        for process in who:
            h.ledger.note(Member(process, 0), "high")
        await until(lambda: files[0].read_text() == "", "the file that was looked up is touched")
        assert files[1].read_text() == "untouched"
        await h.operations.forget([(await h.inode(f"{known}/0/gmem.events"), 2)])
        files[0].write_text("untouched")
        h.ledger.note(Member(who[0], 0), "high")
        await trio.sleep(1)
        assert files[0].read_text() == "untouched", "forgotten by the kernel: nobody can be watching"


@virtual
async def test_a_storm_of_events_is_told_once_in_a_while(spawn: Spawn, tmp_path: Path) -> None:
    """Watchers of a file are told at most once in an interval, whatever a program does; and of the last event, too."""
    async with running(mountpoint=tmp_path) as h:
        process = spawn()
        who, times = await h.arrive(process.pid), list[float]()
        await h.inode(f"{process.pid}/0/gmem.events")
        await trio.sleep(1)

        async def told(_: Messenger, tell: partial[None]) -> None:  # no thread, since the clock would not wait for it
            modified, _stale = tell.args
            if any(path.endswith("gmem.events") for path in modified):
                times.append(trio.current_time())
            await trio.lowlevel.checkpoint()

        with mock.patch.object(Messenger, "deliver", told):
            for _ in range(500):
                h.ledger.note(Member(who, 0), "high")
                await trio.sleep(NOTIFY_INTERVAL_S / 10)
            last = trio.current_time()
            await trio.sleep(10 * NOTIFY_INTERVAL_S)
        assert times[-1] >= last - NOTIFY_INTERVAL_S
        assert len(times) >= 2
        assert min(after - before for before, after in pairwise(times)) >= NOTIFY_INTERVAL_S * 0.99


@virtual
async def test_a_process_goes_from_the_leaves_up(spawn: Spawn) -> None:
    """Its files go first, then the GPU's directory, then its own: a directory with cached children is not empty."""
    async with running() as h:
        process, bystander = spawn(), spawn()
        who = await h.arrive(process.pid)
        await h.arrive(bystander.pid)
        files = [await h.inode(f"{process.pid}/0/{name}") for name in ("gmem.current", "compute.events")]
        await h.inode(f"{bystander.pid}/0/gmem.current")
        gpu, top = await h.inode(f"{process.pid}/0"), await h.inode(str(process.pid))
        process.kill()
        await h.gone(who)
        await until(lambda: len(h.kernel.dropped) >= 4, "the kernel is told")
        assert h.kernel.dropped == [
            (gpu, b"gmem.current", files[0]),
            (gpu, b"compute.events", files[1]),
            (top, b"0", gpu),
            (ROOT_INODE, b"%d" % process.pid, top),
        ]


@virtual
async def test_events_of_groups_that_nobody_looked_at_leave_nothing(spawn: Spawn) -> None:
    """Processes that come and go while the tree is not listed cost no memory."""
    async with running() as h:
        start = h.leftovers()
        for _ in range(3):
            process = spawn()
            who = await h.arrive(process.pid, "/batch/job")
            h.ledger.note(Member(who, 0), "high")
            process.kill()
            await h.gone(who)
        await settle()
        assert h.leftovers() == start


@virtual
async def test_delegation(spawn: Spawn, tmp_path: Path) -> None:
    """A chown of a slice's directory gives away all below it except the slice's own files; caches are invalidated."""
    async with running(mountpoint=tmp_path) as h:
        pid, stranger = spawn().pid, spawn().pid
        await h.arrive(pid, "/a/b")
        await h.arrive(stranger, "/ab")
        ctx, op = h.ctx, h.operations
        mine = [await h.inode(path) for path in ("slice/a/b", "slice/a/b/0/gmem.limit.high", f"{pid}/0/compute.freeze")]
        others = [
            await h.inode(path)
            for path in ("slice", "slice/a/0", "slice/a/0/gmem.limit.high", "slice/ab", f"{stranger}/0/gmem.stat")
        ]
        top = await h.inode("slice/a")
        attr = SimpleNamespace(st_uid=1000, st_gid=1001, st_mode=0)
        both = SimpleNamespace(
            update_atime=False, update_mtime=False, update_uid=True, update_gid=True, update_mode=False
        )
        assert (await op.setattr(top, attr, both, None, ctx)).st_uid == 1000
        for inode in mine:
            owner = await op.getattr(inode, ctx)
            assert (owner.st_uid, owner.st_gid) == (1000, 1001), inode
        for inode in others:
            assert (await op.getattr(inode, ctx)).st_uid == 0, inode
        await until(lambda: set(mine) <= set(h.kernel.stale), "cached attributes are dropped")
        assert not set(others[3:]) & set(h.kernel.stale)
        # A chown below the slice takes precedence over the inherited owner.
        attr.st_uid = 2000
        await op.setattr(mine[2], attr, both, None, ctx)
        assert (await op.getattr(mine[2], ctx)).st_uid == 2000
        # A new size or time has no effect, and is no error.
        nothing = SimpleNamespace(
            update_atime=False,
            update_mtime=False,
            update_uid=False,
            update_gid=False,
            update_mode=False,
            update_size=True,
        )
        assert (await op.setattr(mine[1], attr, nothing, None, ctx)).st_size == 4096


@virtual
async def test_facts_and_statfs() -> None:
    async with running() as h:
        data = await h.operations.statfs(h.ctx)
        assert (data.f_bsize, data.f_namemax) == (4096, 255)
        assert await h.read("ggroup.backend") == "ledger soft\n"
        assert await h.read("gpus/0/gmem.capacity") == f"{64 * MIB}\n"
        assert await h.refused("ggroup.backend", "x") == errno.EINVAL
        assert len(await h.listdir("gpus")) == 2


def test_every_handler_is_seen() -> None:
    """The introspection above finds every handler that pyfuse3 knows."""
    assert set(HANDLERS) > {*REFUSED, *CANNOT_FAIL, "read", "write", "poll", "readdir"}
