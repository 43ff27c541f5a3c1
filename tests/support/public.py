"""A directory for what other users run."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def public_directory() -> Iterator[Path]:
    """Yield a directory that every user may look into. pytest's own are root's, and so are those above them."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        yield Path(path)
