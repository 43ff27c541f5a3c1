"""The filesystem of ggroupfs: one tree of control files over :class:`backend.core.controller.Controller`.

From the kernel inwards: `fs.operations` (thin, async) -> `fs.tree` (directories and files) -> `fs.controls` (the one
table of control files) -> `text.values` (text to number and back). `daemon` runs one mount, `cli` is the command.
`view` reads a mounted tree from outside, for `commands`; docs/architecture.md has a table of all folders.
"""

VERSION = "0.1.0"
"""Installed version, the same as in pyproject.toml: an installed tree has no metadata."""
