"""The groups of SMs that the daemon hands out."""

from __future__ import annotations

import random

import pytest

from backend.core.records import GpuInfo
from backend.cuda.sms import Groups, Shape
from backend.process.identity import Process

ONE, TWO, THREE, FOUR = (Process(number, number) for number in range(1, 5))
OF = 16
"""Groups of an H200."""


@pytest.mark.parametrize(
    ("sms", "count"),
    [(0, 0), (1, 1), (7, 1), (8, 1), (15, 1), (16, 2), (66, 8), (128, 16), (131, 16), (132, 0), (500, 0)],
)
def test_whole_groups_and_one_at_least(sms: int, count: int) -> None:
    assert Shape(16, 8, 132).count(sms) == count
    info = GpuInfo(0, "GPU-x", "x", "none", 1, 1, sms=132, sm_step=8)
    assert info.sms_of(sms) == 8 * count


def test_programs_that_fit_beside_one_another_share_no_group() -> None:
    groups = Groups()
    masks = [groups.take(process, 4, OF) for process in (ONE, TWO, THREE, FOUR)]
    assert masks == [0xF, 0xF0, 0xF00, 0xF000]
    groups.forget(TWO)
    assert groups.take(Process(9, 9), 4, OF) == 0xF0


def test_a_program_keeps_its_place_while_it_has_a_limit() -> None:
    groups = Groups()
    assert groups.take(ONE, 4, OF) == 0xF
    assert groups.take(TWO, 2, OF) == 0x30
    assert groups.take(TWO, 12, OF) == 0xFFF0
    assert groups.take(TWO, 13, OF) == 0xFFF1
    assert groups.take(TWO, 1, OF) == 0x10
    assert groups.take(TWO, 0, OF) == 0
    assert groups.take(THREE, 1, OF) == 0x10


def test_no_program_has_more_masks_than_there_are_groups() -> None:
    chosen, groups = random.Random(5), Groups()
    masks: dict[Process, set[int]] = {}
    for _ in range(2000):
        process, count = chosen.choice((ONE, TWO, THREE)), chosen.randrange(1, OF + 1)
        mask = groups.take(process, count, OF)
        assert mask.bit_count() == count
        masks.setdefault(process, set()).add(mask)
    assert all(len(each) <= OF for each in masks.values())


def test_beyond_the_gpu_the_least_used_are_shared() -> None:
    groups = Groups()
    for process in (ONE, TWO):
        groups.take(process, 8, OF)
    assert groups.take(THREE, 8, OF) == 0xFF
    assert groups.take(FOUR, 8, OF) == 0xFF00
