"""The settings: everything that can be set on a slice or a process on one GPU, in one row each.

Code that has to know about settings reads them here: the ranges of the ledgers and of the journal, the masks of the
kernel module (which has the same rows in kmod/settings.def; a test compares the two), what a migration takes along, the
control files and the keys of unit files, the tables of the manual and the completions (`make tables`). What a setting
does is promised by docs/semantics.md, and what a new one needs is in docs/controls.md.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import attrs

from backend.core.reasons import KNOWN

MAX = (1 << 63) - 1
"""Value of ``max`` in a control file: no limit. The kernel's PAGE_COUNTER_MAX plays the same part in memcg."""

NOBODY = (1 << 32) - 1
"""The uid or gid that stands for no owner; chown(2) does not take it."""


REASONS = KNOWN.value
"""Bits of the reasons for which a process can be off the runlist (GGROUP_REASON_* of kmod/uapi/ggroup.h)."""


class Kind(enum.Enum):
    """How a value is written in a control file and in a unit file."""

    SIZE = "size"
    """Bytes, or ``max``; in a unit file also a percentage of the GPU's memory, or ``infinity``."""
    SPAN = "span"
    """A time: in milliseconds in a control file, or with a unit in either; kept in microseconds, 0 for ``default``."""
    SWITCH = "switch"
    """0 or 1; in a unit file a boolean."""
    NUMBER = "number"
    """A whole number."""
    QUOTA = "quota"
    """``QUOTA PERIOD`` in microseconds, as in cpu.max, where ``max`` is no quota; in a unit file a percentage,
    optionally followed by a time for the period. The setting itself holds the quota, and the setting that names it in
    `in_file_of` holds the period.
    """
    SMS = "sms"
    """Streaming multiprocessors of a GPU: a number, a percentage of those that it has, or ``max``, which is kept as 0;
    in a unit file also ``infinity``. The file shows what holds of it, in the steps of the hardware.
    """
    OWNER = "owner"
    """A uid or a gid, set by chown(2). The kernel module accepts one only with CAP_SYS_ADMIN (EPERM)."""


@attrs.frozen(eq=False)
class Setting:
    """One setting: one row, compared by identity. Its index in `SETTINGS` is its bit in the mask of ``struct
    ggroup_set``, so a new one comes last.
    """

    field: str
    """Name in :class:`backend.core.records.Books`, in the journal, and in the structures of the kernel module."""
    kind: Kind
    most: int
    """Greatest value: bytes, microseconds or a plain number, depending on `kind`."""
    least: int = 0
    """Smallest value."""
    default: int = 0
    """Value in a new group."""
    control: str | None = None
    """Name of its control file; None if it has none of its own."""
    unit_key: str | None = None
    """Key in unit files and for `ggroupfs run -p`; None if there is none."""
    environment: str | None = None
    """Environment variable by which a program may set it for its own family; None if there is none."""
    job_option: str | None = None
    """Option of Slurm's sbatch, salloc and srun, without the dashes (packaging/slurm); None if there is none."""
    summary: str = ""
    """Description, in the few words that completions have room for."""
    needs: tuple[str, ...] = ()
    """Names of the levers by which the scheduler implements it; empty if a GPU's driver implements it directly."""
    on_software_gpu: bool = True
    """Whether it acts on the software GPU. A setting that a machine cannot implement is refused with EOPNOTSUPP."""
    follows_migration: bool = True
    """Whether a process takes it along to another GPU."""
    slices_only: bool = False
    """Whether only slices have it (EINVAL for a process)."""
    in_file_of: str | None = None
    """Field of the setting in whose control file it is the second number; None if it has a file of its own, or none."""

    @property
    def allowed(self) -> range:
        """The values that can be set; others are refused with ERANGE."""
        return range(self.least, self.most + 1)

    @property
    def constant(self) -> str:
        """The name of its bit in the header of the kernel module, without the prefix ``GGROUP_SET_``."""
        return self.field.removesuffix("_us").upper()


@attrs.frozen(eq=False, kw_only=True)
class Lever(Setting):
    """A setting that is passed to the hardware of a process as a number; 0, its default, sets nothing.

    The parts between a writer and a GPU take the lever from its row: what holds for a process, what is pulled, noted in
    the journal, commanded by the kernel module as ``SET_`` and its constant, and given back at the end. A GPU takes it
    in :meth:`backend.core.protocols.Gpu.set_lever`.
    """

    along: Callable[[int, int], int]
    """Chooses between two values that are set along the path of a process: ``min`` or ``max``. A value of 0 counts as
    unset.
    """
    shared: bool = False
    """Whether the processes of a slice that have a context share the value set on the slice."""
    by_program: bool = False
    """Whether a program makes it hold, and may refuse or not answer: no other lever waits for that."""


