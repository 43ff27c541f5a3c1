"""Pages: their links, what files and tests they name, and the shape of those that have one; the width of all files."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.support import tree
from tests.support.page import DOCS, POLICIES, section

ROOT = DOCS.parent
WIDTH = 120
"""Most columns of a line, with a tab stop at every 8."""
KERNEL_WIDTH = 100
"""The same in kmod/, but for its page: the kernel's own."""
OF_ANY_WIDTH = {
    "*.svg": "pictures, which a program draws",
    "benchmarks/record.json": "what was measured: `make bench-keep`",
    "ggroupfs/dra/interfaces/*_pb2.py*": "what protoc makes: `make interfaces`",
    "packaging/monitoring/dashboard.json": "what ggroupfs.monitoring makes: `make dashboard`",
    "tests/corpus/*": "bytes on which a fuzzer found something",
    "tests/versions/v0_1/*": "what a daemon of 0.1 wrote",
}
"""Files that no one writes by hand, and what they are."""
ARCHITECTURE_LINES = 200
PAGES = sorted(
    [
        ROOT / "README.md",
        *DOCS.rglob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
        ROOT / "kmod" / "README.md",
        ROOT / "systemd" / "README.md",
        ROOT / "backend" / "cuda" / "library" / "README.md",
    ]
)
BLOCK = re.compile(r"^```.*?^```[^\n]*$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
REFERENCE = re.compile(r"^\[[^\]]+\]: (\S+)$", re.MULTILINE)
TOP = "ggroupfs|backend|kmod|tests|docs|systemd|packaging|completions|benchmarks"
IN_FULL = re.compile(rf"(?<![\w./~$-])(?:{TOP})/[\w.?*/-]*[\w*/]")
"""Path from the top."""
SOURCE = re.compile(r"(?<![\w./~$<-])(?:[\w-]+/)+[\w.-]+\.(?:py|c|h|cu|def|mk|md|json|svg)\b")
"""Path of a source, from the top or from one of PLACES."""
PLACES = [
    ROOT,
    ROOT / "ggroupfs",
    ROOT / "backend",
    ROOT / "backend/cuda",
    ROOT / "backend/cuda/library",
    ROOT / "tests",
]
TEST_FILE = re.compile(r"(?<![\w/])t\d_\w+\.py\b")
NAMED_TEST = re.compile(r"\btest_\w+")
ELSEWHERE = {
    "build/bench.json",
    "mm/memcontrol.c",
    "mm/page_counter.c",
    "docs/config.md",
    "docs/general-technical-review.md",
    "include/linux/cgroup_dmem.h",
    "kernel/cgroup/dmem.c",
    "kernel-open/nvidia/os-interface.c",
    "src/plugins/gres/shard/gres_shard.c",
}
"""What is not in the tree: what a command makes, files of the kernel and of the projects in comparison.md and
notes/dmem.md."""
KERNEL_TESTS = {"test_memcg_low"}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def slugs(text: str) -> set[str]:
    """The anchors of a page, as GitHub makes them of headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).strip().replace(" ", "-")
        number, unique = 0, slug
        while unique in found:
            number += 1
            unique = f"{slug}-{number}"
        found.add(unique)
    return found


def is_there(name: str, page: Path) -> bool:
    """Whether a file or folder that a page names is in the tree; a pattern has to fit some."""
    for place in (*PLACES, page.parent):
        if "*" in name or "?" in name:
            if next(place.glob(name), None) is not None:
                return True
        elif (place / name).exists():
            return True
    return False


def known_tests() -> set[str]:
    return {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }


def too_long(path: Path) -> list[str]:
    """The lines of a file that have too many columns, as file:line; none of a file that is no text."""
    data = path.read_bytes()
    if b"\0" in data:
        return []
    name = name_of(path)
    width = KERNEL_WIDTH if name.startswith("kmod/") and path.suffix != ".md" else WIDTH
    lines = data.decode(errors="replace").split("\n")
    return [f"{name}:{number}" for number, line in enumerate(lines, 1) if len(line.expandtabs(8)) > width]


def test_no_line_that_someone_wrote_is_too_long() -> None:
    """Of any file, but for those that are made by programs; each of these exceptions is needed."""
    written, needed = [], set()
    paths = tree.files()
    assert len(paths) > 500
    for path in paths:
        patterns = [pattern for pattern in OF_ANY_WIDTH if fnmatch(name_of(path), pattern)]
        found = too_long(path)
        if not patterns:
            written += found
        elif found:
            needed.update(patterns)
    assert not written
    assert needed == set(OF_ANY_WIDTH)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    """To a file of the tree, and to a heading of it where it names one."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    broken = []
    for target in (*LINK.findall(text), *REFERENCE.findall(text)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name) if name else page
        if not other.exists() or (anchor and anchor not in slugs(other.read_text(encoding="utf-8"))):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_that_is_named_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    words = LINK.sub("", text)
    named = {*IN_FULL.findall(words), *SOURCE.findall(words)} - ELSEWHERE
    assert not {name for name in named if not is_there(name, page)}
    known = {path.name for path in (ROOT / "tests").rglob("t[0-9]_*.py")}
    assert not {name for name in TEST_FILE.findall(words) if name not in known}


def test_every_test_that_is_named_is_there() -> None:
    there = known_tests()
    named = {name for page in PAGES for name in NAMED_TEST.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 200
    assert named <= there | KERNEL_TESTS, named - there


def test_pages_that_there_were_are_named_nowhere() -> None:
    """Not in code and not in pages."""
    gone = re.compile(r"docs/(?:design|policies|benchmarks)\.(?:md|json)|(?<![\w/-])(?:design|policies)\.md")
    folders = ("ggroupfs", "backend", "kmod", "tests", "systemd", "packaging", "completions", "docs")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    assert len(paths) > 500
    readable = {".py", ".c", ".h", ".cu", ".def", ".md", ".mk", ".sh", ".toml", ".service", ".in", ".5", ".8"}
    here = Path(__file__)
    assert not [
        name_of(path)
        for path in (*paths, ROOT / "README.md", ROOT / "Makefile")
        if (path.suffix in readable or not path.suffix)
        and path != here
        and "__pycache__" not in path.parts
        and gone.search(path.read_text(encoding="utf-8", errors="replace"))
    ]


# Pages of a shape


def test_the_architecture_is_short() -> None:
    assert len((DOCS / "architecture.md").read_text(encoding="utf-8").splitlines()) <= ARCHITECTURE_LINES


def test_every_decision_is_numbered_listed_and_has_its_parts() -> None:
    decisions = sorted((DOCS / "decisions").glob("0*.md"))
    assert [path.name[:4] for path in decisions] == [f"{number:04}" for number in range(1, len(decisions) + 1)]
    index = (DOCS / "decisions" / "README.md").read_text(encoding="utf-8")
    for path in decisions:
        title, *_ = path.read_text(encoding="utf-8").splitlines()
        assert title.startswith(f"# {path.name[:4]}. ")
        assert f"]({path.name}) {title.partition('. ')[2]}\n" in index
        for part in ("Context", "Decision", "Consequences"):
            assert section(part, path).strip(), f"{path.name}: {part}"


@pytest.mark.parametrize("name", ["lanes", "dynamic", "cooperative", "slo", "balance"])
def test_every_policy_has_a_page_that_says_when_and_how(name: str) -> None:
    from ggroupfs.commands.policy import PROGRAMS

    assert name in PROGRAMS
    assert len(PROGRAMS) == 5
    page = POLICIES / f"{name}.md"
    titles = re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    wanted = ["Use it when", "How to run it", "What you will see", "Ready for production?"]
    assert [title for title in titles if title in wanted] == wanted
    assert f"ggroupfs policy {name}" in page.read_text(encoding="utf-8")
    assert f"]({name}.md)" in (POLICIES / "README.md").read_text(encoding="utf-8")


def test_every_fault_names_its_tests() -> None:
    faults = re.split(r"^- (?=\S)", section("Faults", DOCS / "nvidia.md"), flags=re.MULTILINE)[1:]
    assert len(faults) >= 16
    for fault in faults:
        tests = fault.partition("\n  - tests: ")[2]
        assert NAMED_TEST.search(tests), fault
        assert "\n  - users see: " in fault, fault
        assert "\n  - the daemon: " in fault, fault
