"""Versions of the kernel module's interface: a program built with the header of 0.1 means the same to today's module.

What a module lacks is reported in words and not used; what a newer module can do besides is ignored.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trio

from backend import choose
from backend.choose import Choice
from backend.core.settings import REASONS, SETTINGS
from backend.door.wire import Op
from backend.ledgers import abi, kernel
from backend.process.identity import Member, Process, Slice, SliceOn

ROOT = Path(__file__).parents[2]
NEW, OLD = ROOT / "kmod/uapi/ggroup.h", ROOT / "tests/versions/v0_1/ggroup.h"
IOCTLS = ROOT / "kmod/ioctl.c"
FEATURES_OF_0_1 = 0x1F
ALL = sum(kernel.WITHOUT)
LATER = [one for one in SETTINGS if one not in abi.settings_of(abi.Hello()) and one.in_file_of is None]
"""The settings that 0.1 does not have."""


def text(header: Path) -> str:
    """A header without its comments."""
    return re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)


def structures() -> dict[str, list[str]]:
    """The structures of 0.1, with the names of their fields."""
    found = re.findall(r"^struct (\w+) \{(.*?)^\};", text(OLD), re.DOTALL | re.MULTILINE)
    return {name: re.findall(r"\w+ (\w+)(?:\[\w+\])?;", body) for name, body in found}


def numbers(header: Path) -> list[str]:
    return re.findall(r"^#define (GGROUP_\w+)[ \t]", text(header), re.MULTILINE)


def layout(header: Path, folder: Path) -> dict[str, int]:
    """Every size, offset and number of 0.1, as a compiler finds them in this header."""
    lines = ["#include <stddef.h>", "#include <stdio.h>", f'#include "{header}"', "int main(void) {"]
    for name, fields in structures().items():
        lines.append(f'printf("{name} %zu\\n", sizeof(struct {name}));')
        for field in fields:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof(struct {name}, {field}));')
            lines.append(f'printf("{name}.{field}.size %zu\\n", sizeof(((struct {name} *)0)->{field}));')
    lines += [f'printf("{name} %llu\\n", (unsigned long long)({name}));' for name in numbers(OLD)]
    source, program = folder / f"{header.parent.name}.c", folder / header.parent.name
    source.write_text("\n".join([*lines, "}\n"]))
    subprocess.run(["gcc", "-std=gnu99", "-Werror", "-o", program, source], check=True)
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    return {name: int(value) for name, value in (line.split() for line in said)}


def test_what_0_1_says_means_the_same(tmp_path: Path) -> None:
    """Structures only grow at the end and numbers stay the same. The module knows the old size of a grown structure."""
    now, before = layout(NEW, tmp_path), layout(OLD, tmp_path)
    grown = {name for name in structures() if now[name] > before[name]}
    assert not [name for name in structures() if now[name] < before[name]]
    calls = dict(re.findall(r"#define (GGROUP_IOC_\w+)\s+_IO\w+\(GGROUP_IOC_MAGIC, \d+, struct (\w+)\)", text(OLD)))
    size = 0x3FFF << 16
    for name, value in before.items():
        if name in calls and now[name] != value:
            assert now[name] & ~size == value & ~size, name
            assert least(name.removeprefix("GGROUP_IOC_")) == (value & size) >> 16, name
        elif name not in grown:
            assert now[name] == value, name


def least(call: str) -> int:
    """The fewest bytes that the module accepts for an ioctl whose structure has grown."""
    row = rf"IOCTL\({call}, \w+, \w+, offsetof(end)?\(struct ggroup_(\w+), (\w+)\)\)"
    found = re.search(row, IOCTLS.read_text())
    assert found, f"{call}: ioctl.c is to say how long it was"
    field = getattr(getattr(abi, found[2].capitalize()), found[3])
    return int(field.offset + field.size if found[1] else field.offset)


def test_every_feature_has_its_words() -> None:
    """Each feature's bit has a description, and no two features share a bit."""
    bits = [value for name, value in vars(abi).items() if name.startswith("FEATURE_")]
    assert sorted(bits) == sorted(kernel.WITHOUT)
    assert len({name for name, _ in kernel.WITHOUT.values()}) == len(bits)


def test_the_page_has_a_row_for_every_feature_and_names_tests_that_there_are() -> None:
    page = (ROOT / "docs/upgrades.md").read_text()
    rows = re.findall(r"^- (\d) `(\w+)`, ", page.partition("## The kernel module")[2], re.MULTILINE)
    assert [(1 << int(bit), name) for bit, name in rows] == [(bit, name) for bit, (name, _) in kernel.WITHOUT.items()]
    there = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) >= 15
    assert named <= there, named - there


class Module:
    """The answers of a /dev/ggroup with these features and this version."""

    def __init__(self, features: int, version: int = abi.ABI_VERSION) -> None:
        self._features, self._version = features, version
        self._settings = 0 if features == FEATURES_OF_0_1 else sum(abi.SET.values())

    def __call__(self, descriptor: int, request: int, argument: abi.Hello) -> None:
        assert request == abi.IOC_HELLO
        argument.version, argument.features, argument.settings = self._version, self._features, self._settings


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    monkeypatch.setattr(kernel, "DEVICE", "/dev/null")
    found = mock.Mock(wraps=Module(ALL))
    monkeypatch.setattr(kernel, "_ask", found)
    return found


def test_a_module_that_is_as_we_are(module: mock.Mock) -> None:
    assert kernel.check() == "version 1, features books,provider,tenant,usermem,counters,bounds,peaks,reasons,next_use"


