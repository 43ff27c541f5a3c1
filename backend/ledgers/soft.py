"""SoftLedger: the books in the memory of one process. Readable first: it specifies the answers of every other ledger.

A GPU's groups form a tree: its root (the GPU, whose high is its capacity), slices below it, processes as leaves. A
charge goes to a process and to everything above it, so at every moment the figures of a group are the sum of its
children's. Limits act as in memory cgroups (Documentation/admin-guide/cgroup-v2.rst, "Memory").
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence

import trio

from backend.common.errors import fail
from backend.core.held import Held
from backend.core.nextuse import NEXT_USE_MOST
from backend.core.protocols import Inherited, Target
from backend.core.records import MAX, PEAKS, Books, Channel, Peak
from backend.core.settings import REASONS, SETTINGS
from backend.ledgers import reclaim
from backend.ledgers.account import Account
from backend.process.identity import ROOT, Group, Member, SliceOn

_OF_SLICES = {setting.field for setting in SETTINGS if setting.slices_only}
"""Fields of the settings that only slices have."""

_BOUNDS = {setting.field: (setting.least, setting.most) for setting in SETTINGS}
"""Least and greatest value of each setting, by field."""

_NOTED = {"low", "high", "max", "oom", "reclaim", "fail", "oom_kill", "oom_group_kill"}
"""Events that are noted by callers, as the ledger does not see them, or not always."""


class SoftLedger:
    """The reference :class:`backend.core.protocols.Ledger`."""

    name = "soft"
    peaks = PEAKS

    def __init__(self) -> None:
        self._accounts: dict[Group, Account] = {}
        self._listeners: list[Callable[[Group, Channel], None]] = []

    def listen(self, listener: Callable[[Group, Channel], None], configured: Callable[[Group], None]) -> None:
        self._listeners.append(listener)

    async def run(self) -> None:
        await trio.sleep_forever()  # no other program knows these books

    def close(self, *, released: bool = False, handed_over: bool = False) -> None:
        pass

    # The tree

    def inherited(self) -> Sequence[Inherited]:
        return ()

    def add_gpu(self, index: int, capacity: int, granule: int = 1) -> None:
        root = SliceOn(ROOT, index)
        if root in self._accounts:
            raise fail(errno.EEXIST)
        self._accounts[root] = self._open(root, None, granule)
        self._accounts[root].update(high=capacity)

    def add(self, group: Group, parent: SliceOn) -> None:
        if group in self._accounts:
            raise fail(errno.EEXIST)
        above = self._account(parent)
        if parent.gpu != group.gpu:
            raise fail(errno.EXDEV)
        if not isinstance(parent, SliceOn):
            raise fail(errno.EINVAL)
        self._accounts[group] = self._open(group, above)

    def move(self, group: Group, parent: SliceOn) -> None:
        account, above = self._account(group), self._account(parent)
        wrong = parent.gpu != group.gpu or not isinstance(parent, SliceOn)
        if account.parent is None or wrong or account in above.path():
            raise fail(errno.EINVAL)
        held, swapped = account.figures.current, account.figures.swap
        self._shift(account.parent, -held, -swapped)
        del account.parent.children[group]
        account.parent = above
        above.children[group] = account
        self._shift(above, held, swapped)

    def remove(self, group: Group) -> None:
        account = self._account(group)
        if account.children or account.parent is None:
            raise fail(errno.EBUSY)
        self._shift(account.parent, -account.figures.current, -account.figures.swap)
        del account.parent.children[group]
        del self._accounts[group]

    def parent(self, group: Group) -> Group | None:
        above = self._account(group).parent
        return above.group if above is not None else None

    # Reading and configuring

    def books(self, group: Group) -> Books:
        return self._account(group).figures

    def configure(self, group: Group, **changes: int | bool) -> None:
        if not changes.keys() <= _BOUNDS.keys():
            raise fail(errno.EINVAL)
        account = self._account(group)
        if account.parent is None:  # cgroup-v2.rst: the root has no limits
            raise fail(errno.EPERM)
        if not (_OF_SLICES.isdisjoint(changes) or isinstance(group, SliceOn)):
            raise fail(errno.EINVAL)
        figures, others = account.figures, False
        for name, value in changes.items():
            least, most = _BOUNDS[name]
            if not least <= value <= most:
                raise fail(errno.ERANGE)
            others = others or getattr(figures, name) != value
        if others:
            account.update(**changes)

    def set_reasons(self, group: Group, off_all: int, off_gr: int) -> None:
        account = self._account(group)
        if isinstance(group, SliceOn) or (off_all | off_gr) & ~REASONS or off_all & off_gr:
            raise fail(errno.EINVAL)
        if (off_all, off_gr) != (account.figures.off_all, account.figures.off_gr):
            account.update(off_all=off_all, off_gr=off_gr)

    def set_next_use(self, gpu: int, ranks: Mapping[Member, int]) -> None:
        self._account(SliceOn(ROOT, gpu))
        for group, rank in ranks.items():
            if not isinstance(group, Member) or group.gpu != gpu or not 0 <= rank <= NEXT_USE_MOST:
                raise fail(errno.EINVAL)
        for group, rank in ranks.items():
            if group in self._accounts:
                self._accounts[group].foresee(rank)

    def held(self, group: Group) -> Held:
        return self._account(group).held

    def reset_peak(self, group: Group, peak: Peak) -> None:
        account = self._account(group)
        figures = account.figures
        account.update(**{peak: figures.current if peak == "peak" else figures.swap})

    # Charging

    def charge(self, group: Group, nbytes: int) -> None:
        account = self._leaf(group, nbytes)
        for level in account.path():
            figures = level.figures
            holds = figures.current + nbytes
            over, beyond = holds - figures.high, holds - figures.limit_max
            refused = holds > MAX or (over > 0 and over > reclaim.reclaimable(level, account, nbytes, over))
            if beyond > 0 and holds <= MAX:
                self._event(level, "max")
                # An allocation that is not made yet cannot be moved out: its room has to be there before.
                if beyond <= reclaim.reclaimable(level, account, 0, beyond):
                    raise fail(errno.EAGAIN)
                refused = True
            if refused:
                self._event(account, "oom")
                raise fail(errno.ENOMEM)
        self._shift(account, nbytes, 0)

    def uncharge(self, group: Group, nbytes: int) -> None:
        account = self._leaf(group, nbytes)
        if nbytes > account.figures.current:
            raise fail(errno.EINVAL)
        self._shift(account, -nbytes, 0)

    def uncharge_swap(self, group: Group, nbytes: int) -> None:
        account = self._leaf(group, nbytes)
        if nbytes > account.figures.swap:
            raise fail(errno.EINVAL)
        self._shift(account, 0, -nbytes)

    def swap_out(self, group: Group, nbytes: int, usec: int = 0) -> None:
        account = self._leaf(group, nbytes)
        if nbytes > account.figures.current:
            raise fail(errno.EINVAL)
        if any(nbytes > max(0, level.figures.swap_max - level.figures.swap) for level in account.path()):
            raise fail(errno.ENOSPC)
        for level in account.path():
            books = level.figures
            level.update(
                **_holds(books, -nbytes, nbytes),
                swapout_bytes=books.swapout_bytes + nbytes,
                swapouts=books.swapouts + 1,
                move_usec=books.move_usec + usec,
            )

    def swap_in(self, group: Group, nbytes: int, usec: int = 0) -> None:
        account = self._leaf(group, nbytes)
        if nbytes > account.figures.swap:
            raise fail(errno.EINVAL)
        if any(level.figures.current + nbytes > level.figures.limit for level in account.path()):
            raise fail(errno.EAGAIN)
        for level in account.path():
            books = level.figures
            level.update(
                **_holds(books, nbytes, -nbytes),
                swapin_bytes=books.swapin_bytes + nbytes,
                swapins=books.swapins + 1,
                move_usec=books.move_usec + usec,
            )

    def observe(self, group: Group, nbytes: int) -> None:
        account = self._leaf(group, nbytes)
        more = nbytes - account.figures.current
        if any(level.figures.current + more > MAX for level in account.path()):
            raise fail(errno.EINVAL)
        if more:
            self._shift(account, more, 0)

    # Reclaim

    def excess(self, group: Group) -> int:
        books = self._account(group).figures
        return max(0, books.current - books.limit)

    def plan(self, group: Group, nbytes: int) -> Sequence[Target]:
        return reclaim.plan(self._account(group), nbytes)

    def note(self, group: Group, event: str) -> None:
        if event not in _NOTED:
            raise fail(errno.EINVAL)
        self._event(self._account(group), event)

    def press(self, group: Group, nbytes: int) -> None:
        account = self._account(group)
        account.update(pressure_bytes=nbytes, pressure_seq=account.figures.pressure_seq + 1)
        self._tell(group, Channel.USERMEM)

    # Helpers

    def _open(self, group: Group, parent: Account | None, granule: int = 1) -> Account:
        """Return a new, empty account."""
        return Account(group, parent, granule)

    def _account(self, group: Group) -> Account:
        try:
            return self._accounts[group]
        except KeyError:
            raise fail(errno.ENODEV) from None

    def _leaf(self, group: Group, nbytes: int) -> Account:
        account = self._account(group)
        if nbytes < 0 or nbytes > MAX or isinstance(group, SliceOn):
            raise fail(errno.EINVAL)
        return account

    def _shift(self, account: Account, held: int, swapped: int) -> None:
        """Add to the figures of an account and of every one above it."""
        for level in account.path():
            level.update(**_holds(level.figures, held, swapped))

    def _event(self, account: Account, event: str) -> None:
        """Count an event in a group and, as memory.events does, in every group above it."""
        name = f"events_{event}"
        for level in account.path():
            level.update(**{name: getattr(level.figures, name) + 1})
            self._tell(level.group, Channel.GMEM)

    def _tell(self, group: Group, channel: Channel) -> None:
        for listener in self._listeners:
            listener(group, channel)


def _holds(books: Books, held: int, swapped: int) -> dict[str, int]:
    """Return the figures of a group that holds this much more."""
    current, swap = books.current + held, books.swap + swapped
    changes = {"current": current, "swap": swap}
    if current > books.peak:
        changes |= {"peak": current, "peak_ever": max(books.peak_ever, current)}
    if swap > books.swap_peak:
        changes |= {"swap_peak": swap, "swap_peak_ever": max(books.swap_peak_ever, swap)}
    return changes
