"""The values that cross the edges of the backend: frozen, with a docstring a field."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Literal

import attrs

from backend.core import settings
from backend.core.reasons import ON, TURN_ENGINES, Engines, Off, Reason
from backend.core.settings import MAX as MAX
from backend.core.settings import NOBODY as NOBODY
from backend.core.settings import Lever

OVERCOMMIT = 16
"""Memory that a program may say it has, on the GPU or not, in capacities of it. What it says is counted before the
driver's figure corrects it, so unbounded one program could take from its neighbours all that there is to count."""


OF_MEMORY = (
    *("gmem.limit.high", "gmem.limit.max", "gmem.limit.low", "gmem.swap.max", "gmem.oom.group"),
    *("gmem.reclaim", "usermemfd"),
)
"""Controls that act by moving memory."""


class Channel(enum.Enum):
    """What can wake a poller of a group."""

    GMEM = "gmem.events"
    COMPUTE = "compute.events"
    USERMEM = "usermemfd"
    GPU = "gpu.events"


class Capability(enum.Enum):
    """What a control does on this machine; ordered from best to worst."""

    ENFORCED = "enforced"
    """Proven to act, on programs that know nothing of it."""
    ADVISORY = "advisory"
    """The driver takes it, but its effect was not proven here."""
    UNSUPPORTED = "unsupported"
    """Refused with EOPNOTSUPP."""

    @staticmethod
    def weakest(capabilities: list[Capability]) -> Capability:
        """The one to promise for several GPUs together."""
        order = list(Capability)
        return max(capabilities, key=order.index, default=Capability.UNSUPPORTED)


