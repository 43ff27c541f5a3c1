"""The mount options about turns of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.scheduler.memory.turns import WAIT_US
from ggroupfs.daemon.options import MountOptions, parse
from ggroupfs.errors import UsageError


def parsed(*words: str) -> MountOptions:
    return parse(Path("/x"), "nvidia", "soft", list(words))


def test_there_are_turns_unless_the_mount_has_none() -> None:
    assert parsed().turns
    assert parsed("turns=on").turns
    assert not parsed("turns=off").turns
    assert parsed("turns=off,turns=on").turns, "the last one holds"


def test_how_long_a_program_waits() -> None:
    assert parsed().turns_wait == WAIT_US / 1e6
    assert parsed("turns.wait=2.5").turns_wait == 2.5


@pytest.mark.parametrize("word", ["turns=", "turns=auto", "turns=1", "turns.wait=0", "turns.wait=-1", "turns.wait=inf"])
def test_what_is_no_value(word: str) -> None:
    with pytest.raises(UsageError, match=r"turns"):
        parsed(word)
