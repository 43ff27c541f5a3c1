# SPDX-License-Identifier: Apache-2.0
"""Writer of hook_faults.c's table of calls from entries.def: one call of each entry point, with empty arguments except
a stream that a test may give.

python3 faults.py ENTRIES_DEF > hook_faults.inc
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

GIVEN = {"CUstream": "stream_given", "const CUlaunchConfig *": "&config_given"}
"""Argument of a call for a parameter of that type."""


def main() -> None:
    text = re.sub(r"/\*.*?\*/", "", Path(sys.argv[1]).read_text(encoding="utf-8"), flags=re.S)
    rows = re.findall(r"ENTRY\((\w+),\s*(\w+),\s*\(([^)]*)\),\s*\(([^)]*)\),\s*(\d+)\)", text)
    streamed = set()
    print("static CUstream stream_given;\nstatic CUlaunchConfig config_given;\n")
    for name, _, parameters, _, _ in rows:
        values = []
        for parameter in " ".join(parameters.split()).split(",") if parameters != "void" else ():
            kind = re.sub(r"\w+(\[\])?$", "", parameter.strip()).strip()
            if kind in GIVEN:
                streamed.add(name)
            values.append(GIVEN.get(kind, "(void *)zeros" if kind.endswith("*") else f"({kind}){{ 0 }}"))
        print(f"static CUresult call_{name}(void)\n{{\n\treturn {name}({', '.join(values)});\n}}\n")
    print("static const struct { const char *name; CUresult (*call)(void); bool streamed; } calls[] = {")
    for name, *_ in rows:
        print(f'\t{{ "{name}", call_{name}, {str(name in streamed).lower()} }},')
    print("};")


if __name__ == "__main__":
    main()
