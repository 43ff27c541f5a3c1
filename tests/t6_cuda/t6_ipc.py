"""Level 6: legacy IPC of memory that moves, between processes that know nothing of it (programs/ipc.c)."""

from __future__ import annotations

import pytest

from tests.t6_cuda.harness import run


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
def test_one_exports_and_others_open(sanitize: str) -> None:
    run("ipc", sanitize=sanitize)
