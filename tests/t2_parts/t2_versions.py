"""Journals of other versions: this version reads 0.1's in full; 0.1 reads those of this version and of later ones; and
a later version's additions are no reason to ignore a journal. The reader of 0.1, and a journal of it, are in
tests/versions.
"""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from backend.core import settings
from backend.core.reasons import FROZEN, Off, Reason
from backend.ledgers.journal import first, format, state
from backend.ledgers.journal.file import Journal
from backend.ledgers.journal.state import Lever, State
from backend.process.identity import ROOT, Process, Slice
from tests.support.journaled import BOOT, MEMORY, histories, let_go
from tests.versions import v0_1
from tests.versions.v0_1 import format as old_format
from tests.versions.v0_1 import state as old_state

OLD = Path(v0_1.__file__).with_name("journal")
JOB = "GPU-a", Slice("/job")

few = hypothesis_settings(max_examples=30, suppress_health_check=list(HealthCheck))
BEGIN: Sequence[state.Operation] = (state.gpu("GPU-a"), state.add(JOB, ROOT), state.put(JOB, {"high": 5}))


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ggroup-journal-", dir=MEMORY) as folder:
        yield Path(folder) / "one.journal"


def facts(operations: Iterable[Sequence[Any]]) -> list[str]:
    """Return operations in an order that no version uses."""
    return sorted(json.dumps(one, sort_keys=True) for one in operations)


def of(*lines: Sequence[Sequence[Any]]) -> bytes:
    """Return a journal of those lines, as this version writes it."""
    data, checksum = format.begin(BOOT, State())
    for line in lines:
        text, checksum = format.line(line, checksum)
        data += text
    return data


def old(data: bytes) -> list[str]:
    """Return the final state that 0.1 reads."""
    found = old_format.read(data)
    assert found.end == len(data)
    return facts(found.state.operations())


# Written by 0.1, and read here


def test_a_journal_of_0_1_is_read_in_full() -> None:
    data = OLD.read_bytes()
    found = format.read(data)
    assert (found.end, found.left_out) == (len(data), 0)
    assert facts(found.state.operations()) == old(data)
    kinds = {one[0] for one in found.state.operations()}
    assert kinds == first.OPERATIONS.keys() - {"move", "remove", "moved", "forget"}, "it has something of everything"
    fields = {name for one in found.state.operations() if one[0] == "put" for name in one[3]}
    assert fields == first.FIELDS.keys()


def test_what_0_1_knows_is_as_it_was() -> None:
    assert first.FIELDS == old_state._RANGES


# Written here, and read by 0.1


@given(histories())
@few
def test_0_1_reads_what_this_version_writes(lines: list[list[state.Operation]]) -> None:
    data = of(*lines)
    assert old(data) == facts(known_to_0_1(format.read(data).state.operations()))


def known_to_0_1(operations: Iterable[state.Operation]) -> Iterator[state.Operation]:
    """Yield what 0.1 reads of later additions: no reasons or lives, and of a lever whether all engines are off."""
    for one in operations:
        if one[0] == "lever":
            if one[3:6] != [False, 0, False]:
                yield one[:6]
        elif one[0] not in ("reasons", "live"):
            yield one


later_fields = st.dictionaries(
    st.sampled_from(("gmem.max", "quota", "//", "\0", "\udcff")), st.integers(0, 1 << 70) | st.text(max_size=5)
)
later_operations = st.sampled_from(
    (["reasons", "GPU-a", [5, 7], {"turn": ["GR"]}], ["spent", "//", 1.5], ["gmem", None])
)


