"""Programs are spread over the GPUs of a machine, by compute.migrate: docs/policies/balance.md has what for.

``core.py`` decides when, on pictures and latencies alone; ``picture.py`` is what a picture is and what to expect of a
move, ``choice.py`` which move it is, and ``history.py`` who may be moved again, and when. ``demand.py`` and
``eyes.py`` make pictures of what the files say, ``mover.py`` makes the moves, ``settings.py`` is what is configured,
and ``program.py`` puts them together. The policy slo moves groups by the same core, eyes and mover.
"""
