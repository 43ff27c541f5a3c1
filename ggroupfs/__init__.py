"""The filesystem of ggroupfs: one tree of control files over :class:`backend.core.controller.Controller`.

From the kernel inwards: `fs.operations` (thin, async) -> `fs.tree` (what there is) -> `fs.controls` (the one table of
control files) -> `text.values` (text to number and back). `daemon` is the life of one mount, `cli` the command.
`view` reads a mounted tree from outside, for `commands`; docs/architecture.md has a table of all folders.
"""

VERSION = "0.1.0"
"""Version of what is installed, as pyproject.toml has it: an installed tree has no metadata."""
