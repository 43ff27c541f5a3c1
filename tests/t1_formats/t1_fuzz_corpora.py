"""Each fuzzing corpus is replayed by a fuzzer, and each fuzzer has a corpus."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.support import fuzzed


def test_every_corpus_has_a_fuzzer_and_every_fuzzer_a_corpus() -> None:
    here = Path(__file__).parents[1]
    for module in here.rglob("t[0-9]_fuzz_*.py"):
        importlib.import_module(".".join(("tests", *module.relative_to(here).with_suffix("").parts)))
    assert sorted(set(fuzzed.NAMES)) == sorted(path.name for path in fuzzed.CORPUS.iterdir())
    assert all(any(path.iterdir()) for path in fuzzed.CORPUS.iterdir())
