"""Heat: the pointers among the parameters of launches."""

from __future__ import annotations

import pytest

from .harness import run


@pytest.mark.parametrize("sanitize", ["", "thread", "address,undefined"])
def test_words(sanitize: str) -> None:
    """All that may be pointers are seen, in structures and buffers too, and nothing beyond a parameter is read."""
    run("heat_words", sanitize=sanitize)
