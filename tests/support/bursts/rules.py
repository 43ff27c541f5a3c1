"""The rules of busy periods and of run-ahead (hold.h, pace.h), compiled and called from Python."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from ctypes import POINTER, c_bool, c_int64, c_uint, c_uint64, c_void_p
from pathlib import Path

ROOT = Path(__file__).parents[3]


class Allowance(ctypes.Structure):
    """The library's struct allowance."""

    _fields_ = (("at", c_uint64), ("held", c_uint64), ("open_until", c_uint64))


class Pace(ctypes.Structure):
    """The library's struct pace."""

    _fields_ = (
        ("finished", c_uint64),
        ("since", c_uint64),
        ("kernel_ns", c_uint64),
        ("gap_us", c_uint64),
        ("vain", c_uint),
    )


def compiled(directory: Path) -> ctypes.CDLL:
    """Compile the rules and the model engine into a directory, and load them."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler, "no C compiler"
    out = directory / "rules.so"
    include = ROOT / "backend" / "cuda" / "library" / "driver"
    words = [compiler, "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{include}"]
    sources = [str(Path(__file__).with_name(name)) for name in ("rules.c", "engine.c")]
    subprocess.run([*words, *sources, "-o", str(out)], check=True)
    library = ctypes.CDLL(str(out))
    library.rules_word.restype = library.rules_left.restype = library.rules_may.restype = c_uint64
    library.rules_word.argtypes = (c_uint64, c_bool, c_uint64)
    library.rules_left.argtypes = library.rules_due.argtypes = (c_uint64, c_uint64)
    library.rules_due.restype = c_bool
    library.rules_may.argtypes = (POINTER(Allowance), c_uint64, c_bool)
    library.rules_ahead_us.restype = c_uint64
    library.rules_ahead_us.argtypes = (c_uint64, c_uint64, c_uint64)
    library.rules_learn.restype = None
    library.rules_learn.argtypes = (POINTER(Pace), c_uint64, c_bool, c_bool, c_bool, c_uint64)
    library.rules_mark_every.restype = c_uint64
    library.rules_mark_every.argtypes = (POINTER(Pace), c_uint64)
    library.rules_has_more.restype = c_bool
    library.rules_has_more.argtypes = library.rules_more_us.argtypes = (POINTER(Pace), c_uint64, c_uint64, c_uint64)
    library.rules_more_us.restype = c_uint64
    library.model_new.restype = c_void_p
    library.model_free.restype = library.model_lead.restype = None
    library.model_fill.restype = library.model_run.restype = None
    library.model_lead.argtypes = (c_void_p, POINTER(c_int64), c_int64, c_int64, c_int64, POINTER(c_int64))
    library.model_fill.argtypes = (c_void_p, c_int64, c_uint64, c_int64, c_bool)
    library.model_run.argtypes = (c_void_p, c_int64)
    for name in ("now", "idle", "served", "filled", "stays", "periods"):
        getattr(library, f"model_{name}").argtypes = (c_void_p,)
        getattr(library, f"model_{name}").restype = c_int64
    library.model_free.argtypes = (c_void_p,)
    library.model_call.restype = library.model_switch.restype = c_int64
    return library
