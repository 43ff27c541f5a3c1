"""The messages between a program and the books: fixed-size, versioned, the same on every transport.

They travel one a datagram over a unix SEQPACKET socket, and by read() and write() between the kernel module and what
serves a GPU; the library in CUDA programs speaks them too (backend/cuda/library/daemon). Little endian, no pointers, no
padding but what is named. On the socket either side may ask. docs/upgrades.md says how versions meet.

    offset  size  field
         0     4  op      what is asked; bit 31 set in a reply
         4     4  status  0 in a request; in a reply 0 or a negated errno
         8     8  seq     chosen by the asker, given back in the reply; 0 in an event
        16     4  gpu     index of the GPU
        20     4  flags   0
        24    40  args    five 64-bit words, their meaning by op

Ops 1 to 31 are about the books, 4 to 15 of them asked by CUDA programs, 16 and up asked of what moves the hardware:
by the kernel module of its provider, and RECLAIM, DEPART, END_TURN, BEGIN_TURN, PREPARE and SMS by the daemon of a CUDA
program, which asks SPACE itself; 32 to 63 are about the software GPU's memory and engine; 64 and up are events, which
the books send unasked.
"""

from __future__ import annotations

import enum
import os
import struct

import attrs

VERSION = 1
"""First word of HELLO; a peer of another version is refused with EPROTO. It stays as long as what is there means the
same: what is new is a :class:`Feature`."""

FORMAT = struct.Struct("<IiQII5Q")
SIZE = FORMAT.size
"""Bytes in every message: 64."""

REPLY = 1 << 31

STATUSES = range(-4095, 1)
"""What an answer may have as its status: 0, or a negated errno (MAX_ERRNO of include/linux/err.h). A peer that answers
anything else is not listened to any more."""

ARGS = 5
"""Words in `args`."""

WORD = 1 << 64


class Feature(enum.IntFlag):
    """What one side of the socket can do. Each says it in HELLO and uses only what both can; bits that it does not know
    mean nothing to it. A bit is never used again."""

    MEMORY = 1 << 0
    """MANAGE, CHARGE, UNCHARGE, MOVE_IN, LIMITS, RECLAIM, ROOM: the memory of CUDA programs is charged and moved."""
    COUNTERS = 1 << 1
    """The page of counters that comes with the reply to MANAGE: kernels are counted."""
    REPORT = 1 << 2
    """REPORT: what of the memory cannot be moved."""
    DEPART = 1 << 3
    """DEPART: the program can stand by, to be moved to another GPU."""
    ENGINE = 1 << 4
    """JOIN, LEAVE, ALLOC, FREE, WRITE, READ, LAUNCH, PROGRESS: the software GPU."""
    FAMILY = 1 << 5
    """WANT, FAMILY: a program limits itself, and its children."""
    TURNS = 1 << 6
    """END_TURN, BEGIN_TURN: the program has a gate of turns. Of one of the software GPU: its LAUNCH may be answered as
    late as in its next turn, and what it asks for meanwhile before that."""
    TOTAL = 1 << 7
    """TOTAL: a program learns how large its GPU is to look before it uses that, and once. One of the software GPU may
    ask for its LIMITS then, too."""
    BURSTS = 1 << 8
    """LEAD, FOLLOW: while a program works through a burst, programs of worse priority launch nothing in between."""
    HOST = 1 << 9
    """HOST, GRANT: what a program pins of the host is granted, over all programs."""
    SETS = 1 << 10
    """PREPARE, and the words of its working set on the page of counters: memory of CUDA programs is scheduled with
    time."""
    VIEW = 1 << 11
    """TOTAL is answered with the bytes that are free and used now, too, and may be asked again: NVML in a program says
    these."""
    MANAGED = 1 << 12
    """The fifth word of HOST: managed memory is charged, and counted by no driver."""
    SPACE = 1 << 13
    """SPACE: a program learns which server it is to be a client of."""
    SMS = 1 << 14
    """SMS, the third word of MANAGE, and the counts of placed launches on the page: kernels can run on some SMs
    alone."""


