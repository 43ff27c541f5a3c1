"""Fixtures of every test: real processes to work on, and a check that nothing unexpected is logged."""

from __future__ import annotations

import gc
import logging
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.mounted import Mounted, mounted, mountpoint
from tests.support.public import public_directory

# As with CI's own profile: the time of an example depends on how busy the machine is, so it is no criterion.
settings.register_profile("unhurried", settings.get_profile(settings.get_current_profile_name()), deadline=None)
settings.load_profile("unhurried")


LONGEST = (
    "t6_mover",
    "t6_timed",
    "t3_turn_orders",
    "t6_sets",
    "t3_memory_liars",
    "t3_memory_strangers",
    "t3_killed",
    "t3_scheduled_gates",
    "t4_restart",
    "t6_departure",
    "t3_quota",
    "t3_hostile",
    "t3_quota_faults",
    "t4_usher",
    "t3_turns_machine",
    "t4_semantics",
    "t3_cuda_session",
    "t3_hard_limit",
    "t6_gate",
    "t3_turns",
    "t4_connection",
    "t2_replay",
    "t3_quota_real",
    "t3_draining_fillers",
    "t3_cuda_migrate",
    "t3_quota_beside",
    "t2_balance",
    "t3_policies",
    "t2_nvidia_gpu",
    "t2_nvidia_faults",
    "t2_journal",
    "t3_memory_switch",
    "t2_memory_planner",
    "t3_soft_turns_machine",
    "t2_slo",
    "t6_memory",
    "t3_scheduler",
    "t6_objects",
    "t3_faults",
    "t6_fuzz_memory",
    "t6_turn",
    "t4_top",
    "t2_siblings",
    "t4_command",
    "t2_scheduler",
    "t3_draining_shares",
    "t2_ledger_machine",
    "t2_plan_in_c",
    "t6_checkpoint",
    "t6_daemon",
    "t2_directories",
    "t2_reclaim",
    "t3_next_use",
)
"""Files whose tests take half a minute or more in total, longest first (`make test-unit` with --durations 0)."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "logs(*patterns): log lines that this test is about (regular expressions)")
    # A shell starts background jobs with SIGINT ignored, and tenants, which SIGINT is to end, would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first: a worker takes a whole file at a time, so this lets all workers finish together."""
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


def pytest_collection() -> None:
    """Disable garbage collection: what pytest collects is kept anyway, and scanning it takes a third of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Freeze modules and items, which are kept to the end, so that the collection of each harness skips them."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def log_purity(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test for an unexpected warning or error in the log, and for an expected one that is not logged."""
    caplog.set_level(logging.WARNING)
    yield
    marker = request.node.get_closest_marker("logs")
    patterns = list(marker.args) if marker is not None else []
    lines = [record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.WARNING]
    unexpected = [line for line in lines if not any(re.search(pattern, line) for pattern in patterns)]
    missing = [pattern for pattern in patterns if not any(re.search(pattern, line) for line in lines)]
    assert not unexpected, f"unexpected log lines: {unexpected}"
    assert not missing, f"expected log lines that did not come: {missing}"


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Return a function that starts idle processes; they are ended after the test."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        processes.append(subprocess.Popen(words or ("sleep", "600")))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user may look into, for what other users run."""
    with public_directory() as path:
        yield path


@pytest.fixture(scope="module")
def module_mount() -> Iterator[Mounted]:
    """One mounted tree for all tests of a module; tests use `mount`."""
    with mountpoint() as path, mounted(path) as mount:
        yield mount


@pytest.fixture
def mount(module_mount: Mounted) -> Iterator[Mounted]:
    """A mounted tree with a software GPU; its books are checked after the test."""
    yield module_mount
    module_mount.check()
