"""Ledgers against the naive model: histories of a ledger's calls, for each kind of ledger."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backend.core.nextuse import NEXT_USE_MOST
from backend.core.protocols import Ledger, Target
from backend.core.records import MAX, Books, Channel, Peak
from backend.core.settings import REASONS, SETTINGS
from backend.ledgers.soft import SoftLedger
from backend.process.identity import ROOT, Group, Member, Process, Slice, SliceOn, group_on
from tests.support.model import NaiveLedger
from tests.support.strategies import (
    Part,
    chosen,
    moments,
    next_uses,
    odd,
    parts,
    pick,
    policies,
    reasons,
    sizes,
    small,
)

CAPACITIES = {0: 100, 1: 50}
SLICES = tuple(Slice(path) for path in ("/a", "/a/b", "/a/b/c", "/a/d", "/e"))
PROCESSES = tuple(Process(pid, pid % 3) for pid in range(1, 6))
gpus = st.sampled_from((0, 0, 0, 1))
OF_SLICES = {setting.field for setting in SETTINGS if setting.slices_only}
CONFIGURABLE = {setting.field for setting in SETTINGS}
NOTED = ("low", "high", "reclaim", "fail", "max", "oom", "oom_kill", "oom_group_kill")
OUT_OF_RANGE = tuple(
    (setting.field, value)
    for setting in SETTINGS
    for value in (setting.least - 1, setting.most + 1, 1 << 32, 1 << 64)
    if value not in setting.allowed
)
"""Settings that are invalid everywhere."""


def outcome(call: Callable[..., Any], *args: Any, **words: Any) -> tuple[Any, int]:
    """Return a call's result and 0, or None and the errno that it raises."""
    try:
        answer = call(*args, **words)
    except OSError as error:
        return None, error.errno or 0
    return (list(answer) if isinstance(answer, (list, tuple)) else answer), 0


