"""Level 6: the buddy allocator of backend/cuda/library/memory/small.c, against the plainest model of one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import attrs
import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.t6_cuda.units import build_unit

CHUNK = 2 << 20
UNIT = 512
LARGEST = 1 << 20


def load() -> ctypes.CDLL:
    """Return small.c, with the types of its functions."""
    library = ctypes.CDLL(str(build_unit() / "unit" / "small.so"))
    word, out = ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint64)
    library.small_new.restype = ctypes.c_void_p
    library.small_delete.argtypes = [ctypes.c_void_p]
    library.small_alloc.argtypes = [ctypes.c_void_p, word, word, word, out]
    library.small_alloc.restype = ctypes.c_bool
    library.small_free.argtypes = [ctypes.c_void_p, word]
    library.small_free.restype = ctypes.c_bool
    library.small_find.argtypes = [ctypes.c_void_p, word, out, out, out]
    library.small_find.restype = ctypes.c_bool
    library.small_largest.argtypes = [ctypes.c_void_p]
    library.small_largest.restype = ctypes.c_int
    return library


def rounded(nbytes: int, alignment: int) -> int:
    """Return the size of the block that is taken."""
    size = UNIT
    while size < max(nbytes, alignment):
        size *= 2
    return size


@attrs.frozen
class Block:
    """A block in use."""

    nbytes: int
    """Bytes requested."""
    size: int
    """Bytes taken."""
    serial: int
    """Serial number that was given."""


SIZES = st.one_of(st.integers(1, LARGEST + 1), st.sampled_from([1, 511, 512, 513, 4096, LARGEST // 2 + 1, LARGEST]))
ALIGNMENTS = st.sampled_from([0, 1, 256, 512, 4096, 1 << 16, LARGEST])


class Buddies(RuleBasedStateMachine):
    """Blocks do not overlap, lie in the chunk, and are aligned; freed space is found again, and merged."""

    def __init__(self) -> None:
        super().__init__()
        self.library = load()
        self.small = self.library.small_new()
        self.blocks: dict[int, Block] = {}
        self.serial = 0

    def free_block(self, size: int) -> bool:
        """Return whether an aligned block of that size is free."""
        return any(
            all(start + size <= at or at + block.size <= start for at, block in self.blocks.items())
            for start in range(0, CHUNK, size)
        )

    @rule(nbytes=SIZES, alignment=ALIGNMENTS)
    def alloc(self, nbytes: int, alignment: int) -> None:
        self.serial += 1
        offset = ctypes.c_uint64(12345)
        size = rounded(nbytes, alignment)
        fits = size <= LARGEST and self.free_block(size)
        assert self.library.small_alloc(self.small, nbytes, alignment, self.serial, ctypes.byref(offset)) == fits
        if not fits:
            assert offset.value == 12345
            return
        start = offset.value
        assert start % UNIT == 0
        assert start % max(alignment, 1) == 0
        assert start + size <= CHUNK
        assert all(start + size <= at or at + block.size <= start for at, block in self.blocks.items())
        self.blocks[start] = Block(nbytes, size, self.serial)

    @precondition(lambda self: self.blocks)
    @rule(pick=st.integers(0, 10**6))
    def free(self, pick: int) -> None:
        start = sorted(self.blocks)[pick % len(self.blocks)]
        del self.blocks[start]
        assert self.library.small_free(self.small, start)
        assert not self.library.small_free(self.small, start)

    @rule(offset=st.integers(0, CHUNK + UNIT))
    def free_what_is_none(self, offset: int) -> None:
        if offset not in self.blocks:
            assert not self.library.small_free(self.small, offset)

    @rule(offset=st.integers(0, CHUNK), near=st.integers(0, 10**6), step=st.integers(-2, 2), end=st.booleans())
    def find(self, offset: int, near: int, step: int, end: bool) -> None:
        if self.blocks:
            start = sorted(self.blocks)[near % len(self.blocks)]
            offset = max(0, start + step + (self.blocks[start].nbytes if end else 0))
        expected = [
            (at, block.nbytes, block.serial) for at, block in self.blocks.items() if at <= offset < at + block.nbytes
        ]
        found = [ctypes.c_uint64() for _ in range(3)]
        answer = self.library.small_find(self.small, offset, *map(ctypes.byref, found))
        assert answer == bool(expected)
        assert not answer or tuple(word.value for word in found) == expected[0]

    @invariant()
    def knows_the_largest(self) -> None:
        largest: Callable[[], int] = lambda: self.library.small_largest(self.small)  # noqa: E731
        orders = [order for order in range(13) if self.free_block(UNIT << order)] if len(self.blocks) < 8 else None
        if orders is not None:
            assert largest() == (orders[-1] if orders else -1)
        if not self.blocks:
            assert largest() == 12

    def teardown(self) -> None:
        for start in self.blocks:
            assert self.library.small_free(self.small, start)
        assert self.library.small_largest(self.small) == 12
        self.library.small_delete(self.small)


TestBuddies = Buddies.TestCase
TestBuddies.settings = settings(max_examples=60, stateful_step_count=40)
