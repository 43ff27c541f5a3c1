"""Findings of `ggroupfs doctor` about daemons and programs that were started with an earlier ggroupfs."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from backend.door.wire import CUDA, SOFT, names
from ggroupfs.commands import doctor

OF_0_1 = "ledger soft\ngpu nvidia\npid 7\nsocket /run/ggroupfs/0:40.sock\nupgrade SIGUSR2\n"
"""The content of a ggroup.backend of 0.1."""

NOW = f"ledger soft\nledger.lacks none\ngpu nvidia\nprotocol 1\nfeatures {names(CUDA)}\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (OF_0_1, "its daemon is of ggroupfs 0.1: `ggroupfs upgrade"),
        (NOW, ""),
        (NOW + "programs.older 0\nprograms.lack none\n", ""),
        (NOW + "programs.older 3\nprograms.lack depart\n", "older library: 3, which lack depart until they start anew"),
        (NOW.replace(",depart", ""), "its daemon is of another version and lacks depart"),
        (NOW.replace(",depart", ",depart,later"), ""),
        (f"gpu soft\nprotocol 1\nfeatures {names(SOFT)}\n", ""),
        ("gpu soft\nprotocol 1\nfeatures engine,family\n", "its daemon is of another version and lacks total,turns"),
    ],
)
def test_what_doctor_says_of_a_tree(tmp_path: Path, text: str, why: str) -> None:
    """Nothing, where all is of one version, or where the daemon is dead."""
    (tmp_path / "ggroup.backend").write_text(text)
    found = trio.run(doctor.versions, [str(tmp_path), str(tmp_path / "gone")])
    assert [(one.subject, one.verdict) for one in found] == ([(str(tmp_path), "advisory")] if why else [])
    assert all(why in one.why for one in found)
