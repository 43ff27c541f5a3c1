"""gpu_usec on a real GPU: exact, with no time counted twice."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.support.mounted import Mounted
from tests.t7_nvidia.conftest import WANT, Worker
from tests.t7_nvidia.programs import group_of, used

Start = Callable[..., Worker]

BEGUN_S = 1.0
"""Seconds after the start or a change of programs before a measurement begins: figures are 0.2 s old."""


def test_two_programs_use_all_of_the_time(gpu_mount: Mounted, worker: Start) -> None:
    both = [worker(), worker()]
    for one in both:
        group_of(gpu_mount, one)
    time.sleep(BEGUN_S)
    window, (a, b) = used(gpu_mount, *both)
    print(f"window {window:.3f} s: {a.seconds:.3f} + {b.seconds:.3f} = {100 * (a.seconds + b.seconds) / window:.2f} %")
    assert a.seconds + b.seconds == pytest.approx(window, rel=0.02)
    assert a.seconds / b.seconds == pytest.approx(a.kernels / b.kernels, rel=0.05)


def test_it_follows_the_timeslices(gpu_mount: Mounted, worker: Start) -> None:
    both = [worker(), worker()]
    for one in both:
        group_of(gpu_mount, one)
    (gpu_mount.group(both[0].pid) / "compute.timeslice").write_text("8\n")
    time.sleep(BEGUN_S)
    window, (a, b) = used(gpu_mount, *both)
    print(
        f"8 ms against 2.048: {a.seconds / window:.4f} + {b.seconds / window:.4f}, kernels {a.kernels / b.kernels:.3f}"
    )
    assert a.seconds + b.seconds == pytest.approx(window, rel=0.02)
    assert a.seconds / b.seconds > 3


def test_who_is_frozen_uses_nothing(gpu_mount: Mounted, worker: Start) -> None:
    both = [worker(), worker()]
    for one in both:
        group_of(gpu_mount, one)
    (gpu_mount.group(both[0].pid) / "compute.freeze").write_text("1\n")
    time.sleep(BEGUN_S)
    window, (a, b) = used(gpu_mount, *both)
    print(f"frozen {a.seconds:.4f} s, the other {b.seconds:.4f} of {window:.4f} s")
    (gpu_mount.group(both[0].pid) / "compute.freeze").write_text("0\n")
    assert a.seconds <= 0.01 * window
    assert b.seconds == pytest.approx(window, rel=0.02)


def test_several_contexts_are_one_process(gpu_mount: Mounted, worker: Start) -> None:
    both = [worker(), worker()]
    both[0].set(WANT, 4)
    both[0].started(4)
    for one in both:
        group_of(gpu_mount, one)
    time.sleep(3)  # until timeslices are corrected for its switches
    window, (a, b) = used(gpu_mount, *both)
    print(f"4 contexts against 1: {a.seconds / window:.4f} + {b.seconds / window:.4f}")
    assert a.seconds + b.seconds == pytest.approx(window, rel=0.02)
    assert a.seconds == pytest.approx(b.seconds, rel=0.1), "contexts buy nothing"
