"""Rounds: in each, tenants do a pair of kinds at the same moment; after each, everything that must hold is checked."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import attrs

from tests.hostile import operator
from tests.hostile.books import Books
from tests.hostile.canary import everybody_is_looked_at
from tests.hostile.daemon import Daemon, Watch
from tests.hostile.neighbour import CALLS, GRANTED_S, GREETED_S
from tests.hostile.page import AT, DONE, FAILED, FAILED_AT, FAILED_CODE, TENANTS, WORST_AT, Page, Timed, Word
from tests.hostile.patience import Patience
from tests.hostile.registry import SOFT, kinds_of
from tests.hostile.tenant import BEGIN_S
from tests.support.cgroups import OURS, cgroup, enter, slice_path
from tests.support.proc import stat_of

ROUND_S = 0.2
"""Seconds for which a pair goes on."""
BEGUN_S = 3.0
"""Further seconds at most until both halves of all have begun, on a busy machine; each attempt adds as many."""
CALM = 3
"""Number of rounds of programs that only compute, with which the others are compared."""
AGAIN = 4
"""Tries of a pair, one half of which ended the tenant before the other began."""
HANG_S = 60.0
"""Seconds after which a single step counts as endless, and the mount is given up."""
RETURNED_S = 20.0
"""Seconds within which the killed tenants' processes, or their things in the daemon, get fewer, until none is left."""

DESCRIPTORS = 8
"""Descriptors that the daemon may have between rounds beyond those before the first."""
THREADS = 96
"""Threads that it may have at any time beyond those: blocking calls' threads are idle for 10 s before they end."""

SLOWER, CALLS_S, ROOT_S = 25.0, 2.0, 15.0
"""Factor by which a call may be slower than among programs that compute, and seconds that are always allowed: for the
neighbour; and for root, which may wait for the hardware's deadline of 5 s, once for each of two tenants. The excess of
the longest sleep in that round is allowed as well, so that no failure is due to the machine."""

SETTLED = (Timed.OPERATOR, Timed.KEEPER)
"""Threads of the operator that pause; a move may wait for its tenant, and is waited for where something is wrong."""

Pair = tuple[str, str]


def pairs_of(protocol: str) -> Sequence[Pair]:
    """Return all pairs, a kind with itself included."""
    return list(itertools.combinations_with_replacement(kinds_of(protocol), 2))


@attrs.define
class Outcome:
    """Result of a run."""

    rounds: int = 0
    operations: int = 0
    met: set[Pair] = attrs.field(factory=set)
    """Pairs both halves of which did something in one round."""
    worst: dict[str, float] = attrs.field(factory=dict)
    """Seconds of the longest call, by what is timed."""


