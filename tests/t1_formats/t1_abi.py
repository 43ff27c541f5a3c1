"""backend/ledgers/abi.py agrees with the header of the kernel module on every structure, field and number."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from backend.core.settings import BY_FIELD, REASONS
from backend.door import wire
from backend.ledgers import abi

HEADER = Path(__file__).parents[2] / "kmod/uapi/ggroup.h"
SCALARS = {"__u32": ctypes.c_uint32, "__s32": ctypes.c_int32, "__u64": ctypes.c_uint64}

Layout = dict[str, tuple[int, int]]
"""``struct`` or ``struct.field``, with its offset and size."""


def uncommented() -> str:
    """The header without its comments."""
    return re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)


def structures() -> dict[str, dict[str, str]]:
    """The structures of the header by name, each with the C type of its fields."""
    found = re.findall(r"^struct (\w+) \{(.*?)^\};", uncommented(), re.DOTALL | re.MULTILINE)
    return {
        name: {field: kind for kind, field in re.findall(r"(\w+) (\w+)(?:\[\w+\])?;", body)} for name, body in found
    }


def macros() -> list[str]:
    """The names of all numbers that the header defines."""
    return re.findall(r"^#define (GGROUP_\w+)[ \t]", uncommented(), re.MULTILINE)


def mirrored() -> dict[str, type[ctypes.Structure]]:
    """The structures of abi.py, by their names in the header."""
    classes = [value for value in vars(abi).values() if isinstance(value, type) and issubclass(value, ctypes.Structure)]
    return {f"ggroup_{one.__name__.lower()}": one for one in classes}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Layout, dict[str, int]]:
    """What the C compiler makes of the header: the layout of the structures, and the values of the numbers."""
    lines = ["#include <stddef.h>", "#include <stdio.h>", f'#include "{HEADER}"', "int main(void) {"]
    for name, fields in structures().items():
        lines.append(f'printf("{name} 0 %zu\\n", sizeof(struct {name}));')
        for field in fields:
            place = f"offsetof(struct {name}, {field}), sizeof(((struct {name} *)0)->{field})"
            lines.append(f'printf("{name}.{field} %zu %zu\\n", {place});')
    lines += [f'printf("{name} %llu\\n", (unsigned long long)({name}));' for name in macros()]
    folder = tmp_path_factory.mktemp("abi")
    source, program = folder / "abi.c", folder / "abi"
    source.write_text("\n".join([*lines, "}\n"]))
    subprocess.run(["gcc", "-std=gnu99", "-Werror", "-o", program, source], check=True)
    layout: Layout = {}
    numbers: dict[str, int] = {}
    for line in subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines():
        name, *values = line.split()
        if len(values) == 2:
            layout[name] = int(values[0]), int(values[1])
        else:
            numbers[name] = int(values[0])
    return layout, numbers


def test_every_size_and_offset(compiled: tuple[Layout, dict[str, int]]) -> None:
    ours: Layout = {}
    for name, structure in mirrored().items():
        ours[name] = 0, ctypes.sizeof(structure)
        for field, *_ in structure._fields_:
            place = getattr(structure, field)
            ours[f"{name}.{field}"] = place.offset, place.size
    assert ours == compiled[0]


def test_every_sign() -> None:
    """A scalar field has the same width and sign in Python. (Arrays are compared by their size, above.)"""
    for name, fields in structures().items():
        for field, kind, *_ in mirrored()[name]._fields_:
            if not hasattr(kind, "_length_"):
                assert kind is SCALARS[fields[field]], f"{name}.{field}"


def test_every_number(compiled: tuple[Layout, dict[str, int]]) -> None:
    numbers = {
        name: value
        for name, value in vars(abi).items()
        if name[0].isupper() and name.isupper() and isinstance(value, int)
    }
    numbers |= {f"SET_{BY_FIELD[field].constant}": bit for field, bit in abi.SET.items()}
    ours = {f"GGROUP_{name}": int(value) for name, value in numbers.items()}
    assert ours == compiled[1]


def test_the_reasons_are_those_of_the_books() -> None:
    bits = [value for name, value in vars(abi).items() if name.startswith("REASON_")]
    assert sum(bits) == REASONS
    assert len(bits) == REASONS.bit_count()


def test_no_hole() -> None:
    """All padding has a name, so that the module can check that it is zero, and give it a meaning later."""
    for name, structure in mirrored().items():
        assert ctypes.sizeof(structure) == sum(getattr(structure, field).size for field, *_ in structure._fields_), name


def test_the_message_is_the_one_on_every_wire() -> None:
    raw = wire.Message(abi.OP_RECLAIM, seq=7, gpu=3, args=(1, 2, 3, 4, 5), status=-12, reply=True, flags=9).encode()
    assert ctypes.sizeof(abi.Message) == wire.SIZE
    message = abi.Message.from_buffer_copy(raw)
    assert (message.op, message.status, message.seq) == (abi.OP_RECLAIM | abi.MESSAGE_REPLY, -12, 7)
    assert (message.gpu, message.flags, list(message.args)) == (3, 9, [1, 2, 3, 4, 5])


@pytest.mark.parametrize("standard", ["c99", "gnu99", "gnu11"])
def test_the_header_stands_alone(tmp_path: Path, standard: str) -> None:
    source = tmp_path / "alone.c"
    source.write_text(f'#include "{HEADER}"\nint ggroup_alone;\n')
    words = ["gcc", f"-std={standard}", "-Wall", "-Wextra", "-pedantic", "-Werror", "-c", "-o", tmp_path / "alone.o"]
    subprocess.run([*words, source], check=True)
