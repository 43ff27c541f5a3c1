"""kmod/plan.c and backend/ledgers/reclaim.py are twins: the same plan for the same tree, to the order of its targets.

The module's file is compiled unchanged, with the functions of tests/support/plan in place of the kernel's, so that this
runs without a virtual machine. The whole module answers the same histories in t5_ledger_machine.
"""

from __future__ import annotations

import ctypes
import errno
import shutil
import subprocess
from collections.abc import Sequence
from ctypes import c_uint, c_uint64
from pathlib import Path
from unittest import mock

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.common import clock
from backend.core.nextuse import NEXT_USE_MOST, NEXT_USE_S
from backend.core.protocols import Target
from backend.ledgers import abi, reclaim
from backend.ledgers.account import Account
from backend.process.identity import Member
from tests.support.accounts import below, processes, trees

ROOT = Path(__file__).parents[2]
TARGETS = 64
NOW_USEC = 1_000_000_000
"""Time of a plan by the boot clock, in microseconds."""
SETTINGS = settings(print_blob=True, max_examples=400)


class Row(ctypes.Structure):
    """struct row of tests/support/plan/twin.c."""

    _fields_ = tuple(
        (name, c_uint64) for name in ("above", "process", "current_bytes", "swap", "high", "low", "swap_max")
    )


@attrs.define
class Twin:
    """The module's planner, for one tree at a time."""

    library: ctypes.CDLL
    """The compiled file."""
    places: dict[Account, int] = attrs.field(factory=dict)
    """Place of each account in the tree, from 1, which is its id there."""

    def make(self, root: Account) -> None:
        """Take over a tree."""
        accounts = sorted(below(root), key=lambda account: len(list(account.path())))
        self.places = {account: place for place, account in enumerate(accounts, 1)}
        rows = (Row * len(accounts))()
        for row, account in zip(rows, accounts, strict=True):
            figures = account.figures
            row.above = 0 if account.parent is None else self.places[account.parent]
            row.process = isinstance(account.group, Member)
            row.current_bytes, row.swap = figures.current, figures.swap
            row.high, row.low, row.swap_max = figures.high, figures.low, figures.swap_max
        self.library.twin_make(rows, c_uint(len(rows)), c_uint64(root.granule))

    def foresee(self, at_usec: int, uses: Sequence[tuple[int, int, int]]) -> int:
        """Report classes of next use at a time, as (id, class, reserved); return the errno, 0 for none."""
        found = (abi.Use * len(uses))(*(abi.Use(*use) for use in uses))
        return -int(self.library.twin_foresee(c_uint64(at_usec * 1000), found, c_uint(len(found))))

    def come_late(self, leaf: Account) -> None:
        """Make a process another GPU's, and found only by the second of two lookups of its id."""
        self.library.twin_late(c_uint64(self.places[leaf]))

    def plan(self, top: Account, nbytes: int) -> list[Target]:
        """Return the plan."""
        found = (abi.Target * TARGETS)()
        place = c_uint64(self.places[top])
        count = self.library.twin_plan(c_uint64(NOW_USEC * 1000), place, c_uint64(nbytes), found, c_uint(TARGETS))
        assert count >= 0, errno.errorcode[-count]
        groups = {place: account.group for account, place in self.places.items()}
        targets = []
        for one in found[:count]:
            group = groups[one.id]
            assert isinstance(group, Member)
            targets.append(Target(group, one.nbytes, bool(one.flags & abi.TARGET_BELOW_LOW)))
        return targets

    def can_reclaim(self, top: Account, charged: Account, nbytes: int, over: int) -> bool:
        """Return whether so much could leave."""
        places = c_uint64(self.places[top]), c_uint64(self.places[charged])
        return bool(self.library.twin_reclaimable(*places, c_uint64(nbytes), c_uint64(over)))


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    """The compiled file of the module. The kernel headers that it includes are empty: kernel.h has everything."""
    folder = tmp_path_factory.mktemp("plan")
    for name in ("plan.c", "plan.h"):
        shutil.copy(ROOT / "kmod" / name, folder)
    for name in ("kernel.h", "twin.c"):
        shutil.copy(ROOT / "tests/support/plan" / name, folder)
    (folder / "uapi").symlink_to(ROOT / "kmod/uapi")
    (folder / "linux").mkdir()
    for line in (folder / "plan.c").read_text().splitlines():
        if line.startswith("#include <"):
            (folder / line[len("#include <") : -1]).touch()
    for name in ("device.h", "group.h"):
        (folder / name).touch()
    flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-I", str(folder)]
    sources = [str(folder / "plan.c"), str(folder / "twin.c")]
    subprocess.run(["gcc", *flags, "-include", "kernel.h", "-o", folder / "plan.so", *sources], check=True)
    return Twin(ctypes.CDLL(str(folder / "plan.so")))