class Run:
    """A mount with hostile tenants on it, and what is known of it."""

    def __init__(self, protocol: str, seed: int, mount: Path, top: Path, page: Page) -> None:
        self.protocol = protocol
        self.seed = seed
        self.outcome = Outcome()
        self.page = page
        self.daemon = Daemon(mount, protocol, page)
        self.watch = Watch(self.daemon, HANG_S)
        self.patience = Patience(self.watch)
        self._mount = mount
        self._top = top
        self._meters = {timed: page.meter(timed) for timed in Timed}
        self._calm: dict[Timed, float] = {}
        self._descriptors = 0
        self._quiet = 0
        self._programs: dict[str, subprocess.Popen[str]] = {}

    # Programs beside the tenants

    @property
    def _tenants(self) -> Path:
        return self._top / "tenants.slice"

    def _cgroups(self, number: int) -> list[str]:
        base = self._tenants / f"t{number}.slice"
        return [os.fspath(base / "a"), os.fspath(base / "a"), os.fspath(base / "b")]

    def _own(self, number: int) -> Path:
        return self._mount / "slice" / slice_path(self._tenants / f"t{number}.slice")

    def begin(self) -> None:
        """Start everything that stays for the whole run."""
        for number in range(TENANTS):
            base = self._tenants / f"t{number}.slice"
            for path in (base, base / "a", base / "b"):
                path.mkdir(parents=True)
                os.chown(path / "cgroup.procs", 65534, 65534)
        (self._top / "neighbour.service").mkdir()
        self._lend()
        above = self._mount / "slice" / slice_path(self._tenants)
        place = self._mount / "slice" / slice_path(self._top / "neighbour.service")
        place.mkdir(parents=True)
        os.chown(place, 1000, 1000)
        for gpu in (0, 1):
            capacity = int((self._mount / f"gpus/{gpu}/gmem.capacity").read_text())
            (above / f"{gpu}/gmem.limit.high").write_text(str(capacity // 2))
            (place / f"{gpu}/gmem.limit.low").write_text(str(capacity // 8))
        words = self.page.descriptor, self._mount, self.daemon.door, self.protocol
        self._start("neighbour", *words, cgroup=self._top / "neighbour.service")
        self._line("neighbour", "ready\n")
        self._start("tenant", self.page.descriptor)
        self._line("tenant", "ready\n")
        slices = [str(self._own(number)) for number in range(TENANTS)]
        cgroups = [self._cgroups(number)[number % 2 + 1] for number in range(TENANTS)]
        self._start("operator", self.page.descriptor, self._mount, self.seed, *slices, *cgroups)
        for timed, meter in self._meters.items():
            name = f"{'root' if timed >= Timed.OPERATOR else 'the neighbour'}'s {timed.name.lower()}"
            self.watch.ages.append((name, lambda meter=meter: meter.under_way))
        for _ in range(CALM):
            self._round([("compute", "compute")] * TENANTS, 0)
        self._calm = {timed: self.outcome.worst.get(timed.name, 0.0) for timed in Timed}
        self.outcome = Outcome()
        self._descriptors = self.daemon.descriptors()

    def _start(self, name: str, *words: object, cgroup: Path | None = None) -> None:
        self._programs[name] = subprocess.Popen(
            [sys.executable, "-m", f"tests.hostile.{name}", *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[self.page.descriptor],
            preexec_fn=None if cgroup is None else lambda: enter(0, cgroup),
        )

    def _line(self, name: str, expected: str) -> bool:
        """Return whether a program soon writes that line."""
        stream = self._programs[name].stdout
        assert stream is not None
        if not select.select([stream], [], [], HANG_S)[0]:
            return False
        line = stream.readline()
        assert line == expected, f"the {name} wrote {line!r}"
        return True

    def _lend(self) -> None:
        """Make each tenant's slice, and give it to the tenant."""
        for number in range(TENANTS):
            own = self._own(number)
            own.mkdir(parents=True, exist_ok=True)
            os.chown(own, 65534, 65534)

    # Rounds

    def pairs(self, pairs: Sequence[Pair], again: int = AGAIN) -> None:
        """Run rounds of these pairs in an order from the seed; pairs that were not met are retried."""
        left = list(pairs)
        for attempt in range(again):
            random.Random(f"{self.seed}/{attempt}").shuffle(left)
            for at in range(0, len(left), TENANTS):
                self._round(left[at : at + TENANTS], attempt)
            left = [pair for pair in left if pair not in self.outcome.met]

    def _round(self, pairs: Sequence[Pair], attempt: int) -> None:
        what = f"round {self.outcome.rounds + 1}, {self.protocol}, seed {self.seed}, of {pairs}"
        try:
            with self.watch.step(what):
                self._lend()
                self._resume()
                self._tell(pairs, f"{self.seed}/{attempt}")
                self._go_on(ROUND_S + BEGIN_S)
                with contextlib.suppress(AssertionError):
                    begun_s = BEGUN_S * (attempt + 1)
                    self.patience.until(lambda: all(map(self._met, range(len(pairs)))), "all have begun", begun_s)
                self._stand_still(what)
                self._take_away()
                self._returned()
                self._look()
        except AssertionError as error:
            if self.watch.found is not None and self.watch.found not in str(error):
                error = AssertionError(f"{self.watch.found}\n{error}")
            raise AssertionError(f"{what}:\n{error}") from None
        self._count(pairs)

    def _tell(self, pairs: Sequence[Pair], seed: str) -> None:
        tenants = [
            {
                "number": number,
                "pair": pair,
                "seed": f"{seed}/{pair[0]}/{pair[1]}",
                "mount": os.fspath(self._mount),
                "door": self.daemon.door,
                "protocol": self.protocol,
                "own": os.fspath(self._own(number)),
                "cgroups": self._cgroups(number),
            }
            for number, pair in enumerate(pairs)
        ]
        stdin = self._programs["tenant"].stdin
        assert stdin is not None
        stdin.write(json.dumps({"seconds": ROUND_S, "tenants": tenants}) + "\n")
        stdin.flush()
        self._line("tenant", "begun\n")

    def _go_on(self, seconds: float) -> None:
        """Let time pass."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.patience.sleep(min(left, 0.05))
            self._bounded("threads of the daemon", self.daemon.threads(), THREADS)
            assert self.daemon.process.poll() is None, f"the daemon has ended: {self.daemon.lines[-5:]}"

    def _stand_still(self, what: str) -> None:
        """Check the sums, with programs that live and do nothing."""
        self._quiet += 1
        self.page.words[Word.QUIET] = self._quiet
        self._all_pause(SETTLED)
        (self._tenants / "cgroup.freeze").write_text("1")
        # A program in a call to its own file system does not stop, but does nothing either.
        with contextlib.suppress(AssertionError):
            self.patience.until(self._frozen, "tenants stand still", 0.2)
        Books(self._mount, processes=2000).check(what, self._everybody_is_looked_at)

    def _all_pause(self, threads: Collection[Timed]) -> None:
        """Wait until the neighbour and threads of the operator have ended their calls. As long as calls of theirs end,
        they are only slow."""
        words = [int(Word.NEIGHBOUR_QUIET), *(Word.OPERATORS_QUIET + timed for timed in threads)]
        meters = [self._meters[timed] for timed in (Timed.CALLS, Timed.CHARGES, *threads)]

        def paused() -> bool:
            self._all_live()
            return all(self.page.words[at] == self._quiet for at in words)

        self.patience.until(paused, "all pause", HANG_S, lambda: [meter[DONE] for meter in meters])

    def _everybody_is_looked_at(self) -> None:
        """Wait until the daemon has done all that it was asked for, and knows where each program is."""
        self._all_pause((*SETTLED, Timed.MOVES))
        everybody_is_looked_at(self._mount, self._top, self.patience, HANG_S)
        self.watch.goes_on()

    def _frozen(self) -> bool:
        return "frozen 1" in (self._tenants / "cgroup.events").read_text()

    def _take_away(self) -> None:
        """End the tenants, wherever they are."""
        (self._tenants / "cgroup.kill").write_text("1")
        (self._tenants / "cgroup.freeze").write_text("0")
        if not self._line("tenant", "gone\n"):
            raise AssertionError(f"tenants cannot be killed: {self._left()}; the daemon is at {self.daemon.state()}")

    def _left(self) -> list[str]:
        found = []
        for procs in self._tenants.rglob("cgroup.procs"):
            for pid in procs.read_text().split():
                with contextlib.suppress(OSError):
                    found.append(f"pid {pid} {stat_of(int(pid))[0]} {Path(f'/proc/{pid}/wchan').read_text()}")
        return found

    def _resume(self) -> None:
        self.page.clear_tenants()
        self.page.words[Word.QUIET] = 0

    def _returned(self) -> None:
        """Check that the daemon has nothing left for the tenants of the round."""
        if not self._descriptors:
            return
        most = self._descriptors + DESCRIPTORS
        try:
            self.patience.until(lambda: self.daemon.descriptors() <= most, "", RETURNED_S, self.daemon.descriptors)
        except AssertionError:
            found = f"{self.daemon.descriptors()} descriptors of the daemon, of {self._descriptors} before"
            raise AssertionError(f"{found}: {self.daemon.open_files()}") from None

    def _look(self) -> None:
        """Check what neighbour and operator met meanwhile, and the daemon's log."""
        self._all_live()
        for timed, meter in self._meters.items():
            acts = {Timed.CALLS: CALLS, Timed.CHARGES: ("charge",), Timed.NEWCOMERS: ("connect",)}.get(
                timed, operator.ACTS
            )
            if meter[FAILED]:
                code = os.strerror(meter[FAILED_CODE])
                raise AssertionError(f"{timed.name}: {meter[FAILED]} failed: {acts[meter[FAILED_AT]]}: {code}")
            worst = meter.worst
            self.outcome.worst[timed.name] = max(worst, self.outcome.worst.get(timed.name, 0.0))
            if timed in self._calm and timed is not Timed.MOVES:
                at = acts[meter[AT] if meter.under_way == worst else meter[WORST_AT]]
                self._bounded(f"seconds of {timed.name}: {at}", worst, self._allowed(timed))
            meter.reset()
        self.patience.late = 0.0
        if lines := self.daemon.unexpected():
            raise AssertionError(f"the daemon says {lines[:12]}")

    def _allowed(self, timed: Timed) -> float:
        always = {Timed.CALLS: CALLS_S, Timed.CHARGES: GRANTED_S, Timed.NEWCOMERS: GREETED_S}.get(timed, ROOT_S)
        return max(always, SLOWER * self._calm[timed]) + SLOWER * self.patience.late

    def _all_live(self) -> None:
        for name, program in self._programs.items():
            assert program.poll() is None, f"the {name} has ended: {program.returncode}"

    def _count(self, pairs: Sequence[Pair]) -> None:
        words = self.page.words
        self.outcome.rounds += 1
        for number, pair in enumerate(pairs):
            broke = [bool(words[self.page.half(number, half) + 3]) for half in (0, 1)]
            assert not any(broke), f"the tenant itself broke: {pair}"
            self.outcome.operations += sum(int(words[self.page.half(number, half)]) for half in (0, 1))
            if self._met(number):
                self.outcome.met.add(pair)

    def _met(self, number: int) -> bool:
        """Return whether both halves of a tenant have done something."""
        return all(self.page.words[self.page.half(number, half)] for half in (0, 1))

    # The end

    def end(self) -> None:
        """End the daemon in the middle of a round: it must end in time and log nothing."""
        odd = "own file system as the driver's"
        hold = "allocate" if self.protocol == SOFT else "charge"
        pairs = [(odd, odd), ("connect and say nothing", hold), ("stop itself", hold), ("never read answers", "fork")]
        with self.watch.step("the end of the daemon"):
            self._lend()
            self._resume()
            self._tell([*pairs, *pairs], f"{self.seed}/end")
            self._go_on(ROUND_S / 2 + BEGIN_S)
            self._programs["operator"].kill()
            self._programs["neighbour"].kill()
            self.daemon.tell_to_end()
            code = self.daemon.gone()
            assert code is not None, f"the daemon does not end: {self.daemon.state()}; {self.daemon.open_files()}"
        assert code == 0, f"the daemon ended with {code}: {self.daemon.lines[-12:]}"
        assert not os.path.ismount(self._mount)
        self._take_away()
        assert not (lines := self.daemon.unexpected()), lines

    def clean_up(self) -> None:
        """Remove everything, whatever has become of it."""
        self.watch.end()
        self.daemon.abort()
        with contextlib.suppress(OSError):
            (self._tenants / "cgroup.kill").write_text("1")
        for program in self._programs.values():
            program.kill()
        self.daemon.clean_up()
        for program in self._programs.values():
            program.wait(RETURNED_S)
            for stream in (program.stdin, program.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        with contextlib.suppress(AssertionError, OSError):
            self.patience.until(lambda: not self._left(), "tenants are gone", RETURNED_S, self._left)

    def _bounded(self, what: str, value: float, most: float) -> None:
        assert value <= most, f"{what}: {value:.6g}, of {most:.6g} at most"


@contextlib.contextmanager
def running(protocol: str, seed: int, mount: Path) -> Iterator[Run]:
    """Yield a run that has begun; at the end of the block it ends, and nothing of it is left."""
    with cgroup(f"hostile{OURS}") as top:
        run = Run(protocol, seed, mount, top, Page())
        try:
            with run.watch.step("the beginning"):
                run.begin()
            yield run
            run.end()
        finally:
            run.clean_up()
            os.close(run.page.descriptor)
