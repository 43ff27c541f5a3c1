"""Keeps the kernel's caches correct, and wakes inotify watchers.

Names and attributes are cached for minutes, which makes the tree fast, so every removal and change of owner is pushed.
FUSE tells inotify nothing about a change that the server makes. But a truncation *through the mount* gives every
watcher IN_MODIFY, so the daemon truncates its own events files, from a thread, as any other client would.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import trio

from backend.core.records import Channel
from backend.process.identity import Group, Process, Slice, group_on
from ggroupfs.fs.files import Events
from ggroupfs.fs.inodes import Directory
from ggroupfs.fs.messenger import Messenger
from ggroupfs.fs.tree import Tree

NOTIFY_INTERVAL_S = 0.01
"""Shortest time between two IN_MODIFY of a file, seconds; the same as the kernel's CGROUP_FILE_NOTIFY_MIN_INTV."""


class Kernel(Protocol):
    """The messages to the kernel (pyfuse3). OSError if the kernel has nothing of that kind in its cache."""

    def invalidate_entry(self, inode_p: int, name: bytes, deleted: int = 0) -> None:
        """Report a name that is gone; watchers of inode `deleted` get IN_DELETE_SELF."""

    def invalidate_inode(self, inode: int, attr_only: bool = False) -> None:
        """Report that the attributes of an inode have changed."""


class Notifier:
    """Listens to the Controller, and notifies pollers at once, the kernel and watchers soon after."""

    def __init__(self, tree: Tree, events: Events, kernel: Kernel, messenger: Messenger, mountpoint: str) -> None:
        self._tree = tree
        self._events = events
        self._kernel = kernel
        self._messenger = messenger
        self._mountpoint = mountpoint
        self._looked_up: Counter[int] = Counter()
        self._modified: dict[int, str] = {}
        self._stale: set[int] = set()
        self._wake = trio.Event()
        tree.controller.listeners.append(self.event)
        tree.controller.population.watchers.append(self)

    # The kernel's references to events files; without one no program can be watching

    def looked_up(self, *inodes: int) -> None:
        """Note that the kernel was given a reference to each of these inodes."""
        self._looked_up.update(inodes)

    def forgotten(self, inode: int, count: int) -> None:
        """Note that the kernel gave `count` references back."""
        self._looked_up[inode] -= count
        if self._looked_up[inode] <= 0:
            del self._looked_up[inode]

    # Events

    def event(self, group: Group, channel: Channel) -> None:
        """Listener of the Controller."""
        self._events.happened(group, channel)
        directory = self._tree.known(group)
        control = next((one for one in directory.files if one.channel is channel), None) if directory else None
        if directory is None or control is None:
            return
        inode = directory.file_inode(control)
        if inode in self._looked_up:
            self._modified[inode] = f"{self._mountpoint}{self._tree.path(directory)}/{control.name}"
            self._wake.set()

    def process_came(self, process: Process) -> None:
        """Watcher of the population: st_nlink of the process's directory, and of the root, has changed."""
        self._filled(self._tree.root)
        self._filled(self._tree.known(process))

    def process_gone(self, process: Process) -> None:
        """Watcher of the population."""
        self._gone(process)

    def process_moved(self, process: Process) -> None:
        """Watcher of the population: the owner may have changed with the slices above."""
        self.attributes_changed(self._tree.seen_inodes(process))

    def process_migrated(self, here: Group, there: Group) -> None:
        """Watcher of the population: owners that were set in the old directory now hold in the new one."""
        self.attributes_changed(self._tree.hand_over(here, there))
        self._gone(here)

    def process_left(self, group: Group) -> None:
        """Watcher of the population."""
        self._gone(group)

    def slice_made(self, slice_: Slice) -> None:
        """Watcher of the population: st_nlink of the parent directory has changed."""
        if slice_.parent is not None:
            self._filled(self._tree.known(slice_.parent))

    def slice_gone(self, slice_: Slice) -> None:
        """Watcher of the population."""
        self._gone(slice_)

    def slice_renewed(self, slice_: Slice) -> None:
        """Watcher of the population."""
        self.attributes_changed(self._tree.disown(slice_))

    def attributes_changed(self, inodes: Iterable[int]) -> None:
        """Note that the cached attributes of these inodes are stale."""
        self._stale.update(inodes)
        self._wake.set()

    def _gone(self, subject: Group | Process | Slice) -> None:
        if isinstance(subject, Group):
            self._events.forget(subject)
        else:
            for gpu in self._tree.controller.gpus:
                self._events.forget(group_on(subject, gpu))
        for directory in self._tree.forget(subject):
            # Files first: a directory with a file in the dentry cache would not be empty.
            for control in directory.files:
                inode = directory.file_inode(control)
                if inode in self._looked_up:
                    self._drop(directory.inode, control.name, inode)
            self._drop(directory.parent, directory.name, directory.inode)

    def _filled(self, directory: Directory | None) -> None:
        """Report one more entry in a directory that the kernel may have cached.

        The kernel notices a removal by itself.
        """
        if directory is not None and (directory.inode in self._looked_up or directory is self._tree.root):
            self._messenger.post(functools.partial(self._tell, (), (directory.inode,)))

    def _drop(self, parent: int, name: str, inode: int) -> None:
        self._messenger.post(functools.partial(self._invalidate, parent, os.fsencode(name), inode))

    # The task that waits

    async def run(self) -> None:
        """Notify watchers and refresh attributes until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            modified, self._modified = list(self._modified.values()), {}
            stale, self._stale = self._stale, set()
            await self._messenger.deliver(functools.partial(self._tell, modified, stale))
            await trio.sleep(NOTIFY_INTERVAL_S)

    # In the messenger's thread

    def _invalidate(self, parent: int, name: bytes, inode: int) -> None:
        with contextlib.suppress(OSError):  # not in the kernel's cache
            self._kernel.invalidate_entry(parent, name, inode)

    def _tell(self, modified: Iterable[str], stale: Iterable[int]) -> None:
        for inode in stale:
            with contextlib.suppress(OSError):  # not in the kernel's cache
                self._kernel.invalidate_inode(inode, attr_only=True)
        for path in modified:
            with contextlib.suppress(OSError):  # gone since
                os.truncate(path, 0)