FIRST = Feature(0b11111)
"""What ggroupfs 0.1 could. It said nothing of that: its HELLO has 0 in the place of the bits, and it looks at none."""

CUDA = (
    Feature.MEMORY
    | Feature.COUNTERS
    | Feature.REPORT
    | Feature.DEPART
    | Feature.FAMILY
    | Feature.TURNS
    | Feature.TOTAL
    | Feature.BURSTS
    | Feature.HOST
    | Feature.VIEW
    | Feature.MANAGED
    | Feature.SPACE
    | Feature.SMS
)
"""What is spoken at the door of CUDA programs where there are no turns of memory (``-o turns=off``)."""

CUDA_ALL = CUDA | Feature.SETS
"""What is spoken there otherwise, and by the library of the same tree."""

SOFT = Feature.ENGINE | Feature.FAMILY | Feature.TURNS | Feature.TOTAL
"""What is spoken at the door of the software GPU."""


def met(ours: Feature, said: int) -> Feature:
    """Return what both sides can, where the other one said `said`."""
    return ours & Feature(said or FIRST)


def names(features: Feature) -> str:
    """Their names, as files and logs have them; ``none`` where there are none."""
    return ",".join(str(one.name).lower() for one in features) or "none"


class Op(enum.IntEnum):
    """What is asked. ``args in -> args out``."""

    HELLO = 1
    """(version, features) -> (version, page size in bytes, timeslice in microseconds, features): of each side what it
    can, as bits of :class:`Feature`; 0 is :data:`FIRST`."""
    JOIN = 2
    """(channels) -> (tsg): a context on `gpu` for the sender, and with it a TSG."""
    LEAVE = 3
    """(tsg) -> (): the context and what it has queued are gone."""
    LOCATE = 4
    """(first 8 bytes of a GPU's UUID as a little-endian word, the last 8) -> (index). ENODEV: not of this tree."""
    MANAGE = 5
    """(resident bytes, swapped bytes, groups as of SMS) -> (): the memory of the sender on `gpu` can be moved, and is
    charged by what it says from now on; RECLAIM and ROOM may come. Its kernels run on these groups of SMs. It is in the
    tree then, and the policy of its slices holds. The reply carries, by SCM_RIGHTS, the page of counters of the
    connection (backend/cuda/page.py)."""
    CHARGE = 6
    """(bytes) -> (): GPU memory to be allocated; answered once every level is under its high. ENOMEM if refused."""
    UNCHARGE = 7
    """(resident bytes, swapped bytes) -> (): freed, of what was charged. EINVAL for more than that. As an event (seq 0)
    it is not answered."""
    MOVE_IN = 8
    """(bytes, microseconds of the last move) -> (): they may come back to the GPU, and are booked. EAGAIN: no room."""
    LIMITS = 9
    """() -> (lowest limit above the sender or 2^64-1, bytes free under all of them, its swapped bytes)"""
    REPORT = 10
    """(bytes, bytes ever, bytes, bytes, bytes) -> (): as much of what the sender holds on `gpu` cannot be moved, as
    much has changed places with what was colder, as much is about to and may be off the GPU meanwhile, as much can be
    moved and is still as the program made it: a checkpoint carries that; and as much it has let go of, and lives by
    descriptors that are open somewhere. As an event it is not answered."""
    TREE = 11
    """() -> (device number of the mount): whose socket this is; 0 where that is not known. It may come before the
    greeting; a daemon that does not know it refuses that with EPROTO."""
    WANT = 12
    """(setting, value) -> (): the family that is named next is to have that, if it is made for it. A setting is its
    place in :data:`backend.core.settings.SETTINGS`. EINVAL for one that no program may ask for, ERANGE for a value that
    it does not take."""
    FAMILY = 13
    """(number, everywhere) -> (): the sender is in that family, below those that it named before on this connection,
    and in those that it is in anyhow. `everywhere` is 1 where it is to be in the tree from now on, on every GPU.
    EINVAL for 0; E2BIG for more families than a process may be in, EAGAIN for more than its user may have, EOPNOTSUPP
    for what no GPU acts on."""
    TOTAL = 14
    """() -> (bytes that `gpu` is to look to the sender as if it had them in all, or 2^64-1 for those that it has; bytes
    that are free under all limits above it, or 2^64-1 where there is none; bytes that the level with the least limit
    holds): where the sender is now, or would be if it used that GPU, once what files ask for holds there. It need not
    have said that its memory is managed, and is not in the tree by asking. It keeps the first answer
    (backend/core/sight.py); the others are only told with :attr:`Feature.VIEW`."""
    HOST = 15
    """(bytes, bytes, bytes, bytes, bytes) -> (): so much of the host the sender has pinned for memory of `gpu`, so much
    of that serves it, so much it would have in all, of so much that is on the GPU the host has a copy, and so much of
    what it has charged is managed memory, which the driver counts for no process (with :attr:`Feature.MANAGED`). It is
    told of what it may have by GRANT. As an event it is not answered."""
    ARRIVE = 16
    """(0, pid, start time) -> (): from the kernel module: that process wants a group; answered once it has one."""
    SET_TIMESLICE = 17
    """(group, pid, start time, microseconds) -> (): from the kernel module, as the three below: the levers of a Gpu."""
    ATTACH_TSG = 18
    """(group, pid, start time) -> ()"""
    DETACH_TSG = 19
    """(group, pid, start time) -> (): answered when none of its TSGs is running."""
    RECLAIM = 20
    """(group, pid, start time, bytes) -> (bytes moved). Of a CUDA program (0, 0, 0, bytes) -> (bytes moved,
    microseconds; those of waits for what ran, with its gate closed, and for memory of the host): memory of its own on
    `gpu` is to go to the host. Booked when the answer comes, whatever waits."""
    DEPART = 21
    """(what) -> (): asked of a CUDA program: it is about to be moved to another GPU. Answered once nothing of it
    runs, all of its memory that the library has placed in the host and, if `what` is 1, on every GPU, is held by
    descriptors alone, and its page says so (`stands`). So it stays until the connection ends; then it takes its
    memory back, and connects anew from where it is. EBUSY for one that does not come to a rest, EOPNOTSUPP for one
    that shares memory, EMFILE where descriptors are short. Its gates of turns open; that of `gpu` alone where it
    refuses."""
    END_TURN = 22
    """(microseconds, bytes) -> (1 if drained, microseconds that took): asked of a CUDA program: it launches nothing
    more on `gpu` until BEGIN_TURN or the end of the connection. Answered once what it launched before has run, or after
    that long, with 0: it is held all the same. As many bytes are about to go before its next turn: once it is drained,
    and before it answers, it finds out which of them need not be written. Asked again meanwhile it waits again. EBUSY,
    and it is not held: a stream is being captured, or it stands by to be moved. EOPNOTSUPP, and it is not held: of what
    it has on `gpu` nothing is the library's to move. ENODEV: `gpu` is none that it has said is managed."""
    BEGIN_TURN = 23
    """(run-ahead in microseconds) -> (): asked of a CUDA program: it launches again. With a run-ahead it launches
    nothing more while what is pending would take longer than that, by how fast its kernels finished lately; 0: as far
    ahead as the driver lets it. ENODEV as for END_TURN."""
    PREPARE = 24
    """(bytes) -> (bytes moved, microseconds that took, and where they went as of RECLAIM): asked of a CUDA program that
    waits for its turn on `gpu`: at most so much of what it used in its last turn, and that is in the host, comes back,
    in the order of its first use. (Of turns of less than a second: in those of the last second that it ran.) It asks
    for each piece by MOVE_IN, as for all that comes back, and ends where that gives EAGAIN. Its gate stays closed, and
    nothing comes that is not asked for, by this or by ROOM. ENODEV as for END_TURN; EBUSY while it is about to be
    moved, or not drained. While its gate is closed RECLAIM takes what it did not use before what it did, and of that
    the last in that order first; what the host has as it is it drops."""
    SPACE = 25
    """(number) -> (number): asked by a CUDA program before it initialises the driver: the space that it is to be in, 0
    for none. It is then to be a client of the server in the directory of that name (backend/space/space.py). A program
    that is in one says its number to each daemon that it connects to, and has it back where it is still there."""
    SMS = 26
    """(groups, 1 to ask alone) -> (number of groups, SMs in each, SMs of the GPU): asked of a CUDA program: its kernels
    on `gpu` run on these groups of SMs from the next launch on. Bit i is the group of number i in the one split of the
    SMs that all programs make; 0 is all SMs. EOPNOTSUPP where the driver has no green contexts (with 0, the answer is
    zeros), EINVAL for a group that is not there, EBUSY while the program is about to be moved; ENODEV as for
    END_TURN."""
    SET_SM_MAX = 27
    """(group, pid, start time, SMs) -> (): from the kernel module, a lever of a Gpu as SET_TIMESLICE."""
    ALLOC = 32
    """(bytes) -> (first page, pages): memory on `gpu`, rounded up to pages. ENOMEM where the limits refuse it."""
    FREE = 33
    """(first page, pages) -> ()"""
    WRITE = 34
    """(first page, pages, stamp, step) -> (): page i holds stamp + i * step, modulo 2^64."""
    READ = 35
    """(first page, pages up to 5) -> the stamps"""
    LAUNCH = 36
    """(tsg, kernels, microseconds each, first page, pages touched by each) -> (): answered once they are queued, in the
    turn of the program. EAGAIN for more than can be queued, or can wait for a turn."""
    PROGRESS = 64
    """event (tsg, kernels finished since the context was made)"""
    ROOM = 66
    """event (bytes): so much may come back to the GPU now, if MOVE_IN is asked for it."""
    LEAD = 67
    """event (microseconds): others go behind the program on `gpu`. With it comes, by SCM_RIGHTS, the page on which it
    says until when they are held (backend/cuda/burst.py): while work of its own is pending, and for so long after the
    last. Without a page none goes behind it any more."""
    FOLLOW = 68
    """event (slot, run-ahead in microseconds): the program goes behind another one on `gpu`, whose page comes with it
    for reading, in the place of what that slot had. It launches no kernel while a page says so, and else one
    once what is left of those before it takes no longer than that, by how fast its kernels finished lately. Without a
    page the slot has none any more."""
    GRANT = 69
    """event (bytes): so much of the host the receiver may have pinned for memory of `gpu` from now on; what it has
    beyond that and does not use it lets go. Memory that it is asked to move goes there all the same."""


