"""`python -m tests.structure [TREE]`: the rooms of each folder, the arrows between them, and the circles.

A room of a folder is a module in it, or a folder in it with all below. An arrow goes from one room to another where a
file of the first uses a file of the second: in Python by an import, inside a function as well; in C by an #include, or
by a call of a function that the other file defines. A circle is a set of files, each of which reaches each other one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ggroupfs", "backend")
C_FOLDERS = ("kmod", "backend/cuda/library", "backend/cuda")
"""Folders of C sources; a tree has only one of the last two."""

Graph = Mapping[str, frozenset[str]]
"""Files by path in the tree, without suffix; each maps to the files that it uses."""

# Files are read as text, so definitions that macros generate are not seen.
DEFINED = re.compile(r"^(?!static|typedef|struct [^(]*\{)[A-Za-z_][\w \t*]*?[ \t*](\w+)\([^;{}]*\)\s*\{", re.M)
"""Definition of a function with external linkage, by its name: in the first column, as the kernel style has it."""
STATIC = re.compile(r"^static\b[^;{}()=]*?(\w+)\(", re.M)
"""Head of a static function."""
CALLED = re.compile(r"(?<![\w.>])(?<!struct )(?<!enum )(\w+)(?=\s*\()|(?<=[=,(&])\s*(\w+)(?=\s*[,;)}])")
"""Word before a parenthesis (a call), or a word that is passed on its own (a pointer to a function)."""
DRIVERS = re.compile(r"cu[A-Z]")
"""Prefix of the names of entry points of CUDA's driver."""
INCLUDED = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)
NOISE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\bTRACE_EVENT\(\w+', re.S)
"""Comments and strings of C, and the name of a tracepoint, which may be that of a function."""


def python_graph(tree: Path) -> Graph:
    """Return the modules of both packages, by path, each with the modules that it imports."""
    paths = [path for package in PACKAGES for path in sorted((tree / package).rglob("*.py"))]
    known = {dotted(path.relative_to(tree)): _key(path.relative_to(tree)) for path in paths}
    uses = {}
    for path in paths:
        own = _key(path.relative_to(tree))
        found = {known[name] for name in imports(path, known)}
        uses[own] = frozenset(found - {own})
    return uses


def c_graph(tree: Path, folder: str, includes: bool = True) -> Graph:
    """Return the C files below a folder, each with the files whose functions it calls and, with `includes`, the files
    that it includes. A source and its header count as one file."""
    texts: dict[str, str] = defaultdict(str)
    for path in sorted((tree / folder).rglob("*.[ch]")):
        texts[_key(path.relative_to(tree))] += path.read_text(encoding="utf-8") + "\n"
    headers = {PurePosixPath(key).name: key for key in texts}
    bare = {key: NOISE.sub(" ", text) for key, text in texts.items()}
    homes = {name: key for key, text in bare.items() for name in DEFINED.findall(text)}
    uses = {}
    for key, text in texts.items():
        names = INCLUDED.findall(text) if includes else ()
        included = {headers.get(PurePosixPath(name).stem, key) for name in names}
        own = set(STATIC.findall(bare[key]))
        called = {homes[word] for word in _called(bare[key]) & homes.keys() - own}
        uses[key] = frozenset((included | called) - {key})
    return uses


def arrows(graph: Graph, folder: str) -> set[tuple[str, str]]:
    """Return the arrows between the rooms of a folder."""
    found = set()
    for one, others in graph.items():
        for other in others:
            ends = _room(one, folder), _room(other, folder)
            if ends[0] and ends[1] and ends[0] != ends[1]:
                found.add((ends[0], ends[1]))
    return found


def rooms(graph: Graph, folder: str) -> set[str]:
    """Return the rooms of a folder: its modules and subfolders."""
    return {room for one in graph if (room := _room(one, folder))}


def folders(graph: Graph) -> list[str]:
    """Return every folder that contains a file of the graph, or another such folder."""
    return sorted({str(parent) for one in graph for parent in PurePosixPath(one).parents} - {"."})


def circles(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components of more than one file, largest first (Tarjan's algorithm)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(one: str) -> None:
        number[one] = low[one] = len(number)
        stack.append(one)
        for other in sorted(graph[one]):
            if other not in number:
                visit(other)
                low[one] = min(low[one], low[other])
            elif other in stack:
                low[one] = min(low[one], number[other])
        if low[one] == number[one]:
            at = stack.index(one)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for one in sorted(graph):
        if one not in number:
            visit(one)
    return sorted((circle for circle in found if len(circle) > 1), key=lambda circle: (-len(circle), circle))


def report(graph: Graph) -> Iterator[str]:
    """Yield the lines of a graph: folders, arrows between folders, circles."""
    for folder in folders(graph):
        yield f"{folder + '/':32} {len(rooms(graph, folder)):4} rooms {len(arrows(graph, folder)):5} arrows"
    between = {(_folder(one), _folder(other)) for one, others in graph.items() for other in others}
    yield f"arrows between folders: {sum(one != other for one, other in between)}"
    yield from listed("circles", graph)


def listed(title: str, graph: Graph) -> Iterator[str]:
    """Yield the lines of the circles of a graph."""
    knots = circles(graph)
    yield f"{title}: {len(knots)}"
    yield from (f"    of {len(knot)}: {' '.join(knot)}" for knot in knots)


def imports(path: Path, known: Iterable[str]) -> Iterator[str]:
    """Yield the modules that a module imports, at any level of nesting."""
    known = set(known)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else node.module for name in below if {name, node.module} & known)


def dotted(path: Path) -> str:
    """Return the dotted name of a module; for `__init__`, the name of the package."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _called(text: str) -> set[str]:
    """Return the words of a C file that may name a function: words before a parenthesis, or passed as a pointer.

    A word that looks like an entry point of CUDA and is passed to a macro is the driver's function, not a wrapper."""
    found = CALLED.findall(text)
    return {call for call, _ in found} | {pointer for _, pointer in found if not DRIVERS.match(pointer)}


def _key(path: Path) -> str:
    return path.with_suffix("").as_posix()


def _folder(key: str) -> str:
    return str(PurePosixPath(key).parent)


def _room(key: str, folder: str) -> str | None:
    """Return the room of a folder that holds a file; None for a file outside the folder, and for the folder's own
    `__init__`, which stands for the folder."""
    if not key.startswith(f"{folder}/"):
        return None
    room = key[len(folder) + 1 :].split("/")[0]
    return None if room == "__init__" else room


def main(words: list[str]) -> int:
    tree = Path(words[0]) if words else ROOT
    print("Python")
    print(*report(python_graph(tree)), sep="\n")
    sources = [folder for folder in C_FOLDERS if any((tree / folder).rglob("*.c"))]
    for folder in sources[:2]:
        print(f"\nC, {folder}")
        print(*report(c_graph(tree, folder)), *listed("circles by calls", c_graph(tree, folder, False)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