@given(histories(), st.data())
@few
def test_0_1_reads_of_later_versions_what_it_knows(lines: list[list[state.Operation]], data: st.DataObject) -> None:
    """With any added fields of a group, any added operations, and any added words of known ones."""
    later = []
    for line in lines:
        for one in line:
            if one[0] == "put":
                one = [*one[:3], {**one[3], **data.draw(later_fields)}]
            elif one[0] == "lever" and data.draw(st.booleans()):
                one = [*one, {"reasons": 3}]
            elif one[0] == "moving" and one[4]:
                one = [*one[:4], {**one[4], **data.draw(later_fields)}]
            later.append(one)
        if data.draw(st.booleans()):
            later.append(data.draw(later_operations))
    text = of(later)
    assert old(text) == old(of(*lines))
    found = format.read(text).state
    for entry in found.groups.values():
        entry.later.clear()
    assert facts(found.operations()) == facts(format.read(of(*lines)).state.operations())


def test_a_value_that_0_1_would_not_take_is_none_for_it() -> None:
    """0.1 refuses a journal with an unknown value. So a value that was added later is not written in the old form."""
    data = of([*BEGIN, ["put", "GPU-a", "/job", {"priority": 16, "weight": 7}]])
    assert old(data) == facts([state.gpu("GPU-a"), state.add(JOB, ROOT), state.put(JOB, {"high": 5, "weight": 7})])


def test_the_real_file_is_read_by_0_1(path: Path) -> None:
    journal = Journal(path, boot=BOOT)
    journal.commit(*BEGIN)
    journal.state.keep("GPU-a", "/job", {"gmem.max": 7})
    journal.commit(state.lever(("GPU-a", state._process([os.getpid(), 1])), Lever(True)))
    assert old(path.read_bytes()) == facts([*BEGIN, ["lever", "GPU-a", [os.getpid(), 1], True, 0, False]])
    journal._write_anew()
    assert old(path.read_bytes()) == facts([*BEGIN, ["lever", "GPU-a", [os.getpid(), 1], True, 0, False]])
    assert format.read(path.read_bytes()).state == journal.state
    let_go(journal)


# Written by a later version, and read here


def test_what_a_later_version_noted_of_a_group_is_kept_for_it(path: Path) -> None:
    """Over any number of daemons of this version, while the group exists."""
    path.write_bytes(of(BEGIN, [["put", "GPU-a", "/job", {"high": 6, "gmem.max": 7, "quota": "5 10"}]]))
    path.chmod(0o600)
    for daemon in range(2):
        journal = Journal(path, boot=BOOT)
        entry = journal.state.groups[JOB]
        assert (entry.fields["high"], entry.later) == (6 + daemon, {"gmem.max": 7, "quota": "5 10"})
        journal.commit(state.put(JOB, {"high": 7}))
        if not daemon:
            journal.commit(state.add(("GPU-a", Slice("/other")), ROOT))
        journal.commit(state.move(JOB, Slice("/other")), state.move(JOB, ROOT))
        let_go(journal)
    journal = Journal(path, boot=BOOT)
    journal.commit(state.remove(JOB), state.add(JOB, ROOT))
    assert journal.state.groups[JOB].later == {}
    let_go(journal)


@pytest.mark.logs("was written by a later ggroupfs: 4 entries mean nothing to this one")
def test_what_means_nothing_here_is_left_out_and_said(path: Path) -> None:
    nonsense = [["reasons", 1], ["lever", "GPU-a", [5, 7], True, 0, False, 3], ["put", "GPU-none", "/", {"x": 1}]]
    path.write_bytes(of([*BEGIN, *nonsense, ["put", "GPU-a", "/job", {"low": 3, "list": [1]}]]))
    path.chmod(0o600)
    journal = Journal(path, boot=BOOT)
    assert journal.state.groups[JOB].fields == {"high": 5, "low": 3}
    let_go(journal)


