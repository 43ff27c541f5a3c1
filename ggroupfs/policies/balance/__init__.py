"""Spreads programs over the GPUs of a machine with compute.migrate; docs/policies/balance.md says what for.

``core.py`` decides when to move, from pictures and latencies alone. ``picture.py`` models the GPUs and predicts the
effect of a move, ``choice.py`` picks the move, and ``history.py`` decides which groups may be moved again, and when.
``demand.py`` and ``eyes.py`` make pictures from the control files, ``mover.py`` makes the moves, ``settings.py`` reads
the configuration, and ``program.py`` puts the parts together. The policy slo moves groups with the same core, eyes and
mover.
"""
