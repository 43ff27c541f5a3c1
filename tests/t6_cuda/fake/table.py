# SPDX-License-Identifier: Apache-2.0
"""Writer of the C file with cuGetProcAddress's table, from cuda.h and cudaTypedefs.h, and with missing entry points.

python3 table.py CUDA_INCLUDE ENTRIES_DEF OBJECT... > table.c

The table has what the objects define. The rules of versions come from NVIDIA's headers and not from entries.def, which
is under test. An entry point that entries.def names and no object defines becomes one that answers NOT_SUPPORTED.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

NAME = re.compile(r"(cu\w+?)(?:_v(\d))?(_pt[sd][sz])?$")


def declarations(include: str) -> dict[str, str]:
    """Return every entry point with its parameters, from cuda.h."""
    source = "#define __CUDA_API_VERSION_INTERNAL\n#include <cuda.h>\n"
    text = subprocess.run(
        ["gcc", "-E", "-P", f"-I{include}", "-"], input=source, text=True, check=True, capture_output=True
    ).stdout
    return {name: " ".join(params.split()) for name, params in re.findall(r"CUresult\s+(cu\w+)\s*\(([^;{]*)\);", text)}


def versions(include: str, names: list[str]) -> dict[str, int]:
    """Return the first cudaVersion of each entry point under its base name: the nth typedef is the nth variant."""
    typedefs: dict[tuple[str, str], set[int]] = defaultdict(set)
    text = (Path(include) / "cudaTypedefs.h").read_text(encoding="utf-8")
    for base, version, suffix in re.findall(r"\*PFN_(cu\w+?)_v(\d{4,5})((?:_pt[sd][sz])?)\)", text):
        typedefs[base, suffix].add(int(version))
    families: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
    for name in names:
        match = NAME.match(name)
        assert match
        families[match[1], match[3] or ""].append((int(match[2] or 1), name))
    since: dict[str, int] = {}
    for family, members in families.items():
        known = sorted(typedefs[family])
        assert len(known) == len(members), (family, members, known)
        since.update({name: version for (_, name), version in zip(sorted(members), known, strict=True)})
    return since


def defined(objects: list[str]) -> set[str]:
    """Return the entry points that the objects define."""
    text = subprocess.run(["nm", "--defined-only", *objects], text=True, check=True, capture_output=True).stdout
    return set(re.findall(r" T (cu[A-Z]\w+)$", text, re.M))


def main() -> None:
    include, entries, *objects = sys.argv[1:]
    declared = declarations(include)
    since = versions(include, list(declared))
    written = defined(objects)
    wanted = set(re.findall(r"^(?:ENTRY|OURS)\((\w+)", Path(entries).read_text(encoding="utf-8"), re.M))
    print('#include "entry.h"\n')
    for name in sorted(wanted - written - {"cuGetProcAddress", "cuGetProcAddress_v2"}):
        print(f"FAKE_EXPORT {name}({declared[name]})\n{{\n\tFAKE({name});\n\treturn CUDA_ERROR_NOT_SUPPORTED;\n}}\n")
    print("const struct fake_entry fake_entries[] = {")
    for name in sorted(wanted | written | {"cuGetProcAddress", "cuGetProcAddress_v2"}):
        match = NAME.match(name)
        assert match
        print(f'\t{{ "{match[1]}", {since[name]}, {"true" if match[3] else "false"}, (void *){name} }},')
    print("\t{ NULL, 0, false, NULL },\n};")


if __name__ == "__main__":
    main()
