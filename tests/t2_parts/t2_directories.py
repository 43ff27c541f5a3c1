"""Cached listings of directories: after any change of the tree, a listing shows what the directory contains."""

import contextlib
from typing import Any

import trio
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from trio.testing import MockClock

from backend.core.controller import Controller
from backend.ledgers.soft import SoftLedger
from backend.process.identity import Group, Member, Process, Slice
from backend.soft.gpu import SoftGpu
from backend.soft.machine import Machine
from ggroupfs.fs.directories import KEPT, Directories, Listing
from ggroupfs.fs.inodes import ROOT_INODE
from ggroupfs.fs.tree import Tree

PIDS = st.integers(2, 5)
SLICES = st.sampled_from([Slice("/a"), Slice("/a/b"), Slice("/c")])
GPUS = st.integers(0, 1)
IDS = st.none() | st.integers(0, 2)


class Forgets:
    """The calls that the Notifier makes to the tree when something goes."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def process_came(self, process: Process) -> None: ...

    def process_gone(self, process: Process) -> None:
        self.tree.forget(process)

    def process_moved(self, process: Process) -> None: ...

    def process_migrated(self, here: Group, there: Group) -> None:
        self.tree.hand_over(here, there)
        self.tree.forget(here)

    def process_left(self, group: Group) -> None:
        self.tree.forget(group)

    def slice_made(self, slice_: Slice) -> None: ...

    def slice_gone(self, slice_: Slice) -> None:
        self.tree.forget(slice_)

    def slice_renewed(self, slice_: Slice) -> None:
        self.tree.disown(slice_)


class KeptListings(RuleBasedStateMachine):
    @initialize()
    def mount(self) -> None:
        machine = Machine(2)
        controller = Controller(SoftLedger(), [SoftGpu(index, machine=machine) for index in (0, 1)])
        self.tree, self.population = Tree(controller), controller.population
        self.population.watchers.append(Forgets(self.tree))
        made: Any = lambda attributes: attributes  # noqa: E731 - what is told is compared, not what a C structure has
        self.directories = Directories(self.tree, made)
        self.open: list[Listing] = []

    @rule(pid=PIDS, slice_=SLICES, gpus=st.sets(GPUS, min_size=1))
    def a_process_comes(self, pid: int, slice_: Slice, gpus: set[int]) -> None:
        self.population.admit(Process(pid, 1), slice_, gpus)

    @rule(pid=PIDS)
    def one_goes(self, pid: int) -> None:
        self.population.expel(Process(pid, 1))

    @rule(pid=PIDS, slice_=SLICES)
    def one_moves(self, pid: int, slice_: Slice) -> None:
        resident = self.population.by_pid(pid)
        if resident is not None and resident.slice != slice_:
            self.population.relocate(resident, slice_)

    @rule(pid=PIDS, gpu=GPUS, migrates=st.booleans())
    def one_leaves_a_gpu(self, pid: int, gpu: int, migrates: bool) -> None:
        resident = self.population.by_pid(pid)
        if resident is not None and resident.gpus == {0, 1}:
            here, there = Member(resident.process, gpu), Member(resident.process, 1 - gpu)
            if migrates:
                trio.run(self.migrate, here, there, clock=MockClock())
            else:
                self.population.leave(here)

    async def migrate(self, here: Member, there: Member) -> None:
        """Move a member in trio, since the controller notes the time."""
        self.population.migrated(here, there)

    @rule(slice_=SLICES, there=st.booleans())
    def a_slice_is_made_or_unmade(self, slice_: Slice, there: bool) -> None:
        with contextlib.suppress(OSError, KeyError):
            (self.population.make if there else self.population.unmake)(slice_)

    @rule(slice_=SLICES, held=st.booleans())
    def a_slice_is_held_or_let_go(self, slice_: Slice, held: bool) -> None:
        (self.population.hold if held else self.population.let_go)(slice_)

    @rule(data=st.data(), uid=IDS, gid=IDS, permissions=st.none() | st.just(0o600), by=st.integers(0, 2))
    def something_is_chowned(
        self, data: st.DataObject, uid: int | None, gid: int | None, permissions: int | None, by: int
    ) -> None:
        inodes = [inode for directory in self.everything() for _, inode in self.tree.entries(directory)]
        with contextlib.suppress(PermissionError):  # only root may give its own to others
            self.tree.chown(data.draw(st.sampled_from(inodes)), uid, gid, permissions, by)

    @rule(data=st.data(), at=st.none() | st.just(1), modified=st.none() | st.just(2))
    def times_are_set(self, data: st.DataObject, at: int | None, modified: int | None) -> None:
        inodes = [inode for directory in self.everything() for _, inode in self.tree.entries(directory)]
        self.tree.set_times(data.draw(st.sampled_from(inodes)), at, modified)

    @rule(slice_=SLICES, uid=st.integers(1, 2))
    def a_slice_is_given(self, slice_: Slice, uid: int) -> None:
        self.population.hold(slice_)
        inode = ROOT_INODE
        for name in ("slice", *slice_.path.strip("/").split("/")):
            inode = dict(self.tree.entries(inode))[name]
        self.tree.chown(inode, uid, None, None)

    @rule(data=st.data())
    def one_is_opened_and_stays_so(self, data: st.DataObject) -> None:
        self.open.append(self.directories.open(data.draw(st.sampled_from(self.everything()))))

    @invariant()
    def a_listing_is_true(self) -> None:
        for inode in self.everything():
            listing = self.directories.open(inode)
            found = list(self.tree.entries(inode))
            assert [(name.decode(), inode) for name, inode in zip(listing.names, listing.inodes, strict=True)] == found
            assert self.told(listing) == {inode: self.tree.attributes(inode) for _, inode in found}

    @invariant()
    def one_that_was_open_leaves_out_what_went(self) -> None:
        for listing in self.open:
            now: dict[int, Any] = {}
            for inode in listing.inodes:
                with contextlib.suppress(FileNotFoundError):
                    now[inode] = self.tree.attributes(inode)
            assert self.told(listing) == now

    def everything(self) -> list[int]:
        """Return the inodes of all directories."""
        found = pending = [ROOT_INODE]
        while pending:
            inside = [inode for above in pending for _, inode in self.tree.entries(above)]
            pending = [inode for inode in inside if self.tree.directory(inode).inode == inode]
            found = found + pending
        assert len(found) < KEPT, "each of them may be kept"
        return found

    def told(self, listing: Listing) -> dict[int, Any]:
        """Return what a reader sees, two names at a time."""
        told: dict[int, Any] = {}
        at = 0
        while True:
            room, before = 2, at

            def tell(name: bytes, entry: Any, after: int) -> bool:
                nonlocal room, at
                if not room:
                    return False
                room, at = room - 1, after
                told[entry.inode] = entry
                return True

            inodes = self.directories.read(listing, at, tell)
            assert inodes == list(told)[len(told) - len(inodes) :]
            if at == before:
                return told


TestKeptListings = KeptListings.TestCase