class LedgerMachine(RuleBasedStateMachine):
    """Does everything to the ledger and to the naive books, and compares all that is visible after each step."""

    processes: ClassVar[Sequence[Process]] = PROCESSES
    """Processes that may be in the books: a ledger that checks them needs live ones."""

    def make_ledger(self) -> Ledger:
        """Make the ledger under test; subclasses make another."""
        return SoftLedger()

    def __init__(self) -> None:
        super().__init__()
        self.ledger = self.make_ledger()
        self.naive = NaiveLedger()
        self.told: list[tuple[Group, Channel]] = []
        self.expected: list[tuple[Group, Channel]] = []
        self.strangers: list[Group] = []
        self.ledger.listen(lambda group, channel: self.told.append((group, channel)), self.strangers.append)

    # The small parts

    def ask(self, code: int, call: Callable[..., object], *args: Any, **words: Any) -> Any:
        """Make a call that must raise the errno `code`, or succeed for 0."""
        answer, found = outcome(call, *args, **words)
        assert found == code, f"errno {errno.errorcode.get(found)}, not {errno.errorcode.get(code)}"
        return answer

    def count(self, group: Group, event: str) -> None:
        """Count an event, here and above."""
        for level in self.naive.path(group):
            self.naive.counts[level][f"events_{event}"] += 1
            self.expected.append((level, Channel.GMEM))

    def any_group(self, index: int) -> Group:
        return chosen(list(self.naive.above), index)

    def any_process(self, index: int) -> Group | None:
        there = [group for group in self.naive.above if isinstance(group.node, Process)]
        return chosen(there, index) if there else None

    def any_slice(self, index: int) -> Group:
        return chosen([group for group in self.naive.above if isinstance(group.node, Slice)], index)

    def has_process(self) -> bool:
        return any(isinstance(group.node, Process) for group in self.naive.above)

    # The tree

    @initialize(
        inhabitants=st.lists(st.tuples(pick, gpus, pick, st.booleans()), min_size=4, max_size=10),
        rules=st.lists(st.tuples(pick, policies), min_size=2, max_size=6),
    )
    def begin(self, inhabitants: list[tuple[int, int, int, bool]], rules: list[tuple[int, dict[str, Any]]]) -> None:
        for index, capacity in CAPACITIES.items():
            self.ask(0, self.ledger.add_gpu, index, capacity)
            self.naive.enter(SliceOn(ROOT, index), None, high=capacity)
        self.add(0, 0, 0, False)
        for inhabitant in inhabitants:
            self.add(*inhabitant)
        for policy in rules:
            self.configure(*policy)

    @rule(index=pick, gpu=gpus, below=pick, slice_=st.booleans())
    def add(self, index: int, gpu: int, below: int, slice_: bool) -> None:
        group = group_on(chosen(SLICES, index) if slice_ else chosen(self.processes, index), gpu)
        slices = [group for group in self.naive.above if isinstance(group.node, Slice)]
        # One in eight may be another GPU's slice.
        above = chosen(slices if below % 8 == 0 else [slice_ for slice_ in slices if slice_.gpu == gpu], below // 8)
        code = errno.EEXIST if group in self.naive.above else errno.EXDEV if above.gpu != gpu else 0
        self.ask(code, self.ledger.add, group, above)
        if not code:
            self.naive.enter(group, above)

    @rule(index=pick, below=pick)
    def move(self, index: int, below: int) -> None:
        group, above = self.any_group(index), self.any_slice(below)
        if index % 8:
            group = self.any_process(index) or group
        impossible = self.naive.above[group] is None or above.gpu != group.gpu or group in self.naive.path(above)
        self.ask(errno.EINVAL if impossible else 0, self.ledger.move, group, above)
        if not impossible:
            self.naive.above[group] = above

    @rule(index=pick)
    def remove(self, index: int) -> None:
        group = self.any_group(index)
        busy = self.naive.above[group] is None or bool(self.naive.children(group))
        self.ask(errno.EBUSY if busy else 0, self.ledger.remove, group)
        if not busy:
            self.naive.leave(group)

    def teardown(self) -> None:
        """Ask nonsense at the end of every history; it must change nothing."""
        if self.naive.above:
            for gone in (Member(Process(99, 0), 0), SliceOn(ROOT, 7)):
                self.ask_nonsense(gone, self.any_slice(len(self.naive.above)), len(self.naive.asked))
            self.everybody_was_told()
            self.books_agree()

    def ask_nonsense(self, gone: Group, slice_: Group, nbytes: int) -> None:
        """Check that a missing group is ENODEV before anything else is wrong, and that only processes hold anything."""
        ledger = self.ledger
        for call in (ledger.charge, ledger.uncharge, ledger.uncharge_swap, ledger.swap_out, ledger.swap_in):
            self.ask(errno.ENODEV, call, gone, nbytes)
            self.ask(errno.EINVAL, call, slice_, nbytes)
        self.ask(errno.ENODEV, ledger.observe, gone, nbytes)
        self.ask(errno.EINVAL, ledger.observe, slice_, nbytes)
        self.ask(errno.ENODEV, ledger.plan, gone, 1)
        self.ask(errno.ENODEV, ledger.press, gone, 1)
        for simple in (ledger.books, ledger.excess, ledger.remove, ledger.parent):
            self.ask(errno.ENODEV, simple, gone)
        self.ask(errno.ENODEV, ledger.reset_peak, gone, "peak")
        self.ask(errno.ENODEV, ledger.move, gone, slice_)
        self.ask(errno.ENODEV, ledger.move, slice_, gone)
        self.ask(errno.ENODEV, ledger.note, gone, "high")
        self.ask(errno.EINVAL, ledger.note, slice_, "nonsense")
        self.ask(errno.ENODEV, ledger.configure, gone, high=1)
        self.ask(errno.ENODEV, ledger.set_reasons, gone, 1, 0)
        self.ask(errno.ENODEV, ledger.set_next_use, 7, {})
        self.ask(errno.EINVAL, ledger.set_next_use, 0, {slice_: 0})
        self.ask(errno.EINVAL, ledger.set_next_use, 0, {Member(self.processes[0], 1): 0})
        for none in (-1, NEXT_USE_MOST + 1, 1 << 40):
            classes = {Member(self.processes[0], 0): NEXT_USE_MOST, Member(self.processes[1], 0): none}
            self.ask(errno.EINVAL, ledger.set_next_use, 0, classes)
        self.ask(errno.EINVAL, ledger.set_reasons, slice_, 1, 0)
        below = [group for group, above in self.naive.above.items() if above is not None]
        for name, value in OUT_OF_RANGE if below else ():
            code = errno.EINVAL if name in OF_SLICES and isinstance(below[0].node, Process) else errno.ERANGE
            self.ask(code, ledger.configure, below[0], **{name: value})
        self.ask(errno.ENODEV, ledger.add, Member(Process(98, 0), 0), SliceOn(Slice("/nowhere"), 0))
        self.ask(errno.EEXIST, ledger.add_gpu, 0, 10)

    # Policy

    @rule(index=pick, changes=policies)
    def configure(self, index: int, changes: dict[str, Any]) -> None:
        below = [group for group, above in self.naive.above.items() if above is not None]
        slices = [group for group in below if isinstance(group.node, Slice)]
        # Half of the picks are slices, whose limits bind several processes; one in sixteen may be a GPU's root.
        pool = slices if index % 2 else below
        group = chosen(pool, index // 2) if pool and index % 16 else self.any_group(index)
        code = 0 if changes.keys() <= CONFIGURABLE else errno.EINVAL
        code = code or (errno.EPERM if self.naive.above[group] is None else 0)
        code = code or (errno.EINVAL if isinstance(group.node, Process) and changes.keys() & OF_SLICES else 0)
        self.ask(code, self.ledger.configure, group, **changes)
        if not code:
            self.naive.asked[group] |= changes

    @precondition(has_process)
    @rule(index=pick, off_all=reasons, off_gr=reasons)
    def set_reasons(self, index: int, off_all: int, off_gr: int) -> None:
        group = self.any_process(index)
        assert group is not None
        impossible = not {off_all, off_gr} <= set(range(REASONS + 1)) or off_all & off_gr
        self.ask(errno.EINVAL if impossible else 0, self.ledger.set_reasons, group, off_all, off_gr)
        if not impossible:
            self.naive.off[group] = off_all, off_gr

    @rule(index=pick, peak=st.sampled_from(("peak", "swap_peak")))
    def reset_peak(self, index: int, peak: Peak) -> None:
        group = self.any_group(index)
        self.ask(0, self.ledger.reset_peak, group, peak)
        self.naive.reset_peak(group, peak)

    @rule(index=pick, event=st.sampled_from(NOTED))
    def note(self, index: int, event: str) -> None:
        group = self.any_group(index)
        self.ask(0, self.ledger.note, group, event)
        self.count(group, event)

    @rule(index=pick, nbytes=small)
    def press(self, index: int, nbytes: int) -> None:
        group = self.any_group(index)
        self.ask(0, self.ledger.press, group, nbytes)
        self.naive.pressed[group] = nbytes, self.naive.pressed.get(group, (0, 0))[1] + 1
        self.expected.append((group, Channel.USERMEM))

    # Charges

    @precondition(has_process)
    @rule(charges=st.lists(st.tuples(pick, sizes), min_size=1, max_size=4))
    def charge(self, charges: list[tuple[int, int]]) -> None:
        for index, nbytes in charges:
            group = self.any_process(index)
            assert group is not None
            if not 0 <= nbytes <= MAX:
                self.ask(errno.EINVAL, self.ledger.charge, group, nbytes)
                continue
            code, met = self.naive.refusal(group, nbytes)
            self.ask(code, self.ledger.charge, group, nbytes)
            if not code:
                self.naive.held[group] += nbytes
                self.naive.raise_peaks()
            if met is not None:
                self.count(met, "max")
            if code == errno.ENOMEM:
                self.count(group, "oom")

    @precondition(has_process)
    @rule(index=pick, part=parts, swapped=st.booleans())
    def uncharge(self, index: int, part: Part, swapped: bool) -> None:
        group = self.any_process(index)
        assert group is not None
        table = self.naive.swapped if swapped else self.naive.held
        nbytes = part.of(table[group])
        call = self.ledger.uncharge_swap if swapped else self.ledger.uncharge
        code = 0 if 0 <= nbytes <= table[group] else errno.EINVAL
        self.ask(code, call, group, nbytes)
        if not code:
            table[group] -= nbytes

    @precondition(has_process)
    @rule(moves=st.lists(st.tuples(pick, parts), min_size=1, max_size=4), usec=moments)
    def swap_out(self, moves: list[tuple[int, Part]], usec: int) -> None:
        for index, part in moves:
            group = self.any_process(index)
            assert group is not None
            nbytes = part.of(self.naive.held[group])
            if not 0 <= nbytes <= self.naive.held[group]:
                code = errno.EINVAL
            else:
                code = errno.ENOSPC if any(nbytes > self.naive.room(level) for level in self.naive.path(group)) else 0
            self.ask(code, self.ledger.swap_out, group, nbytes, usec)
            if not code:
                self.moved(group, nbytes, usec)

    def moved(self, group: Group, nbytes: int, usec: int) -> None:
        """Record that `nbytes` are in the host now."""
        self.naive.held[group] -= nbytes
        self.naive.swapped[group] += nbytes
        for level in self.naive.path(group):
            self.naive.counts[level].update(swapout_bytes=nbytes, swapouts=1, move_usec=usec)

    @precondition(has_process)
    @rule(index=pick, part=parts, usec=moments)
    def swap_in(self, index: int, part: Part, usec: int) -> None:
        group = self.any_process(index)
        assert group is not None
        nbytes = part.of(self.naive.swapped[group])
        naive = self.naive
        if not 0 <= nbytes <= naive.swapped[group]:
            code = errno.EINVAL
        else:
            over = any(naive.current(level) + nbytes > naive.limit(level) for level in naive.path(group))
            code = errno.EAGAIN if over else 0
        self.ask(code, self.ledger.swap_in, group, nbytes, usec)
        if not code:
            naive.held[group] += nbytes
            naive.swapped[group] -= nbytes
            for level in naive.path(group):
                naive.counts[level].update(swapin_bytes=nbytes, swapins=1, move_usec=usec)

    @precondition(has_process)
    @rule(index=pick, nbytes=st.one_of(small, st.integers(0, 200), odd))
    def observe(self, index: int, nbytes: int) -> None:
        group = self.any_process(index)
        assert group is not None
        more = nbytes - self.naive.held[group]
        too_much = any(self.naive.current(level) + more > MAX for level in self.naive.path(group))
        code = errno.EINVAL if nbytes < 0 or too_much else 0
        self.ask(code, self.ledger.observe, group, nbytes)
        if not code:
            self.naive.held[group] = nbytes

    # Reclaim

    @precondition(has_process)
    @rule(classes=next_uses)
    def set_next_use(self, classes: list[tuple[int, int]]) -> None:
        for index, next_use in classes:
            group = self.any_process(index)
            assert group is not None
            self.naive.next_use[group] = next_use
        self.foresee()

    def foresee(self) -> None:
        """Report all classes again, since a history may outlast them. Groups that have left the books are skipped."""
        for gpu in CAPACITIES if self.naive.next_use else ():
            classes = {group: next_use for group, next_use in self.naive.next_use.items() if group.gpu == gpu}
            self.ask(0, self.ledger.set_next_use, gpu, {**classes, Member(Process(99, 0), gpu): NEXT_USE_MOST})

    @rule(index=pick, part=parts)
    def plan(self, index: int, part: Part) -> None:
        self.foresee()
        top = self.any_group(index)
        nbytes = max(0, part.of(self.naive.current(top)))
        self.check_plan(top, nbytes, list(self.ledger.plan(top, nbytes)))

    @rule(index=pick, usec=moments)
    def settle(self, index: int, usec: int) -> None:
        """Check that each part of a plan can be moved, and that all together end what the plan was made for."""
        self.foresee()
        top = self.any_group(index)
        excess = self.ledger.excess(top)
        plan = list(self.ledger.plan(top, excess))
        self.check_plan(top, excess, plan)
        for target in plan:
            self.ask(0, self.ledger.swap_out, target.group, target.nbytes, usec)
            self.moved(target.group, target.nbytes, usec)
        if sum(target.nbytes for target in plan) == excess:
            assert self.ledger.excess(top) == 0

    def check_plan(self, top: Group, nbytes: int, plan: list[Target]) -> None:
        """Check everything that is promised of a plan."""
        naive = self.naive
        assert sum(target.nbytes for target in plan) == min(nbytes, naive.most(top))
        leaves = naive.leaves(top)
        assert all(target.nbytes > 0 and target.group in leaves for target in plan)
        assert sorted(plan, key=lambda target: target.below_low) == plan, "what is protected comes last"
        room = {group: naive.room(group) for group in naive.above}
        lows = {leaf: naive.protected(leaf, top) for leaf in leaves}
        spare = {leaf: naive.held[leaf] - lows[leaf] for leaf in leaves}

        def able() -> list[Group]:
            """Return the processes that could give more."""
            return [g for g in leaves if spare[g] > 0 and all(room[level] > 0 for level in naive.path(g))]

        is_low = False
        for target in plan:
            if target.below_low and not is_low:
                is_low = True
                assert not able(), f"{able()} had unprotected memory to give first"
                spare = {leaf: spare[leaf] + lows[leaf] for leaf in leaves}
            farther = [g for g in able() if naive.next_use[g] > naive.next_use[target.group]]
            assert not farther, f"{farther} use theirs later than {target.group}"
            spare[target.group] -= target.nbytes
            assert spare[target.group] >= 0, "taken out of what is protected"
            for level in naive.path(target.group):
                room[level] -= target.nbytes
        taken: Counter[Group] = Counter()
        for target in plan:
            taken[target.group] += target.nbytes
        for group in naive.above:
            gives = sum(taken[leaf] for leaf in naive.leaves(group))
            assert not gives or gives <= min(naive.current(group), naive.room(group))

    # What always holds

    @invariant()
    def everybody_was_told(self) -> None:
        """Check that listeners heard every event once and in order, and nothing else: none for a refused call."""
        assert self.told == self.expected
        self.told.clear()
        self.expected.clear()

    @invariant()
    def books_agree(self) -> None:
        """Compare every figure of every group, which also shows that a refused call changed none."""
        self.naive.raise_peaks()
        found = {group: self.ledger.books(group) for group in self.naive.above}
        for group, above in self.naive.above.items():
            naive = self.naive.books(group)
            assert attrs.asdict(found[group], recurse=False) == attrs.asdict(naive, recurse=False), group
            assert self.ledger.parent(group) == above
            assert self.ledger.excess(group) == max(0, naive.current - self.naive.limit(group))
        self.books_add_up(found)

    def books_add_up(self, found: Mapping[Group, Books]) -> None:
        """Check that the ledger's own figures add up, whatever the naive books hold."""
        for group, books in found.items():
            assert 0 <= books.current <= books.peak <= books.peak_ever
            assert 0 <= books.swap <= books.swap_peak <= books.swap_peak_ever
            if isinstance(group.node, Slice):
                children = [found[child] for child in self.naive.children(group)]
                assert books.current == sum(child.current for child in children)
                assert books.swap == sum(child.swap for child in children)


class Twins:
    """Two ledgers that get the same calls and must give the same answers, value or errno."""

    def __init__(self, one: Ledger, other: Ledger) -> None:
        self._ledgers = one, other

    def listen(self, listener: Callable[[Group, Channel], None], configured: Callable[[Group], None]) -> None:
        """Listen to the first ledger; events of the second are compared through its counters."""
        self._ledgers[0].listen(listener, configured)

    def __getattr__(self, name: str) -> Any:
        def both(*args: Any, **words: Any) -> Any:
            answers = [outcome(getattr(ledger, name), *args, **words) for ledger in self._ledgers]
            assert answers[0] == answers[1], f"{name}{args}{words}"
            value, code = answers[0]
            if code:
                raise OSError(code, errno.errorcode[code])
            return value

        return both