@attrs.frozen
class Message:
    """One message, decoded."""

    op: int
    """An :class:`Op`."""
    seq: int = 0
    """Ties a reply to its request."""
    gpu: int = 0
    """Index of the GPU."""
    args: tuple[int, ...] = ()
    """Up to five words; absent ones travel as 0."""
    status: int = 0
    """0, or a negated errno in a reply."""
    reply: bool = False
    """Whether this answers a request."""
    flags: int = 0
    """Must be 0."""

    def encode(self) -> bytes:
        """The 64 bytes of it. struct.error for a field out of range."""
        op = self.op | REPLY if self.reply else self.op
        args = self.args + (0,) * (ARGS - len(self.args))
        return FORMAT.pack(op, self.status, self.seq, self.gpu, self.flags, *args)

    @staticmethod
    def decode(raw: bytes) -> Message:
        """The message in `raw`. ValueError unless it is exactly one."""
        if len(raw) != SIZE:
            raise ValueError(f"a message is {SIZE} bytes, not {len(raw)}")
        op, status, seq, gpu, flags, *args = FORMAT.unpack(raw)
        return Message(op & ~REPLY, seq, gpu, tuple(args), status, bool(op & REPLY), flags)

    def answer(self, *args: int) -> Message:
        """The reply that grants this request."""
        return Message(self.op, self.seq, self.gpu, args, reply=True)

    def refuse(self, code: int) -> Message:
        """The reply that refuses this request with an errno."""
        return Message(self.op, self.seq, self.gpu, status=-code, reply=True)

    def check(self) -> Message:
        """This reply, or the OSError that it carries."""
        if self.status:
            raise OSError(-self.status, os.strerror(-self.status))
        return self
