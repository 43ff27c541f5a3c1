"""The choice of reclaim: properties over generated trees, each against a second statement of the same rule."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.common import clock
from backend.core.nextuse import NEXT_USE_S, NextUse
from backend.core.protection import effective_lows
from backend.core.protocols import Target
from backend.ledgers import reclaim
from backend.ledgers.account import Account
from backend.process.identity import ROOT, Member, Process, Slice, SliceOn
from tests.support.accounts import below, processes, settle, trees
from tests.support.model import effective_protection
from tests.support.strategies import small

SETTINGS = settings(print_blob=True, max_examples=300)


# Effective protection


def calculate_protection(counter: Account, root: Account) -> int:
    """page_counter_calculate_protection() down from `root`: return the ``elow`` of a counter below it."""
    if counter is root:
        return 0
    usage, parent = counter.figures.current, counter.parent
    assert parent is not None
    if not usage:
        return 0
    if parent is root:
        return counter.figures.low
    children_low_usage = sum(min(c.figures.current, c.figures.low) for c in parent.children.values())
    return effective_protection(
        usage, parent.figures.current, counter.figures.low, calculate_protection(parent, root), children_low_usage
    )


@SETTINGS
@given(trees(), st.data())
def test_effective_low_is_the_kernels(root: Account, data: st.DataObject) -> None:
    """What the kernel protects of an account, up to what the account has."""
    top = data.draw(st.sampled_from(list(below(root))))
    for account in below(top):
        assert effective_lows(top).get(account, 0) == min(account.figures.current, calculate_protection(account, top))


@SETTINGS
@given(trees())
def test_what_is_protected_below_a_slice_is_no_more_than_the_slices_own(root: Account) -> None:
    for account in below(root):
        if account is not root and account.children:
            parts = sum(effective_lows(root).get(child, 0) for child in account.children.values())
            assert parts <= effective_lows(root).get(account, 0)


# Room in the host


def most_by_trial(top: Account, held: Mapping[Account, int]) -> int:
    """Return the most that can leave below `top`, found by trying every way to take from every process."""
    leaves = processes(top)
    best = 0
    for taken in itertools.product(*(range(held[leaf] + 1) for leaf in leaves)):
        if sum(taken) > best and all(
            sum(take for leaf, take in zip(leaves, taken, strict=True) if level in leaf.path())
            <= max(0, level.figures.swap_max - level.figures.swap)
            for level in {level for leaf in leaves for level in leaf.path()}
        ):
            best = sum(taken)
    return best


@SETTINGS
@given(trees(most=4, leaves=3), st.integers(0, 3), st.data())
def test_reclaimable_is_the_most_that_any_way_of_taking_takes(root: Account, nbytes: int, data: st.DataObject) -> None:
    charged = data.draw(st.sampled_from(processes(root)))
    held = {leaf: leaf.figures.current + (nbytes if leaf is charged else 0) for leaf in processes(root)}
    enough = data.draw(st.integers(0, 14))
    for level in charged.path():
        most = most_by_trial(level, held)
        assert reclaim.reclaimable(level, charged, nbytes) == most
        assert (reclaim.reclaimable(level, charged, nbytes, enough) >= enough) == (most >= enough)


@SETTINGS
@given(trees(most=4, leaves=3), st.integers(0, 14), st.data())
def test_a_plan_takes_all_that_any_way_of_taking_takes(root: Account, nbytes: int, data: st.DataObject) -> None:
    top = data.draw(st.sampled_from(list(below(root))))
    held = {leaf: leaf.figures.current for leaf in processes(top)}
    planned = sum(target.nbytes for target in reclaim.plan(top, nbytes))
    assert planned == min(nbytes, most_by_trial(top, held))


@SETTINGS
@given(trees(), st.integers(-3, 200))
def test_a_plan_spares_what_is_protected_while_others_have_more(root: Account, nbytes: int) -> None:
    for top in below(root):
        plan = reclaim.plan(top, nbytes)
        leaves = {leaf.group: leaf for leaf in processes(top)}
        room = {account: account.figures.swap_max - account.figures.swap for account in below(root)}
        spare = {g: leaf.figures.current - effective_lows(top).get(leaf, 0) for g, leaf in leaves.items()}
        for target in plan:
            assert target.nbytes > 0
            if target.below_low:
                continue
            spare[target.group] -= target.nbytes
            for level in leaves[target.group].path():
                room[level] -= target.nbytes
        assert all(left >= 0 for left in spare.values()), "the first targets stay out of what is protected"
        if any(target.below_low for target in plan):
            left = {
                group
                for group, nbytes_left in spare.items()
                if nbytes_left > 0 and all(room[level] > 0 for level in leaves[group].path())
            }
            assert not left, "there was something unprotected to take first"


# Next use


@SETTINGS
@given(trees(), st.integers(0, 200), st.data())
def test_the_farthest_give_first(root: Account, nbytes: int, data: st.DataObject) -> None:
    """Each gives all that it can: first of unprotected memory, then of protected."""
    top = data.draw(st.sampled_from(list(below(root))))
    leaves, now_usec = {leaf.group: leaf for leaf in processes(top)}, clock.boot_usec()
    room = {account: max(0, account.figures.swap_max - account.figures.swap) for account in below(root)}
    lows = effective_lows(top)
    left = {leaf: leaf.figures.current - lows.get(leaf, 0) for leaf in leaves.values()}
    was_low = False
    for target in reclaim.plan(top, nbytes):
        if target.below_low and not was_low:
            was_low = True
            left = {leaf: left[leaf] + lows.get(leaf, 0) for leaf in left}
        giver = leaves[target.group]
        for leaf, more in left.items():
            if leaf.next_use(now_usec) > giver.next_use(now_usec):
                assert not more or not all(room[level] for level in leaf.path())
        left[giver] -= target.nbytes
        for level in giver.path():
            room[level] -= target.nbytes


@SETTINGS
@given(trees(), st.integers(0, 200), st.sampled_from(NextUse))
def test_equals_give_as_if_nothing_were_known(root: Account, nbytes: int, next_use: NextUse) -> None:
    """So do processes whose report is too old: its daemon may be gone."""
    for leaf in processes(root):
        leaf.foresee(NextUse.SOON)
    unknown = reclaim.plan(root, nbytes)
    for leaf in processes(root):
        leaf.foresee(next_use)
    assert reclaim.plan(root, nbytes) == unknown
    for count, leaf in enumerate(processes(root)):
        leaf.foresee([*NextUse][count % len(NextUse)])
    late = clock.boot_usec() + NEXT_USE_S * 1_000_000
    with mock.patch.object(clock, "boot_usec", return_value=late):
        assert reclaim.plan(root, nbytes) == unknown


def test_an_idle_slice_gives_down_to_its_low_and_the_one_beside_it_keeps_all() -> None:
    """The shape of the kernel's test_memcg_low (tools/testing/selftests/cgroup): P1 has three idle processes of 50M, a
    low of 50M in all and 75M, 25M and 0 for each; beside it P2 grows to 148M, in a limit of 200M."""
    limit = Account(SliceOn(Slice("/p0"), 0), Account(SliceOn(ROOT, 0), None))
    idle, busy = Account(SliceOn(Slice("/p0/p1"), 0), limit), Account(Member(Process(9, 0), 0), limit)
    limit.update(high=200)
    idle.update(low=50)
    each = [Account(Member(Process(pid, 0), 0), idle) for pid in range(3)]
    for leaf, low in zip(each, (75, 25, 0), strict=True):
        leaf.update(current=50, low=low)
        leaf.foresee(NextUse.IDLE)
    for held in range(1, 149):
        busy.update(current=held)
        settle(limit)
        for target in reclaim.plan(limit, max(0, limit.figures.current - 200)):
            assert not target.below_low
            giver = next(leaf for leaf in (*each, busy) if leaf.group == target.group)
            giver.update(current=giver.figures.current - target.nbytes)
    settle(limit)
    assert (idle.figures.current, busy.figures.current) == (52, 148), "50M and 148M are 198M of 200M"
    first, second, third = (leaf.figures.current for leaf in each)
    assert first >= second > 20 > 3 >= third, "29M, 21M and 0 there"


# Levelling


@SETTINGS
@given(st.lists(small, max_size=6), st.integers(0, 300))
def test_water_fill_takes_from_the_top_and_leaves_it_level(amounts: list[int], nbytes: int) -> None:
    gives = reclaim.water_fill(amounts, nbytes)
    lefts = [amount - give for amount, give in zip(amounts, gives, strict=True)]
    assert sum(gives) == min(nbytes, sum(amounts))
    assert all(0 <= give <= amount for give, amount in zip(gives, amounts, strict=True))
    for give, left in zip(gives, lefts, strict=True):
        assert not give or left >= max(lefts) - 1, "who gave is as high as anybody, to a byte"


@SETTINGS
@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=6), st.integers(0, 1 << 42))
def test_water_fill_is_as_fair_with_real_sizes(amounts: list[int], nbytes: int) -> None:
    gives = reclaim.water_fill(amounts, nbytes)
    assert sum(gives) == min(nbytes, sum(amounts))
    pairs = list(zip(amounts, gives, strict=True))
    for (a, give_a), (b, give_b) in itertools.combinations(pairs, 2):
        assert abs(give_a - give_b) <= 1 or (a - b) * (give_a - give_b) > 0, "who holds more gives more"


@pytest.mark.parametrize(
    ("amounts", "nbytes", "gives"),
    [
        ([], 5, []),
        ([7], 3, [3]),
        ([7], 9, [7]),
        ([10, 6, 1], 4, [4, 0, 0]),  # down to 6
        ([10, 6, 1], 6, [5, 1, 0]),  # both to 5
        ([10, 6, 1], 14, [9, 5, 0]),  # all to 1
        ([10, 6, 1], 17, [10, 6, 1]),
        ([5, 5, 5], 4, [2, 1, 1]),  # to 3 1/3: the first gives the odd byte
    ],
)
def test_water_fill_by_hand(amounts: list[int], nbytes: int, gives: list[int]) -> None:
    assert reclaim.water_fill(amounts, nbytes) == gives


# Examples that can be checked by hand


class Example:
    """A GPU (no limits) over slice S over processes 1 and 2, and process 3 beside S."""

    def __init__(self, *holds: int) -> None:
        self.gpu = Account(SliceOn(ROOT, 0), None)
        self.s = Account(SliceOn(Slice("/s"), 0), self.gpu)
        self.one, self.two = (Account(Member(Process(pid, 0), 0), self.s) for pid in (1, 2))
        self.three = Account(Member(Process(3, 0), 0), self.gpu)
        for leaf, held in zip((self.one, self.two, self.three), holds, strict=True):
            leaf.update(current=held)
        settle(self.gpu)

    def plan(self, top: Account, nbytes: int) -> list[tuple[int, int, bool]]:
        """Return the plan as (pid, bytes, below low)."""

        def pid(target: Target) -> int:
            assert isinstance(target.group.node, Process)
            return target.group.node.pid

        return [(pid(target), target.nbytes, target.below_low) for target in reclaim.plan(top, nbytes)]


def test_a_slices_low_protects_its_processes_in_proportion() -> None:
    """S holds 100 and is protected to 60; neither process asks for protection, so each has 60 % of what it holds."""
    example = Example(75, 25, 100)
    example.s.update(low=60)
    assert effective_lows(example.gpu).get(example.one, 0) == 45
    assert effective_lows(example.gpu).get(example.two, 0) == 15
    assert effective_lows(example.s).get(example.one, 0) == 0, "its low does not protect a slice against itself"


def test_processes_that_ask_for_more_than_their_slice_has_share_it() -> None:
    """Process 1 asks for 75 and 2 for 25, S affords 40: three quarters and one quarter of 40."""
    example = Example(75, 25, 0)
    example.s.update(low=40)
    example.one.update(low=75)
    example.two.update(low=25)
    assert effective_lows(example.gpu).get(example.one, 0) == 30
    assert effective_lows(example.gpu).get(example.two, 0) == 10


def test_what_a_process_claims_it_has_and_the_rest_is_shared() -> None:
    """S affords 60; process 1 claims 20 of it. The other 40 go to the other 80: half of the rest of each."""
    example = Example(40, 60, 0)
    example.s.update(low=60)
    example.one.update(low=20)
    assert effective_lows(example.gpu).get(example.one, 0) == 20 + 10
    assert effective_lows(example.gpu).get(example.two, 0) == 0 + 30


def test_the_largest_give_first() -> None:
    """25 from 50, 30 and 10: the first goes down to 30, then both give half of the rest, the first the odd byte."""
    example = Example(50, 30, 10)
    assert example.plan(example.gpu, 25) == [(1, 23, False), (2, 2, False)]


def test_the_unprotected_give_first() -> None:
    """Process 3 is fully protected, so 1 and 2 give all they have, and only then does 3 give the rest."""
    example = Example(20, 10, 100)
    example.three.update(low=100)
    assert example.plan(example.gpu, 15) == [(1, 13, False), (2, 2, False)]
    assert example.plan(example.gpu, 35) == [(1, 20, False), (2, 10, False), (3, 5, True)]


def test_a_full_swap_passes_the_rest_on() -> None:
    """Of 40, process 1 would give 35 and 3 would give 5; S may swap only 10, so 3 gives 30."""
    example = Example(60, 0, 30)
    example.s.update(swap_max=10)
    assert sum(nbytes for _, nbytes, _ in example.plan(example.gpu, 40)) == 40
    taken: dict[int, int] = {}
    for pid, nbytes, _ in example.plan(example.gpu, 40):
        taken[pid] = taken.get(pid, 0) + nbytes
    assert taken == {1: 10, 3: 30}
    assert example.plan(example.s, 40) == [(1, 10, False)]
