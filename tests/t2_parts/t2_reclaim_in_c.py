"""kmod/reclaim.c: which targets of a plan are asked, what is reported of them, and what the caller gets.

The module's file is compiled unchanged, with tests/support/plan/worker.c in place of the plan, the levers, the events.
"""

from __future__ import annotations

import ctypes
import errno
import shutil
import subprocess
from ctypes import c_int64, c_uint, c_uint32, c_uint64
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NBYTES = 100
TIMEOUT_MS = 5000


class Each(ctypes.Structure):
    """struct each of tests/support/plan/worker.c."""

    _fields_ = (
        *((name, c_uint64) for name in ("nbytes", "below_low", "moved", "took_ms")),
        *((name, c_int64) for name in ("err", "exits")),
        *((name, c_uint64) for name in ("asked", "low", "pressed")),
    )


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The compiled file of the module. The kernel headers that it includes are empty: worker.h has everything."""
    folder = tmp_path_factory.mktemp("reclaim")
    for name in ("reclaim.c", "reclaim.h", "plan.h"):
        shutil.copy(ROOT / "kmod" / name, folder)
    for name in ("worker.h", "worker.c"):
        shutil.copy(ROOT / "tests/support/plan" / name, folder)
    (folder / "uapi").symlink_to(ROOT / "kmod/uapi")
    (folder / "linux").mkdir()
    for line in (folder / "reclaim.c").read_text().splitlines():
        if line.startswith("#include"):
            (folder / line.split()[1].strip('"<>')).touch()
    flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-I", str(folder)]
    sources = [str(folder / "reclaim.c"), str(folder / "worker.c")]
    subprocess.run(["gcc", *flags, "-include", "worker.h", "-o", folder / "reclaim.so", *sources], check=True)
    return ctypes.CDLL(str(folder / "reclaim.so"))


def reclaim(worker: ctypes.CDLL, *each: Each) -> tuple[int, int, list[Each]]:
    """Return the caller's errno, the bytes reported as moved, and what was done about each target."""
    rows, moved = (Each * len(each))(*each), c_uint64()
    code = worker.worker_reclaim(rows, c_uint(len(each)), c_uint32(TIMEOUT_MS), ctypes.byref(moved))
    return -int(code), moved.value, list(rows)


def gives(moved: int = NBYTES, took_ms: int = 0) -> Each:
    """Return a target that gives so much."""
    return Each(nbytes=NBYTES, below_low=1, moved=moved, took_ms=took_ms)


def fails(code: int, exits: bool = False) -> Each:
    """Return a target that answers with an error."""
    return Each(nbytes=NBYTES, below_low=1, err=-code, exits=exits)


@pytest.mark.parametrize("code", [errno.EINTR, errno.ENODEV, errno.ETIMEDOUT])
def test_nothing_is_asked_of_those_behind_an_error_that_is_of_all(worker: ctypes.CDLL, code: int) -> None:
    """They are not pressed either, and no event says that their protection was not kept. The caller gets the error,
    whatever has moved by then."""
    result, moved, each = reclaim(worker, gives(), fails(errno.EIO), fails(code), gives(), gives())
    assert (result, moved) == (code, NBYTES)
    assert [one.asked for one in each] == [NBYTES] * 3 + [0] * 2
    assert [one.pressed for one in each] == [NBYTES] * 3 + [0] * 2
    assert [one.low for one in each] == [1] * 3 + [0] * 2


def test_no_time_is_left_for_those_behind_one_that_took_all(worker: ctypes.CDLL) -> None:
    result, moved, each = reclaim(worker, gives(took_ms=TIMEOUT_MS), gives())
    assert (result, moved) == (errno.ETIMEDOUT, NBYTES)
    assert [one.low for one in each] == [1, 0]


@pytest.mark.parametrize("code", [errno.EIO, errno.EOPNOTSUPP, errno.EBUSY])
def test_one_that_cannot_give_is_passed_over(worker: ctypes.CDLL, code: int) -> None:
    """Its error is reported only if none has given: the first such error."""
    assert reclaim(worker, fails(code), gives())[:2] == (0, NBYTES)
    assert reclaim(worker, gives(), fails(code))[:2] == (0, NBYTES)
    assert reclaim(worker, fails(code), gives(0), fails(errno.EPERM))[:2] == (code, 0)


def test_one_that_exits_meanwhile_is_no_error(worker: ctypes.CDLL) -> None:
    for code in (errno.ENODEV, errno.ESRCH):
        assert reclaim(worker, fails(code, exits=True), gives())[:2] == (0, NBYTES)
