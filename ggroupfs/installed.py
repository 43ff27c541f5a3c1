"""Paths of installed files that more than one part looks for.

This module imports next to nothing, so the systemd generator can use it, for which every daemon-reload waits.
"""

from __future__ import annotations

from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
"""Directory that contains the packages, installed or in a checkout."""

CUDA_LIBRARY = TOP / "backend" / "cuda" / "libggroup-cuda.so"
"""Library for CUDA programs, where it is installed."""

SLICES_D = Path("/etc/ggroupfs/slices.d")
"""Directory of files with limits for cgroups and units."""

CONTAINER_HOOK = TOP.parent.parent / "libexec" / "ggroupfs" / "oci-hook"
"""Program that container runtimes call, where ggroupfs-container is installed."""