HIGH = Setting(
    "high",
    Kind.SIZE,
    most=MAX,
    default=MAX,
    control="gmem.limit.high",
    unit_key="GMemHigh",
    environment="GGROUP_GMEM_HIGH",
    job_option="gpu-mem",
    summary="memory over it is moved to the host",
)
LOW = Setting(
    "low",
    Kind.SIZE,
    most=MAX,
    control="gmem.limit.low",
    unit_key="GMemLow",
    environment="GGROUP_GMEM_LOW",
    job_option="gpu-mem-low",
    summary="memory that is protected",
)
SWAP_MAX = Setting(
    "swap_max",
    Kind.SIZE,
    most=MAX,
    default=MAX,
    control="gmem.swap.max",
    unit_key="GMemSwapMax",
    environment="GGROUP_GMEM_SWAP_MAX",
    summary="limit of what is in the host",
)
TIMESLICE = Lever(
    field="timeslice_us",
    kind=Kind.SPAN,
    most=MAX,
    control="compute.timeslice",
    unit_key="ComputeTimeSlice",
    summary="milliseconds on the GPU before others have their turn",
    along=min,
    shared=True,
)
FROZEN = Setting(
    "frozen",
    Kind.SWITCH,
    most=1,
    control="compute.freeze",
    unit_key="ComputeFreeze",
    summary="0 or 1",
)
PRIORITY = Setting(  # GVM's levels, and its default
    "priority",
    Kind.NUMBER,
    most=15,
    default=8,
    control="compute.priority",
    unit_key="ComputePriority",
    environment="GGROUP_PRIORITY",
    job_option="gpu-priority",
    summary="0 to 15, 0 goes first",
    needs=("compute.timeslice", "compute.freeze"),
)
WEIGHT = Setting(  # cgroup-v2.rst, "Weights": 1 to 10000, default 100
    "weight",
    Kind.NUMBER,
    least=1,
    most=10_000,
    default=100,
    control="compute.weight",
    unit_key="ComputeWeight",
    environment="GGROUP_WEIGHT",
    job_option="gpu-weight",
    summary="1 to 10000, the share among equal priorities",
    needs=("compute.timeslice", "compute.freeze"),
)
KEPT = Setting("kept", Kind.SWITCH, most=1, follows_migration=False, slices_only=True)
UID = Setting(
    "uid",
    Kind.OWNER,
    most=NOBODY - 1,
    default=NOBODY,
    follows_migration=False,
    slices_only=True,
)
GID = Setting(
    "gid",
    Kind.OWNER,
    most=NOBODY - 1,
    default=NOBODY,
    follows_migration=False,
    slices_only=True,
)
QUOTA = Setting(  # the least that cpu.max takes (kernel/sched/core.c: min_cfs_quota_period)
    "quota_us",
    Kind.QUOTA,
    least=1_000,
    most=MAX,
    default=MAX,
    control="compute.max",
    unit_key="ComputeQuota",
    job_option="gpu-quota",
    summary="microseconds of work on the GPU in each period",
    needs=("compute.freeze",),
)
PERIOD = Setting(  # the default of cpu.max, and its greatest (max_cfs_quota_period)
    "period_us",
    Kind.NUMBER,
    least=10_000,
    most=1_000_000,
    default=100_000,
    summary="microseconds of a period",
    needs=("compute.freeze",),
    in_file_of="quota_us",
)
LIMIT_MAX = Setting(
    "limit_max",
    Kind.SIZE,
    most=MAX,
    default=MAX,
    control="gmem.limit.max",
    unit_key="GMemMax",
    environment="GGROUP_GMEM_MAX",
    job_option="gpu-mem-max",
    summary="memory over it is refused",
)
OOM_GROUP = Setting(
    "oom_group",
    Kind.SWITCH,
    most=1,
    control="gmem.oom.group",
    unit_key="GMemOOMGroup",
    summary="0 or 1, whether all of it ends where one is killed",
)
WAIT_MAX = Setting(
    "wait_max_us",
    Kind.SPAN,
    most=MAX,
    control="compute.wait.max",
    unit_key="ComputeWaitMax",
    summary="milliseconds to wait for a turn of memory at most",
    needs=("compute.timeslice", "compute.freeze"),
)
SPATIAL = Setting(
    "spatial",
    Kind.SWITCH,
    most=1,
    control="compute.spatial",
    unit_key="ComputeSpatial",
    summary="0 or 1, whether its programs share the GPU at the same time",
    follows_migration=False,
    slices_only=True,
)
SM_MAX = Lever(
    field="sm_max",
    kind=Kind.SMS,
    most=MAX,
    control="compute.sm.max",
    unit_key="ComputeSMMax",
    environment="GGROUP_COMPUTE_SM_MAX",
    summary="SMs that kernels run on at most: a number, or N%",
    along=min,
    by_program=True,
)

SETTINGS = (
    *(HIGH, LOW, SWAP_MAX, TIMESLICE, FROZEN, PRIORITY, WEIGHT, KEPT, UID, GID),
    *(QUOTA, PERIOD),
    *(LIMIT_MAX, OOM_GROUP),
    WAIT_MAX,
    SPATIAL,
    SM_MAX,
)
"""All settings, in the order of their bits."""

SECOND = {one.in_file_of: one for one in SETTINGS if one.in_file_of is not None}
"""The setting of the second number of a control file, by the field of the first."""

BY_FIELD = {one.field: one for one in SETTINGS}
BY_CONTROL = {one.control: one for one in SETTINGS if one.control is not None}

APPLIED = tuple(
    sorted(
        (one for one in SETTINGS if one.unit_key is not None), key=lambda one: 2 * (one is FROZEN) + (one is LIMIT_MAX)
    )
)
"""Settings of unit files in the order in which they are applied: protection and limits of memory come before the
settings that let a program run, and `oom_group` comes before the limit that it belongs to.
"""

BY_ENVIRONMENT = {one.environment: one for one in SETTINGS if one.environment is not None}
"""Settings that a program may set for itself, by environment variable."""

LEVERS = tuple(one for one in SETTINGS if isinstance(one, Lever))
"""Settings that are levers by themselves. A freeze is not one of them: it is one of the reasons for which a process is
off the runlist, and that lever is pulled for all reasons together (:class:`backend.core.reasons.Off`).
"""

OF_THE_SCHEDULER = tuple(one for one in SETTINGS if one.needs)
"""Settings that the scheduler implements."""
