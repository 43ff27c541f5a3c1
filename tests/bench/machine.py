"""The machine and the software of measurements, which are written into the record beside them."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.bench.core.record import Value

ROOT = Path(__file__).resolve().parent.parent.parent
GIB = 1 << 30


def described(command: Sequence[str], gpu: bool) -> Mapping[str, Value]:
    """Describe this machine now. Facts that cannot be found out are left out."""
    found: dict[str, Value] = {
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "pyfuse3": _version("pyfuse3"),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        # A copy of the tree may lack its history: then its maker can name the commit.
        "commit": os.environ.get("GGROUP_COMMIT")
        or _said("git", "-C", os.fspath(ROOT), "describe", "--always", "--dirty"),
        "command": shlex.join(command),
        "load_average": round(os.getloadavg()[0], 2),
    }
    if gpu:
        found |= _gpu()
    return {key: value for key, value in found.items() if value != ""}


def _gpu() -> dict[str, Value]:
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        release = re.search(r"release ([\d.]+)", _said("nvcc", "--version"))
        return {
            "gpu": str(pynvml.nvmlDeviceGetName(handle)),
            "gpu_memory_gib": round(pynvml.nvmlDeviceGetMemoryInfo(handle).total / GIB),
            "driver": str(pynvml.nvmlSystemGetDriverVersion()),
            "nvcc": release[1] if release else "",
        }
    finally:
        pynvml.nvmlShutdown()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _said(*words: str) -> str:
    """Return what a command prints; nothing if it is missing or fails."""
    if shutil.which(words[0]) is None:
        return ""
    done = subprocess.run(words, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def command() -> list[str]:
    """Return the command line of this process, for repeating it."""
    return [Path(sys.executable).name, "-m", "tests.bench", *sys.argv[1:]]
