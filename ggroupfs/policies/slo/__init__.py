"""Latencies between bounds, by shares of a GPU: the policy of Flyt (Kumar et al., ICPE 2026), sections 3.3 and 4.3.

``core.py`` decides, on samples and times alone. ``samples.py`` and ``reports.py`` are where samples come from,
``levers.py`` where shares go to, ``moves.py`` what becomes of a group that no share helps, ``settings.py`` what is
configured, and ``program.py`` puts them together.
"""