@attrs.frozen
class GpuInfo:
    """One GPU, as it presents itself. Shown under ``gpus/<index>/``."""

    index: int
    """NVML index."""
    uuid: str
    """``GPU-xxxxxxxx-...``: the stable name."""
    name: str
    """Product name."""
    pci: str
    """PCI address ``dddd:bb:dd.f``, lower case as in sysfs; ``none`` for a GPU without one."""
    capacity: int
    """Bytes of GPU memory."""
    timeslice_default_us: int
    """What a channel group gets where no timeslice is asked for, microseconds."""
    timeslice_min_us: int = 1
    """Shortest timeslice accepted, microseconds."""
    timeslice_max_us: int = 1_000_000
    """Longest timeslice accepted, microseconds."""
    granule: int = 1
    """Bytes that move between GPU and host together: a page."""
    chunk: int = 0
    """Bytes in the largest part of a program's memory that moves as a whole, where that is more than a granule: less
    than that may not come at all. 0: a granule."""
    sms: int = 0
    """Streaming multiprocessors; 0 where the driver does not tell."""
    sm_step: int = 1
    """SMs in the smallest part of them that programs can be given: its multiples."""

    def takes(self, lever: Lever) -> range:
        """The values of a lever that this GPU takes, besides 0."""
        if lever is settings.TIMESLICE:
            return range(self.timeslice_min_us, self.timeslice_max_us + 1)
        return lever.allowed

    def sms_of(self, asked: int) -> int:
        """Return the SMs that kernels run on where so many are asked for: whole steps, and one at least. 0: all."""
        if not asked or asked >= self.sms:
            return 0
        return max(1, asked // self.sm_step) * self.sm_step


Peak = Literal["peak", "swap_peak"]
PEAKS: frozenset[Peak] = frozenset(("peak", "swap_peak"))
"""The highest value of a figure, by its name in the books: of `current`, or of `swap`."""


@attrs.frozen
class Books:
    """What the ledger knows about one group at one moment. Sizes in bytes."""

    high: int = MAX
    """gmem.limit.high."""
    low: int = 0
    """gmem.limit.low."""
    swap_max: int = MAX
    """gmem.swap.max."""
    current: int = 0
    """On the GPU, this group and everything below it."""
    peak: int = 0
    """Highest `current` since the last reset."""
    swap: int = 0
    """In host memory, this group and everything below it."""
    swap_peak: int = 0
    """Highest `swap` since the last reset."""
    peak_ever: int = 0
    """Highest `current` since the group came, whatever was reset."""
    swap_peak_ever: int = 0
    """Highest `swap` since the group came, whatever was reset."""
    swapin_bytes: int = 0
    """Moved to the GPU, ever."""
    swapout_bytes: int = 0
    """Moved to the host, ever."""
    swapins: int = 0
    """Moves to the GPU, ever."""
    swapouts: int = 0
    """Moves to the host, ever."""
    move_usec: int = 0
    """Time those moves took, microseconds."""
    events_low: int = 0
    """Times memory was taken although the group was at or under its low."""
    events_high: int = 0
    """Times the group was found over its high and reclaim began."""
    events_max: int = 0
    """Times the group met its gmem.limit.max: by an allocation, or found over it. Modules without that setting count
    allocations that met an exhausted gmem.swap.max, each of which is in `events_oom`, too."""
    events_oom: int = 0
    """Allocations refused to the program."""
    events_reclaim: int = 0
    """Reclaims that moved memory out."""
    events_fail: int = 0
    """Reclaims that ended short of their goal."""
    timeslice_us: int = 0
    """compute.timeslice asked for, microseconds; 0 is ``default``."""
    frozen: bool = False
    """compute.freeze asked for."""
    priority: int = settings.PRIORITY.default
    """compute.priority."""
    weight: int = settings.WEIGHT.default
    """compute.weight."""
    quota_us: int = settings.QUOTA.default
    """compute.max: work on the GPU in each period, microseconds; MAX is no quota."""
    period_us: int = settings.PERIOD.default
    """compute.max: the period, microseconds."""
    wait_max_us: int = 0
    """compute.wait.max, microseconds; 0 is ``default``."""
    spatial: bool = False
    """compute.spatial."""
    sm_max: int = 0
    """compute.sm.max asked for, SMs; 0 is ``max``."""
    pressure_bytes: int = 0
    """usermemfd: bytes to give back, of the latest record."""
    pressure_seq: int = 0
    """usermemfd: sequence number of the latest record; 0 when there never was one."""
    kept: bool = False
    """A slice that stays when no process is in it."""
    uid: int = NOBODY
    """The user that a slice was given to: the owner of what is below it. The default: the owner of the slice above."""
    gid: int = NOBODY
    """The group (of users) that goes with it."""
    off_all: int = 0
    """Why a process is off the runlist with all engines: bits of `REASONS`."""
    off_gr: int = 0
    """Why a process is off the runlist with the GR engine alone: bits of `REASONS`."""
    limit_max: int = MAX
    """gmem.limit.max."""
    oom_group: bool = False
    """gmem.oom.group."""
    events_oom_kill: int = 0
    """Processes that were killed, since they held a group over its gmem.limit.max."""
    events_oom_group_kill: int = 0
    """Times that all processes of a group were killed for that, as gmem.oom.group asks for."""

    @property
    def limit(self) -> int:
        """What the group is brought under by reclaim, bytes: the lower one of its two limits."""
        return min(self.high, self.limit_max)


@attrs.frozen
class Activity:
    """What a GPU knows about the work of one process, or the sum over a slice. None: this machine cannot tell."""

    submitted: int | None = None
    """Kernels launched, ever."""
    finished: int | None = None
    """Kernels completed, ever."""
    pending: int | None = None
    """Kernels launched that may still complete: not those of a context that was closed."""
    gpu_usec: int | None = None
    """Time on the engine, microseconds."""
    gpu_usec_estimate: int | None = None
    """About that, where it cannot be measured, microseconds."""
    tsgs: int = 0
    """Channel groups (TSGs) known."""
    channels: int = 0
    """Channels in them."""
    attached: int = 0
    """TSGs on the runlist."""
    managed: bool = False
    """Whether this program's memory can be moved."""
    contexts: int = 0
    """TSGs that a timeslice is split over: one of each context."""
    stays: int | None = None
    """Times that it came onto the engine in place of another, ever."""
    busy_usec: int | None = None
    """Time on the engine with work to do, microseconds."""
    busy_sampled_usec: int | None = None
    """What of that comes from the driver's samples, and not from the program's counts of its kernels, microseconds."""
    held_launches: int | None = None
    """Launches, ever, of a program that launches nothing in the busy periods of all those that go before it; None for
    one of which that is not so. Of one process alone."""
    busy_periods: int | None = None
    """How often it had others held that were not before, ever, by its own word; None where none goes behind it. Of one
    process alone."""
    pending_usec: int | None = None
    """Time in which some of its kernels were launched and not completed, by its own word, microseconds: also while it
    was off the runlist, or waited for others. It begins anew where the program speaks anew."""
    watched_usec: int | None = None
    """Time on the runlist of which samples tell for certain how busy the engine was, microseconds; of one process that
    does not count its kernels."""
    watched_busy_usec: int | None = None
    """What of that the engine worked, microseconds."""
    beside: bool = False
    """Whether it runs at the same time as the others of its space, which the levers act on together; of one process
    alone."""
    capped: int | None = None
    """Launches that ran on the SMs of compute.sm.max alone, ever, by the program's word."""
    uncapped: int | None = None
    """Launches that ran on all SMs though there was a compute.sm.max: cooperative kernels and clusters that do not fit
    there, graphs, and the like."""

    def __add__(self, other: Activity) -> Activity:
        return Activity(
            submitted=_total(self.submitted, other.submitted),
            finished=_total(self.finished, other.finished),
            pending=_total(self.pending, other.pending),
            capped=_total(self.capped, other.capped),
            uncapped=_total(self.uncapped, other.uncapped),
            pending_usec=_total(self.pending_usec, other.pending_usec),
            gpu_usec=_total(self.gpu_usec, other.gpu_usec),
            gpu_usec_estimate=_total(self.gpu_usec_estimate, other.gpu_usec_estimate),
            tsgs=self.tsgs + other.tsgs,
            channels=self.channels + other.channels,
            attached=self.attached + other.attached,
            managed=self.managed and other.managed,
            contexts=self.contexts + other.contexts,
            stays=_total(self.stays, other.stays),
            busy_usec=_total(self.busy_usec, other.busy_usec),
            busy_sampled_usec=_total(self.busy_sampled_usec, other.busy_sampled_usec),
        )


@attrs.frozen
class Footprint:
    """What a GPU knows about the memory of one process, or the sum over a slice. None: nothing to tell here."""

    movable: int = MAX
    """Bytes on the GPU that a reclaim could move now, at most; MAX where every byte can be."""
    implicit: int | None = None
    """Bytes that the driver counts for the program and no call charged: contexts, code, what came past the library."""
    unmovable: int | None = None
    """Bytes on the GPU that stay there, whatever the limits say."""
    disputed: int | None = None
    """Bytes that the program charged and the driver does not count. The driver is believed."""
    exchanged: int | None = None
    """Bytes that came back from the host in the place of as many that were colder, ever; swapins has none of them."""
    whole: int = 0
    """Bytes of programs that go into the host, or come back from it, only as a whole: a wait for that is long."""
    silent: int = 0
    """Bytes of programs whose library was found not to speak: nothing of them moves before it does."""
    clean: int | None = None
    """Bytes in the host of copies of what is on the GPU: to go that need not be written. They are not swap."""
    later: int = 0
    """Bytes that it could move, by its own word, and has just moved less of than it was asked for: it is asked again
    after a while."""
    past: int = 0
    """Bytes of `implicit` that the driver was seen to count. A program that says less than it said before has the rest
    as implicit until the driver was looked at."""

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(
            min(MAX, self.movable + other.movable),
            _total(self.implicit, other.implicit),
            _total(self.unmovable, other.unmovable),
            _total(self.disputed, other.disputed),
            _total(self.exchanged, other.exchanged),
            self.whole + other.whole,
            self.silent + other.silent,
            _total(self.clean, other.clean),
            self.later + other.later,
            self.past + other.past,
        )


@attrs.frozen
class Move:
    """A program that is to go to another GPU: what is to be known of it until it is there, or has stayed."""

    source: int
    """Index of the GPU that it was on."""
    target: int
    """Index of the one that it goes to."""
    before: Mapping[str, int] | None
    """What was asked for it there before, by the names of :class:`Books`; None where it had no group there."""


@attrs.frozen
class Wanted:
    """The compute state that the whole path above a process adds up to, on one GPU: what is off the runlist, and each
    lever under the name of its field."""

    off: Off = ON
    """Why its TSGs are to be off the runlist, and those of which engines."""
    timeslice_us: int = 0
    """Longest run in a scheduling round, over all its TSGs, microseconds; 0 is the driver's default."""
    sm_max: int = 0
    """SMs that its kernels run on at most, as asked for; 0 is all of them."""
    drains: bool = False
    """Whether it waits for its turn, and is on the runlist until what it launched has run."""
    spent: bool = False
    """Whether it waits until its quota lets it work: at its gate, or off the runlist, too."""

    @property
    def engines(self) -> Engines:
        """The engines that are to be off the runlist."""
        return self.off.engines

    @property
    def frozen(self) -> bool:
        """Whether its TSGs are to be off the runlist since that was asked for."""
        return bool(self.off.all & Reason.FREEZE)

    def at(self, lever: Lever) -> int:
        """The value of a lever; 0 is what the driver gives."""
        return int(getattr(self, lever.field))

    def with_(self, lever: Lever, value: int) -> Wanted:
        """The same with a lever at another value."""
        return attrs.evolve(self, **{lever.field: value})  # type: ignore[arg-type]


@attrs.frozen
class Place:
    """What the scheduler has a process have, where nothing else is asked for."""

    timeslice_us: int = 0
    """Longest run in a round, over all its TSGs, microseconds; 0 the driver's default."""
    off: bool = False
    """Off the runlist until its next turn."""
    engines: Engines = attrs.field(default=TURN_ENGINES, eq=False)
    """Engines that it is without, where it is off: what the end of its turn allows, and no part of the decision."""
    drain_us: int | None = attrs.field(default=None, eq=False)
    """Longest run in a round while it drains, microseconds; 0 what it has. None where it does not: no part of the
    decision, either."""

    leaves: int = attrs.field(default=0, eq=False)
    """Bytes of its memory that are about to go before its next turn, where it is off; no part of it, either."""

    @property
    def drains(self) -> bool:
        """Whether it is on the runlist yet, and launches nothing more, until what it launched has run."""
        return self.off and self.drain_us is not None


NOWHERE = Place()
"""What a process has that the scheduler leaves alone."""


@attrs.frozen
class Throttled:
    """How much a process, or those of a slice, were kept off the runlist by the scheduler (cgroup-v2.rst, cpu.stat)."""

    times: int = 0
    """How often."""
    usec: int = 0
    """For how long, microseconds."""

    def __add__(self, other: Throttled) -> Throttled:
        return Throttled(self.times + other.times, self.usec + other.usec)


def _total(a: int | None, b: int | None) -> int | None:
    """A sum that is as unknown as its parts. Some of them are a program's own word: many of those are a number, too."""
    return None if a is None or b is None else min(MAX, a + b)
