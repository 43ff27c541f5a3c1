"""Every allocation of the module fails once (faults.c), on a kernel that injects faults: only `make test-kmod-debug`
names this file."""

from __future__ import annotations

from pathlib import Path

from tests.t5_module.harness import run_program

FAULTS = Path("/sys/kernel/debug")
NO_PAGES = "20"
"""A min-order that no allocation has."""


def prepare(min_order: str) -> None:
    for kind in ("failslab", "fail_page_alloc"):
        (FAULTS / kind / "ignore-gfp-wait").write_text("N")  # allocations that may wait fail, too
        (FAULTS / kind / "verbose").write_text("0")  # otherwise each is a stack in the kernel's log
    (FAULTS / "fail_page_alloc/min-order").write_text(min_order)


def test_a_call_that_fails_changes_nothing() -> None:
    prepare(NO_PAGES)
    found = run_program("faults", seconds=110)
    print(found)
    assert found["wrong"] == 0
    assert found["register"] >= 2  # the GPU, its root
    assert found["add_slice"] >= 3  # the arguments, the group, its path


def test_a_page_that_is_not_there() -> None:
    prepare("0")
    found = run_program("faults", "mmap")
    print(found)
    assert found["wrong"] == 0
    assert found["mmap"] >= 1
