"""Keeps latencies between bounds by giving out shares of a GPU: Flyt (Kumar et al., ICPE 2026), sections 3.3 and 4.3.

``core.py`` decides, from samples and times alone. ``samples.py`` and ``reports.py`` supply the samples, ``levers.py``
applies the shares, ``moves.py`` moves a group that no share helps, ``settings.py`` reads the configuration, and
``program.py`` puts the parts together.
"""
