"""A provider and a program that were built with the header of 0.1 (versions.c), with the module of today."""

from __future__ import annotations

from tests.t5_module.harness import run_program


def test_what_0_1_says_holds_with_this_module() -> None:
    assert run_program("versions") == {"features": 1}
