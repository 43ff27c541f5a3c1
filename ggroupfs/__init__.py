"""The filesystem of ggroupfs: one tree of control files over :class:`backend.controller.Controller`.

From the kernel inwards: `operations` (thin, async) -> `tree` (what there is) -> `controls` (the one table of control
files) -> `values` (text to number and back). `mount` is the life of one mount, `cli` the command.
"""