def test_a_module_of_0_1_serves_and_what_it_lacks_is_said(module: mock.Mock) -> None:
    module.side_effect = Module(FEATURES_OF_0_1)
    assert kernel.check() == (
        "version 1, features books,provider,tenant,usermem,counters; "
        "lacks bounds: a user can make as many groups as there is room for; "
        "lacks peaks: gmem.swap.peak is EOPNOTSUPP; after a restart gmem.peak begins at its last reset; "
        "lacks reasons: a turn takes all engines, and memory with them; "
        "after a restart no reason is known but a freeze; "
        "lacks next_use: reclaim takes from the largest first, however busy it is"
        + "".join(f"; lacks {one.field}: {one.control} is refused" for one in LATER)
    )
    found = choose._kernel_features(Choice())
    assert found is not None
    assert found.features == FEATURES_OF_0_1


def test_what_a_later_module_can_besides_means_nothing(module: mock.Mock) -> None:
    module.side_effect = Module(ALL | 1 << 63)
    assert kernel.check() == "version 1, features books,provider,tenant,usermem,counters,bounds,peaks,reasons,next_use"
    assert kernel.lacking(kernel.Module(ALL | 1 << 63)) == {}


def test_a_setting_that_a_module_does_not_keep(module: mock.Mock) -> None:
    """Setting it is refused and the mount reports it as lacking; setting it to its default counts as done."""
    who, asked = Member(Process(2, 3), 0), list[tuple[int, int]]()

    def answer(descriptor: int, request: int, argument: Any) -> None:
        if request == abi.IOC_HELLO:
            argument.version, argument.features = abi.ABI_VERSION, ALL
            argument.settings = sum(abi.SET.values()) - abi.SET["weight"]
        elif request == abi.IOC_SET:
            asked.append((argument.mask, argument.weight))
        else:
            assert request == abi.IOC_GET

    module.side_effect = answer
    assert kernel.check().endswith("next_use; lacks weight: compute.weight is refused")
    ledger = kernel.KernelLedger({})
    ledger._ids |= {who: 1}
    ledger.configure(who, high=5, weight=100)
    with pytest.raises(OSError, match="Operation not supported"):
        ledger.configure(who, high=6, weight=7)
    assert asked == [(abi.SET["high"], 0)]
    assert (ledger.books(who).weight, ledger.books(who).priority) == (100, 0)
    ledger.close()


def test_a_module_of_before_keeps_what_was_there_then() -> None:
    """Such a module does not say which settings it has, so they are taken to be the first ten."""
    kept = abi.settings_of(abi.Hello())
    assert sum(abi.SET[setting.field] for setting in kept) == 0x3FF


def test_a_module_without_what_is_needed_or_of_another_version_is_none(module: mock.Mock) -> None:
    module.side_effect = Module(ALL & ~abi.FEATURE_PROVIDER)
    assert choose._kernel_features(Choice()) is None
    with pytest.raises(OSError, match="lacks features"):
        choose._kernel_features(Choice(ledger="kmod"))
    module.side_effect = Module(ALL, abi.ABI_VERSION + 1)
    with pytest.raises(OSError, match="speaks version 2"):
        kernel.check()


@pytest.mark.logs(
    *(
        "is older than this daemon and lacks bounds: a user can make as many groups",
        "lacks peaks",
        "lacks reasons",
        "lacks next_use",
    ),
    *(f"lacks {setting.field}" for setting in LATER),
)
def test_a_mount_goes_on_with_what_it_has_and_says_so_once(module: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    module.side_effect = Module(FEATURES_OF_0_1)
    monkeypatch.setattr(kernel, "KernelLedger", mock.Mock())
    assert choose.backend(Choice(), [], 5.0).lacks == [
        *("bounds", "peaks", "reasons", "next_use"),
        *(setting.field for setting in LATER),
    ]


def test_the_reasons_where_the_module_keeps_none(module: mock.Mock) -> None:
    """The daemon keeps them in its own books, with the same errors. A reason for GR alone becomes one for all."""
    who, slice_ = Member(Process(2, 3), 0), SliceOn(Slice("/a"), 0)
    asked: list[tuple[int, int]] = []

    def answer(descriptor: int, request: int, argument: Any) -> None:
        if request == abi.IOC_HELLO:
            argument.version, argument.features = abi.ABI_VERSION, FEATURES_OF_0_1
        elif request == abi.IOC_DETACH_TSG:
            asked.append((request, argument.value))
        else:
            assert request == abi.IOC_GET, "nothing that 0.1 does not know"

    module.side_effect = answer
    ledger = kernel.KernelLedger({})
    ledger._ids |= {who: 1, slice_: 2}
    ledger.set_reasons(who, abi.REASON_FREEZE, abi.REASON_TURN)
    assert (ledger.books(who).off_all, ledger.books(who).off_gr) == (abi.REASON_FREEZE, abi.REASON_TURN)
    for group, off_all, off_gr in ((slice_, 1, 0), (who, 1, 1), (who, REASONS + 1, 0), (who, 0, -1)):
        with pytest.raises(OSError, match="Invalid argument"):
            ledger.set_reasons(group, off_all, off_gr)
    assert (ledger.books(who).off_all, ledger.books(who).off_gr) == (abi.REASON_FREEZE, abi.REASON_TURN)
    trio.run(ledger.pull, Op.DETACH_TSG, who, abi.ENGINES_GR, 1.0)
    assert asked == [(abi.IOC_DETACH_TSG, abi.ENGINES_ALL)]
    ledger.close()