@pytest.mark.parametrize(
    ("lever", "off", "detached"),
    [
        (Lever(True), Off(Reason.FREEZE, Reason.TURN), True),
        (Lever(gr=True, timeslice_us=5), Off(gr=Reason.TURN), False),
        (Lever(), Off(Reason.MIGRATION), False),
    ],
)
def test_reasons_go_past_0_1(lever: Lever, off: Off, detached: bool) -> None:
    """0.1 reads whether all engines are off; that GR alone is off it finds in the hardware."""
    key = ("GPU-a", state._process([5, 7]))
    operations = [*BEGIN, state.lever(key, lever), state.reasons(key, off)]
    data = of(operations)
    assert (format.read(data).state.levers.get(key, Lever()), format.read(data).state.reasons) == (lever, {key: off})
    known = ["lever", "GPU-a", [5, 7], detached, lever.timeslice_us, False]
    assert old(data) == facts([*BEGIN, known] if detached or lever.timeslice_us else BEGIN)


def test_reasons_of_a_later_version_are_left_out() -> None:
    """Known reasons are read; a group with only unknown ones has none."""
    key = ("GPU-a", state._process([5, 7]))
    found = format.read(of([*BEGIN, ["reasons", "GPU-a", [5, 7], 1 << 20 | 1, 1 << 21]]))
    assert (found.state.reasons, found.left_out) == ({key: FROZEN}, 0)
    assert format.read(of([*BEGIN, ["reasons", "GPU-a", [5, 7], 1 << 20, 0]])).state.reasons == {}


# Levers that came later

LATER = settings.Lever(field="later", kind=settings.Kind.NUMBER, most=10, along=max)
"""A lever of a future version."""
WHO = "GPU-a", Process(5, 7)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal of a version that has the lever."""
    monkeypatch.setattr(state, "_OTHERS", {LATER.field})


@pytest.mark.parametrize("held", [Lever(), Lever(True, 5), Lever(gr=True), Lever(moving=True)])
def test_a_later_lever_is_in_the_journal(known: None, held: Lever) -> None:
    """It is written with all else that holds, of which 0.1 reads what it knows."""
    with_later = held.with_(LATER, 3)
    data = of([*BEGIN, state.lever(WHO, with_later)])
    assert format.read(data).state.levers == {WHO: with_later}
    assert with_later.at(LATER) == 3
    plain = ["lever", "GPU-a", [5, 7], held.detached, held.timeslice_us, held.moving]
    assert old(data) == facts(
        [*BEGIN, plain] if (held.detached, held.timeslice_us, held.moving) != (False, 0, False) else BEGIN
    )
    assert with_later.with_(LATER, 0) == held


def test_a_lever_of_a_later_version_is_passed_over() -> None:
    """The rest of the line holds, with the engines that are off."""
    line = ["lever", "GPU-a", [5, 7], False, 5, False, "GR", {"later": 3, "later still": [1]}, "more"]
    found = format.read(of([*BEGIN, *first.written([line])]))
    assert (found.state.levers, found.left_out) == ({WHO: Lever(gr=True, timeslice_us=5)}, 0)


def test_a_value_that_no_lever_has_is_left_out(known: None) -> None:
    line = ["lever", "GPU-a", [5, 7], False, 5, False, "NONE", {"later": -1}]
    found = format.read(of([*BEGIN, *first.written([line])]))
    assert (found.state.levers, found.left_out) == ({WHO: Lever(timeslice_us=5)}, 1)


# Carried words


@given(st.text(max_size=20), st.binary(max_size=20))
@few
def test_nothing_that_is_carried_is_fatal(text: str, raw: bytes) -> None:
    """It is read here and by 0.1, which checks only the form of its name."""
    carried = text.replace("/", "")
    data = of([*BEGIN, ["forget", "/\0" + carried], ["forget", "/\0" + raw.hex()]])
    assert format.read(data).left_out == 2
    assert old(data) == facts(BEGIN)


def test_what_is_not_carried_is_obeyed_whole_or_not_at_all() -> None:
    """As ever: only what says so may be obeyed in part."""
    body = b'[["put","GPU-a","/job",{"new":1}]]'
    data, checksum = format.begin(BOOT, State())
    text, _ = format.line(BEGIN, checksum)
    before = int(text[:8], 16)
    with pytest.raises(format.Refused):
        format.read(data + text + b"%08x %b\n" % (zlib.crc32(body, before), body))
