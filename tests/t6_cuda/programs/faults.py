# SPDX-License-Identifier: Apache-2.0
"""Writes hook_faults.c's table of calls from entries.def: one of each entry point, with nothing in its arguments.

python3 faults.py ENTRIES_DEF > hook_faults.inc
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def main() -> None:
    text = re.sub(r"/\*.*?\*/", "", Path(sys.argv[1]).read_text(encoding="utf-8"), flags=re.S)
    rows = re.findall(r"ENTRY\((\w+),\s*(\w+),\s*\(([^)]*)\),\s*\(([^)]*)\),\s*(\d+)\)", text)
    for name, _, parameters, _, _ in rows:
        values = []
        for parameter in " ".join(parameters.split()).split(",") if parameters != "void" else ():
            kind = re.sub(r"\w+(\[\])?$", "", parameter.strip()).strip()
            values.append("(void *)zeros" if kind.endswith("*") else f"({kind}){{ 0 }}")
        print(f"static CUresult call_{name}(void)\n{{\n\treturn {name}({', '.join(values)});\n}}\n")
    print("static const struct { const char *name; CUresult (*call)(void); } calls[] = {")
    for name, *_ in rows:
        print(f'\t{{ "{name}", call_{name} }},')
    print("};")


if __name__ == "__main__":
    main()
