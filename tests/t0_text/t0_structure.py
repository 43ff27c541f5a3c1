"""The structure of the folders: which imports which, how many files cross the top one, and no circles."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import structure
from tests.conftest import LONGEST
from tests.structure import ROOT

ARROWS_MOST = 40
"""The most arrows between the folders in ggroupfs/. There were 138 while all of its modules lay in one folder."""
CIRCLE_MOST = 3
"""The most files in a circle, of Python modules that import each other or C files that call each other."""
TEST = re.compile(r"t\d_\w+\.py")
"""The name of a module of tests."""
IN_WORDS = re.compile(r"\b(?:from|import) (tests(?:\.\w+)+)")
"""An import of a module of the tests, also in a string: the text of a program that a test starts."""
ELSEWHERE = {"asyncio.py"}
"""Files that docs/architecture.md names and that are not of this repository: asyncio.py is pyfuse3's."""


@pytest.fixture(scope="module")
def python() -> structure.Graph:
    return structure.python_graph(ROOT)


def test_the_view_knows_nothing_of_the_filesystem(python: structure.Graph) -> None:
    used = {(one, other) for one in python if one.startswith("ggroupfs/view/") for other in python[one]}
    assert used
    assert not [pair for pair in used if pair[1].startswith(("ggroupfs/fs", "ggroupfs/daemon", "ggroupfs/commands"))]


def test_the_longest_files_of_tests_are_there() -> None:
    names = {path.stem for path in (ROOT / "tests").rglob("t[0-9]_*.py")}
    assert set(LONGEST) <= names


def test_the_top_folder_has_few_arrows(python: structure.Graph) -> None:
    assert 0 < len(structure.arrows(python, "ggroupfs")) <= ARROWS_MOST


def test_no_circle_is_long(python: structure.Graph) -> None:
    assert not [circle for circle in structure.circles(python) if len(circle) > CIRCLE_MOST]


@pytest.mark.parametrize("folder", ["kmod", "backend/cuda/library"])
def test_no_circle_of_calls_is_long(folder: str) -> None:
    graph = structure.c_graph(ROOT, folder, includes=False)
    assert len(graph) > 20
    assert not [circle for circle in structure.circles(graph) if len(circle) > CIRCLE_MOST]


def test_each_folder_says_what_it_is(python: structure.Graph) -> None:
    table = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for folder in structure.folders(python):
        assert (ROOT / folder / "__init__.py").read_text(encoding="utf-8").startswith('"""'), folder
        if folder.count("/") == 1:
            assert f"| `{folder}/` |" in table, folder


def test_every_path_of_the_architecture_is_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w./-])(?:[\w.-]+/)*[\w-]+\.(?:py|mk|def)\b", text))
    named |= set(re.findall(r"`((?:[\w.-]+/)+)`", text))
    assert len(named) > 50
    places = [ROOT, ROOT / "ggroupfs", ROOT / "backend"]
    known = {path.name for place in (*places[1:], ROOT / "tests", ROOT / "kmod") for path in place.rglob("*.*")}
    absent = {
        name
        for name in named - ELSEWHERE
        if not any((place / name).exists() for place in places) and ("/" in name or name not in known)
    }
    assert not absent


def test_no_test_imports_another() -> None:
    """Code that tests share is in tests/support, or in the folder of their level."""
    paths = [path for folder in ("tests", "docs", *structure.PACKAGES) for path in (ROOT / folder).rglob("*.py")]
    tests = {structure.dotted(path.relative_to(ROOT)) for path in paths if TEST.fullmatch(path.name)}
    assert len(tests) > 150
    assert not {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in paths
        for name in {*structure.imports(path, tests), *IN_WORDS.findall(path.read_text(encoding="utf-8"))} & tests
    }


# The tests of tests.structure itself, on small trees


def test_imports_wherever_they_stand(tmp_path: Path) -> None:
    (tmp_path / "backend" / "deep").mkdir(parents=True)
    for name, text in {
        "__init__": "",
        "one": "from backend import two\n",
        "two": "def later():\n    from backend.deep.three import thing\n",
        "deep/__init__": "",
        "deep/three": "import backend.one\nimport os\n",
        "deep/four": "from backend.deep import three\n",
    }.items():
        (tmp_path / "backend" / f"{name}.py").write_text(text, encoding="utf-8")
    graph = structure.python_graph(tmp_path)
    assert graph["backend/one"] == {"backend/two"}
    assert graph["backend/two"] == {"backend/deep/three"}
    assert structure.rooms(graph, "backend") == {"one", "two", "deep"}
    assert structure.arrows(graph, "backend") == {("one", "two"), ("two", "deep"), ("deep", "one")}
    assert structure.arrows(graph, "backend/deep") == {("four", "three")}
    assert structure.circles(graph) == [["backend/deep/three", "backend/one", "backend/two"]]


def test_calls_and_headers_of_c(tmp_path: Path) -> None:
    (tmp_path / "kmod").mkdir()
    for name, text in {
        "a.c": '#include "a.h"\nint a_first(int x)\n{\n\treturn b_second(x);\n}\n',
        "a.h": "int a_first(int x);\n",
        "b.c": "static int own(void)\n{\n\treturn 0;\n}\n\nint b_second(int x)\n{\n\treturn c_hook(own, c_third);\n}\n",
        "c.c": "/* a_first( */\nint c_third(void)\n{\n\treturn 0;\n}\n\nint c_hook(int x)\n{\n\treturn 1;\n}\n",
        "d.c": '#include "a.h"\nint own(void)\n{\n\tputs("b_second(1)");\n\treturn 0;\n}\n',
    }.items():
        (tmp_path / "kmod" / name).write_text(text, encoding="utf-8")
    graph = structure.c_graph(tmp_path, "kmod")
    assert graph == {"kmod/a": {"kmod/b"}, "kmod/b": {"kmod/c"}, "kmod/c": frozenset(), "kmod/d": {"kmod/a"}}
    assert structure.c_graph(tmp_path, "kmod", includes=False)["kmod/d"] == frozenset()
    assert structure.circles(graph) == []
    (tmp_path / "kmod" / "c.c").write_text("void c_third(void)\n{\n\ta_first(1);\n}\n", encoding="utf-8")
    assert structure.circles(structure.c_graph(tmp_path, "kmod")) == [["kmod/a", "kmod/b", "kmod/c"]]


def test_a_report_of_this_tree(capsys: pytest.CaptureFixture[str]) -> None:
    assert structure.main([]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^ggroupfs/ +\d+ rooms +\d+ arrows$", said, re.M)
    assert "C, kmod" in said
    assert "circles by calls" in said
