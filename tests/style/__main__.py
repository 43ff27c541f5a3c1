"""`python -m tests.style`: check changed files and commits; `--exempt` lets the files as they are now stand.

A file may stand as it is while its content is in exempt.sha256: so a file is held to the rules from its next change
on, wherever it is moved to, and a merge needs no list of names.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

from tests.style import prose, rules
from tests.support import tree
from tests.support.tree import ROOT

EXEMPT = Path(__file__).with_name("exempt.sha256")
SINCE = Path(__file__).with_name("since")
"""The commit after which subjects are held to the rule."""


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout


def files() -> list[Path]:
    """The files of the tree that hold prose."""
    return [path for path in tree.files() if path.suffix in prose.READERS]


def digest(path: Path) -> str:
    """The sha256 of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def faults(path: Path) -> list[str]:
    """The places of a file that break a rule, as `file:line: what`."""
    found = [fault for text in prose.texts(path) for fault in rules.prose(text)]
    return [f"{path.relative_to(ROOT)}:{line}: {what}" for line, what in sorted(found)]


def subjects() -> list[str]:
    """The commits after SINCE whose subject breaks a rule; none where the history is not at hand."""
    since = SINCE.read_text(encoding="ascii").strip()
    if not (ROOT / ".git").exists():
        return []
    known = subprocess.run(["git", "-C", str(ROOT), "cat-file", "-e", since], capture_output=True).returncode == 0
    if not known:
        return []
    found = []
    for line in _git("log", "--no-merges", "--format=%h%x09%s", f"{since}..HEAD").split("\n"):
        commit, _, words = line.partition("\t")
        if commit and (what := rules.subject(words)):
            found.append(f"{commit}: {what}: {words}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.style", description="Hold changed files to docs/style.md.")
    parser.add_argument("--exempt", action="store_true", help="let every file that breaks a rule now stand as it is")
    if parser.parse_args().exempt:
        standing = sorted({digest(path) for path in files() if faults(path)})
        EXEMPT.write_text("".join(f"{line}\n" for line in standing), encoding="ascii")
        return 0
    exempt = set(EXEMPT.read_text(encoding="ascii").split())
    wrong = [fault for path in files() if digest(path) not in exempt for fault in faults(path)] + subjects()
    for line in wrong:
        print(line)
    if wrong:
        print(f"{len(wrong)} places that docs/style.md would have otherwise", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
