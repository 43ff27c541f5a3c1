"""The FUSE operations: thin functions, each a call into the tree or an open file.

An exception that escapes a handler would unmount the filesystem, so none does: an OSError is the caller's answer, and
anything else is a bug, logged and answered with EIO. Operations that cgroup2 refuses are refused with the same errno
(measured on Linux 6.18).
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import pyfuse3
from pyfuse3 import FUSEError

from backend.common.errors import ERRNOS, errno_of, fail
from ggroupfs.fs.directories import Directories, Listing
from ggroupfs.fs.files import Events, OpenFile, open_file
from ggroupfs.fs.inodes import Attributes
from ggroupfs.fs.notify import Notifier
from ggroupfs.fs.opened import FILES, LISTINGS, Opened
from ggroupfs.fs.tree import Tree

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

CACHE_S = 300.0
"""Seconds for which the kernel may cache names and attributes; earlier changes are pushed (ggroupfs.fs.notify)."""


def _answer(name: str, error: BaseException) -> FUSEError:
    """Return the answer for an exception in the operation `name`."""
    if not isinstance(error, OSError) or error.errno not in ERRNOS:
        log.error("%s failed", name, exc_info=error)
    # ENOSYS would make the kernel never send the operation again on this mount; poll raises it directly where it is
    # meant.
    return FUSEError(errno.EOPNOTSUPP if (code := errno_of(error)) == errno.ENOSYS else code)


def _handler(
    sync: Callable[Concatenate[Operations, P], T],
) -> Callable[Concatenate[Operations, P], Coroutine[Any, Any, T]]:
    """Wrap an operation that never waits."""

    async def handler(self: Operations, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return sync(self, *args, **kwargs)
        except FUSEError:
            raise
        except Exception as error:
            raise _answer(sync.__name__, error) from None

    return functools.update_wrapper(handler, sync)


def _refuse(code: int) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Make an operation that always fails with `code`."""

    async def handler(self: Operations, *_: Any) -> Any:
        raise FUSEError(code)

    return handler


def _entry(attributes: Attributes) -> pyfuse3.EntryAttributes:
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = attributes.inode
    entry.st_mode = attributes.mode
    entry.st_nlink = attributes.links
    entry.st_uid = attributes.uid
    entry.st_gid = attributes.gid
    entry.st_size = attributes.size
    times = attributes.times
    entry.st_atime_ns, entry.st_mtime_ns, entry.st_ctime_ns = times.atime_ns, times.mtime_ns, times.ctime_ns
    entry.entry_timeout = entry.attr_timeout = CACHE_S
    return entry


