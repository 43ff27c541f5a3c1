"""Places on this machine that more than one part looks for.

It imports next to nothing: so may the generator of systemd, for which every daemon-reload waits.
"""

from __future__ import annotations

from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
"""Directory that the packages are in: installed, or of a checkout."""

CUDA_LIBRARY = TOP / "backend" / "cuda" / "libggroup-cuda.so"
"""The library that goes into CUDA programs, where it is installed."""

SLICES_D = Path("/etc/ggroupfs/slices.d")
"""Directory of files with limits for cgroups and units."""

CONTAINER_HOOK = TOP.parent.parent / "libexec" / "ggroupfs" / "oci-hook"
"""The program that runtimes of containers call, where ggroupfs-container is installed."""
