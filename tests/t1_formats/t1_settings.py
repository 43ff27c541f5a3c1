"""The settings are the same rows in Python and in the kernel module, and generated files are up to date."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import attrs
import pytest

from backend.core.records import Books, Wanted
from backend.core.settings import BY_FIELD, LEVERS, SETTINGS, Kind, Lever, Setting
from backend.ledgers import abi
from docs import tables
from ggroupfs.fs.controls import CONTROLS

KMOD = Path(__file__).parents[2] / "kmod"


def rows(folder: Path) -> dict[str, dict[str, str]]:
    """What the C compiler makes of each row of settings.def, by field, including the row of a setting's lever."""
    source, program = folder / "rows.c", folder / "rows"
    source.write_text(f"""
#include <stddef.h>
#include <stdio.h>
#include "{KMOD}/uapi/ggroup.h"
typedef __u64 u64;
typedef __u32 u32;
#define GGROUP_SETTING(field, type, bit, least, most, initial, kinds) \\
    printf("%s type=%s bit=%llu least=%llu most=%llu default=%llu kinds=%s size=%zu\\n", #field, #type, \\
           (unsigned long long)GGROUP_SET_##bit, (unsigned long long)(least), (unsigned long long)(most), \\
           (unsigned long long)(initial), #kinds, sizeof(((struct ggroup_set *)0)->field));
#define GGROUP_LEVER(name, bit, field) \\
    printf("%s lever=%s op=%d set=%llu number=%d holds=%zu\\n", #field, #name, GGROUP_OP_SET_##bit, \\
           (unsigned long long)GGROUP_SET_##bit, (int)(GGROUP_IOC_SET_##bit & 0xff), \\
           offsetof(struct ggroup_books, lever_##field));
int main(void)
{{
#include "{KMOD}/settings.def"
}}
""")
    subprocess.run(["gcc", "-std=gnu99", "-Wall", "-Werror", "-o", program, source], check=True)
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    found: dict[str, dict[str, str]] = {}
    for field, *words in (line.split() for line in said.splitlines()):
        found.setdefault(field, {}).update(word.split("=") for word in words)
    return found


def test_the_module_has_the_same_rows(tmp_path: Path) -> None:
    """Every column agrees but the owners, which are no numbers in C."""

    def row(setting: Setting) -> dict[str, str]:
        wide = getattr(abi.Set, setting.field).size == 8
        return {
            "type": "u64" if wide else "u32",
            "bit": str(1 << SETTINGS.index(setting)),
            "least": str(setting.least),
            "most": str(setting.most),
            "default": str(setting.default),
            "kinds": "SLICE" if setting.slices_only else "ANY",
            "size": "8" if wide else "4",
        } | lever(setting)

    def lever(setting: Setting) -> dict[str, str]:
        if not isinstance(setting, Lever):
            return {}
        return {
            "lever": setting.constant.lower(),
            "op": str(int(abi.OPS[setting])),
            "set": str(abi.SET[setting.field]),
            "number": str(getattr(abi, f"IOC_SET_{setting.constant}") & 0xFF),
            "holds": str(getattr(abi.Books, f"lever_{setting.field}").offset),
        }

    expected = {setting.field: row(setting) for setting in SETTINGS if setting.kind is not Kind.OWNER}
    found = rows(tmp_path)
    assert found == expected
    assert list(found) == list(expected)


def test_what_holds_for_a_process_has_each_lever() -> None:
    fields = {field.name: field.default for field in attrs.fields(Wanted)}
    levers = fields.keys() - {"off", "drains", "spent"}
    assert {lever.field: 0 for lever in LEVERS} == {name: fields[name] for name in levers}
    assert {lever.default for lever in LEVERS} == {0}


def test_the_books_of_a_new_group_have_each_at_its_default() -> None:
    fields = {field.name: field.default for field in attrs.fields(Books)}
    assert {setting.field: setting.default for setting in SETTINGS} == {
        name: value for name, value in fields.items() if name in BY_FIELD
    }


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.field)
def test_a_row_makes_sense(setting: Setting) -> None:
    assert setting.default in setting.allowed or setting.kind is Kind.OWNER
    is_beside = setting.in_file_of is not None
    assert (setting.control is None) == (setting.kind is Kind.OWNER or setting.field == "kept" or is_beside)
    assert not is_beside or BY_FIELD[str(setting.in_file_of)].kind is Kind.QUOTA
    assert setting.control is None or setting.summary
    assert setting.control is not None or setting.unit_key is None
    assert set(setting.needs) <= {other.control for other in SETTINGS}
    assert re.fullmatch("[a-z_]+", setting.field)


def test_each_has_its_control_file() -> None:
    files = {control.name for control in CONTROLS if control.mode == 0o644 and control.lever}
    assert {setting.control for setting in SETTINGS if setting.control is not None} == files


@pytest.mark.parametrize("place", tables.PLACES, ids=lambda place: f"{place.path.name}-{place.name}")
def test_what_is_made_of_them_is_up_to_date(place: tables.Place) -> None:
    """`make tables` generates these parts anew."""
    assert place.found() == place.wanted()


def test_a_place_that_is_not_marked_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    with pytest.raises(ValueError, match="has no settings"):
        tables.Place(page, "settings", lambda: []).found()
