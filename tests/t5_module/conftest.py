"""Tests of the kernel module, for a machine that it is loaded on; elsewhere there is nothing to collect."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.path.exists("/dev/ggroup") else ["t5_*.py"]