class Operations(pyfuse3.Operations):
    """The operations of a mount. Xattrs and a flush handler are left out: each would cost a request per access."""

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, tree: Tree, events: Events, notifier: Notifier, *, poll: bool = True) -> None:
        super().__init__()
        self._tree = tree
        self._events = events
        self._notifier = notifier
        self._files = Opened[OpenFile](FILES)
        self._listings = Opened[Listing](LISTINGS)
        self._directories = Directories(tree, _entry)
        self._next = 1
        self._poll = poll

    # Names and attributes

    @_handler
    def lookup(self, parent: int, name: bytes, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return self._seen(self._tree.lookup(parent, os.fsdecode(name)))

    @_handler
    def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return _entry(self._tree.attributes(inode))

    @_handler
    def setattr(
        self,
        inode: int,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        """Set owner, mode and times. A new size is ignored without an error, as in cgroup2."""
        if fields.update_uid or fields.update_gid or fields.update_mode:
            changed = self._tree.chown(
                inode,
                attr.st_uid if fields.update_uid else None,
                attr.st_gid if fields.update_gid else None,
                attr.st_mode & 0o7777 if fields.update_mode else None,
                ctx.uid,
            )
            self._notifier.attributes_changed(changed)
        if fields.update_atime or fields.update_mtime:
            self._tree.set_times(
                inode,
                attr.st_atime_ns if fields.update_atime else None,
                attr.st_mtime_ns if fields.update_mtime else None,
            )
        return _entry(self._tree.attributes(inode))

    @_handler
    def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        return self._tree.readlink(inode, ctx.pid).encode()

    @_handler
    def forget(self, inodes: Sequence[tuple[int, int]]) -> None:
        for inode, count in inodes:
            self._notifier.forgotten(inode, count)

    @_handler
    def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = 4096
        data.f_namemax = 255
        return data

    @_handler
    def access(self, inode: int, mode: int, ctx: pyfuse3.RequestContext) -> bool:
        self._tree.attributes(inode)
        return True  # default_permissions: the kernel has checked

    # Directories

    @_handler
    def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        self._listings.require(ctx.uid)
        return self._open(self._listings, self._directories.open(inode), ctx.uid)

    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        try:
            tell = functools.partial(pyfuse3.readdir_reply, token)
            self._notifier.looked_up(*self._directories.read(self._listings[fh], start_id, tell))
        except Exception as error:
            raise _answer("readdir", error) from None

    @_handler
    def releasedir(self, fh: int) -> None:
        self._listings.close(fh)

    async def mkdir(self, parent: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        try:
            return self._seen(await self._tree.mkdir(parent, os.fsdecode(name), ctx.uid))
        except Exception as error:
            raise _answer("mkdir", error) from None

    @_handler
    def rmdir(self, parent: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._tree.rmdir(parent, os.fsdecode(name))

    # Files

    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        try:
            if flags & os.O_DIRECT:
                raise fail(errno.EINVAL)
            uid = ctx.uid
            self._files.require(uid)
            control, group = self._tree.file(inode)
            fh = self._open(self._files, open_file(self._tree.controller, self._events, control, group, uid), uid)
            return pyfuse3.FileInfo(fh=fh, direct_io=True, keep_cache=False)
        except Exception as error:
            raise _answer("open", error) from None

    async def read(self, fh: int, offset: int, size: int) -> bytes:
        try:
            return self._files[fh].read(offset, size)
        except Exception as error:
            raise _answer("read", error) from None

    async def write(self, fh: int, offset: int, data: bytes) -> int:
        try:
            return await self._files[fh].write(data)
        except Exception as error:
            raise _answer("write", error) from None

    async def poll(self, inode: int, fh: int, handle: pyfuse3.PollHandle | None, ctx: pyfuse3.RequestContext) -> int:
        if not self._poll:
            raise FUSEError(errno.ENOSYS)  # once is enough: the kernel never polls this mount again
        try:
            return self._files[fh].poll(handle)
        except Exception as error:
            raise _answer("poll", error) from None

    async def release(self, fh: int) -> None:
        try:
            self._files.close(fh).close()
        except Exception as error:
            raise _answer("release", error) from None

    @_handler
    def fsync(self, fh: int, datasync: bool) -> None:
        """Do nothing: a value holds as soon as it is written."""

    # Operations that cgroup2 refuses

    @_handler
    def mknod(
        self, parent: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        raise FUSEError(errno.EACCES if stat.S_ISREG(mode) else errno.EPERM)

    @_handler
    def rename(
        self,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        raise FUSEError(errno.EINVAL if flags else errno.EPERM)

    create = _refuse(errno.EACCES)
    fsyncdir = _refuse(errno.EINVAL)
    unlink = _refuse(errno.EPERM)
    link = _refuse(errno.EPERM)
    symlink = _refuse(errno.EPERM)

    # Helpers

    def _seen(self, attributes: Attributes) -> pyfuse3.EntryAttributes:
        self._notifier.looked_up(attributes.inode)
        return _entry(attributes)

    def _open(self, table: Opened[T], what: T, uid: int) -> int:
        fh, self._next = self._next, self._next + 1
        table.add(fh, what, uid)
        return fh
