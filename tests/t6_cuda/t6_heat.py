"""Heat: the pointers among the parameters of launches."""

from __future__ import annotations

import pytest

from .harness import run


@pytest.mark.parametrize("sanitize", ["", "thread", "address,undefined"])
def test_words(sanitize: str) -> None:
    """All words that may be pointers are found, also in structures and buffers; nothing beyond a parameter is read."""
    run("heat_words", sanitize=sanitize)