@SETTINGS
@given(st.data())
def test_the_plans_are_the_same(twin: Twin, data: st.DataObject) -> None:
    """After any reports of next use, present and past, and for any granule."""
    root = data.draw(trees(leaves=8, granule=data.draw(st.sampled_from((1, 1, 1, 3, 7)))))
    twin.make(root)
    leaves = processes(root)
    for age_s in (NEXT_USE_S, NEXT_USE_S - 1, 0):
        classes = data.draw(st.dictionaries(st.sampled_from(leaves), st.integers(0, NEXT_USE_MOST), max_size=4))
        at_usec = NOW_USEC - age_s * 1_000_000
        assert twin.foresee(at_usec, [(twin.places[leaf], one, 0) for leaf, one in classes.items()]) == 0
        with mock.patch.object(clock, "boot_usec", return_value=at_usec):
            for leaf in leaves if age_s == NEXT_USE_S else classes:
                leaf.foresee(classes.get(leaf, 0))
    top = data.draw(st.sampled_from(list(below(root))))
    nbytes = data.draw(st.integers(0, 400))
    with mock.patch.object(clock, "boot_usec", return_value=NOW_USEC):
        assert twin.plan(top, nbytes) == reclaim.plan(top, nbytes)


@SETTINGS
@given(trees(leaves=8), st.integers(0, 60), st.data())
def test_what_could_leave_is_the_same(twin: Twin, root: Account, nbytes: int, data: st.DataObject) -> None:
    twin.make(root)
    charged = data.draw(st.sampled_from(processes(root)))
    over = data.draw(st.integers(1, 300))
    for level in charged.path():
        most = reclaim.reclaimable(level, charged, nbytes)
        assert twin.can_reclaim(level, charged, nbytes, over) == (most >= over)


@SETTINGS
@given(trees(leaves=3), st.data())
def test_what_makes_no_sense_is_refused_and_changes_nothing(twin: Twin, root: Account, data: st.DataObject) -> None:
    """A group that is gone is skipped."""
    twin.make(root)
    for leaf in processes(root):
        leaf.foresee(0)
    leaf = data.draw(st.sampled_from(processes(root)))
    right, place = (twin.places[leaf], NEXT_USE_MOST, 0), twin.places[leaf]
    slices = [place for account, place in twin.places.items() if not isinstance(account.group, Member)]
    wrong = [(place, NEXT_USE_MOST + 1, 0), (place, 1, 1), (data.draw(st.sampled_from(slices)), 0, 0)]
    assert twin.foresee(NOW_USEC, [right, data.draw(st.sampled_from(wrong))]) == errno.EINVAL
    assert twin.plan(root, 30) == reclaim.plan(root, 30)
    assert twin.foresee(NOW_USEC, [right, (1000, 1, 0)]) == 0
    with mock.patch.object(clock, "boot_usec", return_value=NOW_USEC):
        leaf.foresee(NEXT_USE_MOST)
        assert twin.plan(root, 30) == reclaim.plan(root, 30)


@SETTINGS
@given(trees(leaves=3), st.data())
def test_what_another_gpu_makes_meanwhile_is_passed_over(twin: Twin, root: Account, data: st.DataObject) -> None:
    """A caller may name an id that does not exist yet, since the other GPU's lock is not held."""
    twin.make(root)
    for leaf in processes(root):
        leaf.foresee(0)
    leaf = data.draw(st.sampled_from(processes(root)))
    twin.come_late(leaf)
    assert twin.foresee(NOW_USEC, [(twin.places[leaf], NEXT_USE_MOST, 0)]) == 0
    with mock.patch.object(clock, "boot_usec", return_value=NOW_USEC):
        assert twin.plan(root, 30) == reclaim.plan(root, 30)
