"""What a bare machine needs before its first cell: CUDA programs compiled, torch in the page cache, host memory there.

Each of that would else be in the time of the cell that comes first. What is missing is told, and no error: the cells
that need it say so themselves.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.bench.core.runner import Unavailable
from tests.bench.gpu.lab import SOURCES, built
from tests.bench.gpu.systems import CONTROL, PLACES
from tests.bench.papers.lab import PROGRAMS
from tests.support.cgroups import cgroup2

PACKAGES = ("torch", "torchvision", "transformers", "timm", "pyfuse3", "nvidia-ml-py")
"""Those whose versions are told, and written beside cells."""
COMPILED: Mapping[str, Sequence[Path]] = {
    "pairs": (PROGRAMS / "ballast.cu",),
    "salus": (),
    "flyt": (
        PROGRAMS / "calls.cu",
        *(SOURCES / name for name in ("science.cu", "products.cu", "critical.cu")),
    ),
    "scale": (SOURCES / "products.cu",),
}
"""CUDA programs, by scenario."""
WARM = """
import torch, torchvision, transformers
from transformers.generation import ContinuousBatchingConfig
x = torch.ones(64, 64, device=%r, dtype=torch.bfloat16)
print(torch.__version__, transformers.__version__, float((x @ x).sum()))
"""
"""All that the programs import, and one product: torch, its libraries and the driver's are in the page cache then."""
GROW = """
import mmap, sys
open("/proc/self/oom_score_adj", "w").write("1000")
size, step = int(sys.argv[1]), bytes(1 << 28)
held = mmap.mmap(-1, size)
for at in range(0, size, len(step)):
    held[at : at + len(step)] = step
"""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
WARM_S, GROW_S = 180.0, 60.0
"""Seconds that the two may take."""


def versions(names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of packages, of those that there are."""
    found = {}
    for name in names:
        try:
            found[name.replace("-", "_")] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def compiled(scenarios: Sequence[str], compile_: Callable[[Path], str] = built) -> Iterator[str]:
    """Compile the CUDA programs of scenarios, several at a time; a line for each that fails, and one for all."""
    sources = list(dict.fromkeys(path for name in scenarios for path in COMPILED[name]))
    begin = time.monotonic()
    with ThreadPoolExecutor(max(1, min(8, len(sources)))) as pool:
        futures = {source: pool.submit(compile_, source) for source in sources}
        for source, future in futures.items():
            try:
                future.result()
            except Unavailable as error:
                yield f"{source.name} is not compiled: {error}"
    yield f"{len(sources)} CUDA programs, {time.monotonic() - begin:.0f} s"


def warmed(device: str) -> str:
    """Import once all that the programs import, and use the device."""
    begin = time.monotonic()
    command = [sys.executable, "-c", WARM % device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WARM_S, env={**os.environ, **OFFLINE})
    except subprocess.TimeoutExpired:
        return f"torch: not imported after {WARM_S:.0f} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return f"torch: {lines[-1][:200] if lines else f'exit code {done.returncode}'}"
    return f"torch and transformers {done.stdout.strip()}, {time.monotonic() - begin:.0f} s"


def lacking(device: str) -> Iterator[str]:
    """What this machine lacks of what cells use."""
    if device != "cpu" and not os.path.exists("/dev/nvidiactl"):
        yield "there is no NVIDIA driver (/dev/nvidiactl)"
    if not os.path.exists("/dev/fuse"):
        yield "there is no /dev/fuse: no tree can be mounted"
    if shutil.which("fusermount3") is None:
        yield "there is no fusermount3"
    if shutil.which(CONTROL) is None and shutil.which(CONTROL, path=PLACES) is None:
        yield f"there is no {CONTROL}: nothing is measured with MPS"
    for name in ("torch", "torchvision", "transformers", "timm"):
        if importlib.util.find_spec(name) is None:
            yield f"there is no {name}"
    try:
        cgroup2()
    except AssertionError as error:
        yield str(error)


def meminfo(key: str, path: Path = Path("/proc/meminfo")) -> int:
    """Bytes of a line of proc_meminfo(5); 0 where it has no such line."""
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == key:
            return int(rest.split()[0]) * 1024
    return 0


def grown(goal_gib: int) -> str:
    """Use so much of the host's memory once, and free it: a virtual machine whose memory grows as it is used has it
    from then on, and the daemon grants of what is available. In a process that the kernel would end before others."""
    before, begin = meminfo("MemTotal"), time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-c", GROW, str(goal_gib << 30)], timeout=GROW_S, stderr=subprocess.DEVNULL)
    after = meminfo("MemTotal")
    return f"host memory {before >> 30} GiB, then {after >> 30} GiB, {time.monotonic() - begin:.0f} s"


def prepared(scenarios: Sequence[str], device: str = "cuda", host_gib: int = 0) -> Iterator[str]:
    """Lines, as things are done."""
    yield ", ".join(f"{name} {version}" for name, version in versions().items()) or "no packages"
    yield from lacking(device)
    if host_gib:
        yield grown(host_gib)
    if device != "cpu":
        yield from compiled(scenarios)
    yield warmed(device)
