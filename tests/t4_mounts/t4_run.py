"""`ggroupfs run`: the program is in the tree with its limits before it does anything; and listeners for pressure."""

from __future__ import annotations

import contextlib
import ctypes.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.soft.client import Device
from ggroupfs.usermem import Usermem
from tests.support.cgroups import cgroup, slice_path
from tests.support.command import MIB, complaint, ggroupfs
from tests.support.mounted import SECONDS, SLOW, Mounted, Tenant, eventually

CUDA = Path(__file__).parents[2] / "backend" / "cuda" / "library"


def run(mount: Path, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return ggroupfs("run", "--mount", mount, *words, **environment)


def test_the_limit_holds_from_the_first_allocation(mount: Mounted) -> None:
    """The pid is the one that was started, and the process is otherwise unchanged, too."""
    script = f"""if True:
        import os
        from backend.soft.client import Device
        with Device("{mount.path}") as device:
            device.join()
            device.alloc(64 << 20)
            own = f"{mount.path}/{{os.getpid()}}/0/"
            print(os.getpid(), *(open(own + name).read().strip() for name in ("gmem.current", "gmem.peak")))
    """
    words = [sys.executable, "-m", "ggroupfs", "run", "--mount", os.fspath(mount.path), "-p", "gmem.limit.high=16M"]
    with subprocess.Popen([*words, "--", sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid, current, peak = map(int, process.stdout.read().split())
        assert process.wait(SECONDS) == 0
    assert pid == process.pid
    assert current == 16 * MIB
    assert peak == 18 * MIB, "one page over it at most, from the start"


def test_several_settings_and_what_the_program_prints(mount: Mounted) -> None:
    words = ["-p", "gmem.limit.low=4M", "-p", "gmem.swap.max=max", "-p", "compute.timeslice=4", "--gpu", "0"]
    names = "gmem.limit.low gmem.swap.max compute.timeslice"
    result = run(mount.path, *words, "--", "sh", "-c", f"cd {mount.path}/$$/0 && cat {names}")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{4 * MIB}\nmax\n4\n", "")


def test_properties_are_spelt_as_in_unit_files(mount: Mounted) -> None:
    words = ["-p", "GMemHigh=25%", "-p", "GMemLow=4M", "-p", "GMemSwapMax=infinity", "-p", "ComputeTimeSlice=1ms 500us"]
    names = "gmem.limit.high gmem.limit.low gmem.swap.max compute.timeslice"
    result = run(mount.path, *words, "-p", "GMemLow=", "--", "sh", "-c", f"cd {mount.path}/$$/0 && cat {names}")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{4096 * MIB}\n0\nmax\n1.5\n", "")


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_the_exit_code_is_the_commands(mount: Mounted, code: int) -> None:
    assert run(mount.path, "--", "sh", "-c", f"exit {code}").returncode == code


def test_signals_are_the_commands(mount: Mounted) -> None:
    assert run(mount.path, "--", "sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM
    ignored = run(mount.path, "--", "grep", "SigIgn", "/proc/self/status").stdout.split()[1]
    plain = subprocess.run(["grep", "SigIgn", "/proc/self/status"], capture_output=True, text=True, check=True)
    assert int(ignored, 16) == int(plain.stdout.split()[1], 16)


def test_options_of_the_command_are_its_own(mount: Mounted) -> None:
    result = run(mount.path, "--", "echo", "--mount", "-p", "--", "run", "-h")
    assert result.stdout == "--mount -p -- run -h\n"


def test_slice_is_entered_first(mount: Mounted) -> None:
    with cgroup("ggroup-run") as place:
        name = f"/{slice_path(place)}/inner"
        result = run(mount.path, "--slice", name, "-p", "gmem.limit.low=1M", "--", "cat", "/proc/self/cgroup")
        assert result.stderr == ""
        assert f"{name}\n" in result.stdout
        assert (place / "inner").is_dir()


def test_errors_are_one_line(mount: Mounted, tmp_path: Path) -> None:
    m = ("run", "--mount", mount.path)
    assert complaint(*m, code=2) == "run: `-- COMMAND` is missing"
    assert complaint(*m, "--", code=2) == "run: `-- COMMAND` is missing"
    assert complaint(*m, "-p", "gmem.limit.high", "--", "true", code=2).endswith("not KEY=VALUE")
    assert "no such control" in complaint(*m, "-p", "gmem.nothing=1", "--", "true", code=2)
    assert "Invalid argument" in complaint(*m, "-p", "gmem.limit.high=lots", "--", "true", code=1)
    assert "Operation not supported" in complaint(*m, "-p", "compute.migrate=0", "--", "true", code=1)
    assert complaint(*m, "--", "no-such-program", code=1) == "no-such-program: No such file or directory"
    assert complaint(*m, "--gpu", "9", "-p", "gmem.limit.high=1G", "--", "true", code=1) == "run: there is no GPU 9"
    assert complaint(*m, "-p", "GMemHigh=lots", "--", "true", code=2).startswith("run: -p GMemHigh=lots: not a size")
    assert "result out of range" in complaint(*m, "-p", "compute.weight=0", "--", "true", code=1)
    assert "no such control" in complaint(*m, "-p", "GMemHi=1", "--", "true", code=2)
    assert "no name of a cgroup" in complaint(*m, "--slice", "../x", "--", "true", code=2)
    nowhere = complaint("run", "--mount", tmp_path, "--", "true", code=1)
    assert nowhere == f"{tmp_path}: no ggroup tree is mounted there"
    assert "no right" in complaint(*m, "-p", "gmem.limit.high=1G", "--", "true", code=1, user=65534)


def test_nobody_is_left_in_the_tree(mount: Mounted) -> None:
    assert complaint("run", "--mount", mount.path, "-p", "gmem.limit.high=lots", "--", "true", code=1)
    run(mount.path, "-p", "gmem.limit.high=1G", "--", "true")
    eventually(lambda: not mount.members(), "the directories are gone")


# On NVIDIA GPUs the library is preloaded; a tree of plain files is enough to see that.


@pytest.fixture
def nvidia_tree(tmp_path: Path) -> Path:
    (tmp_path / "ggroup.backend").write_text("ledger soft\ngpu nvidia\npid 1\nsocket /run/ggroupfs/0:99.sock\n")
    return tmp_path


def test_the_library_goes_along(nvidia_tree: Path) -> None:
    there = ctypes.util.find_library("m")
    assert there is not None
    place = next(path for path in Path("/lib").rglob(there) if path.is_file())
    shown = run(nvidia_tree, "--", "env", GGROUP_CUDA_LIBRARY=os.fspath(place)).stdout.splitlines()
    assert f"LD_PRELOAD={place.resolve()}" in shown
    assert "GGROUP_SOCKET=/run/ggroupfs/0:99.sock" in shown
    before = os.fspath(place)
    shown = run(nvidia_tree, "--", "env", GGROUP_CUDA_LIBRARY=before, LD_PRELOAD=before).stdout.splitlines()
    assert f"LD_PRELOAD={place.resolve()}:{before}" in shown


def test_without_the_library(nvidia_tree: Path) -> None:
    result = run(nvidia_tree, "--", "true", GGROUP_CUDA_LIBRARY="/nowhere/lib.so")
    assert (result.returncode, result.stderr) == (
        1,
        "ggroupfs: run: there is no /nowhere/lib.so: `make -C backend/cuda/library` builds it\n",
    )


# usermemfd, as a program sees it


@contextlib.contextmanager
def cache(mount: Mounted) -> Iterator[tuple[Device, list[range]]]:
    """This process with 64 MiB on the GPU in two allocations: its working set, and a cache."""
    with Device(mount.path) as device:
        device.join()
        yield device, [device.alloc(32 * MIB), device.alloc(32 * MIB)]


GIVES = """
import json, os, sys
from pathlib import Path
from backend.soft.client import Device
from ggroupfs.usermem import watch

mount, asked = sys.argv[1], []
own = Path(mount, str(os.getpid()), "0")
with Device(mount) as device:
    device.join()
    work, cache = device.alloc(32 << 20), device.alloc(32 << 20)

    def give_back(nbytes):
        asked.append(nbytes)
        if len(asked) == 1:
            device.free(cache)

    thread = watch(give_back, mount=mount)
    (own / "gmem.limit.high").write_text("32M\\n")
    held = {name: int((own / name).read_text()) for name in ("gmem.current", "gmem.swap.current")}
    print(json.dumps({"asked": asked, "lives": thread.is_alive(), **held}))
"""
"""A program with a working set, and a cache that it gives back from a thread."""
TRIES = 9
"""Number of such programs, at least one of which must be in time: on a busy machine a CPU may take 50 ms to get."""


def test_a_handler_in_a_thread_drops_its_cache_and_nothing_else_moves(mount: Mounted) -> None:
    for _ in range(TRIES):
        done = subprocess.run([sys.executable, "-c", GIVES, mount.path], capture_output=True, text=True, check=True)
        told = json.loads(done.stdout)
        assert told["gmem.current"] <= 32 * MIB, "the limit holds, in time or not"
        if not told["gmem.swap.current"]:
            break
    assert told == {"asked": [32 * MIB], "lives": True, "gmem.current": 32 * MIB, "gmem.swap.current": 0}


def test_records_as_an_iterator(mount: Mounted) -> None:
    own = mount.group(os.getpid())
    with cache(mount), Usermem(mount=os.fspath(mount.path), pid=os.getpid()) as records:
        assert records.wait(0) is None
        writer = threading.Timer(0.05, (own / "gmem.limit.high").write_text, ["48M\n"])
        writer.start()
        assert next(iter(records)) == 16 * MIB
        writer.join()
        assert records.wait(0) is None
        (own / "gmem.limit.high").write_text("max\n")


def test_one_that_ignores_it_is_waited_for_once(mount: Mounted) -> None:
    with Tenant(mount, "--gmem", "64M") as tenant, Usermem(mount=os.fspath(mount.path), pid=tenant.pid):
        took = []
        for limit in (48, 32, 16):
            watch, began = mount.watch(), time.monotonic()
            tenant.write("gmem.limit.high", f"{limit}M")
            took.append(watch.seconds if took else time.monotonic() - began)
            assert tenant.number("gmem.current") == limit * MIB
        assert took[0] >= 0.05
        assert took[1] + took[2] < 0.05 * SLOW, took


def test_the_c_header_reads_records(mount: Mounted, tmp_path: Path) -> None:
    """In this process, which has memory to be asked for: as a shared object."""
    source = tmp_path / "listen.c"
    source.write_text(
        '#include "ggroup_usermem.h"\n'
        "int open_it(const char *mount) { return ggroup_usermem_open(mount, 0); }\n"
        "int wait_it(int fd, int timeout, struct ggroup_usermem *r) { return ggroup_usermem_wait(fd, timeout, r); }\n"
    )
    shared = tmp_path / "listen.so"
    subprocess.run(
        ["gcc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-I", CUDA, source, "-o", shared],
        check=True,
    )
    library = ctypes.CDLL(os.fspath(shared), use_errno=True)
    own = mount.group(os.getpid())
    record = (ctypes.c_uint64 * 2)()
    with cache(mount):
        fd = library.open_it(os.fsencode(mount.path))
        assert fd >= 0
        assert library.wait_it(fd, 0, record) == 0
        (own / "gmem.limit.high").write_text("48M\n")
        assert library.wait_it(fd, 1000, record) == 1
        assert (record[0], record[1] > 0) == (16 * MIB, True)
        assert library.wait_it(fd, 0, record) == 0
        os.close(fd)
        assert library.open_it(b"/nowhere") == -1
        (own / "gmem.limit.high").write_text("max\n")
