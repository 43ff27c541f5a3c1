"""Schedulers of GPU time: turn priorities and weights into timeslices and places on the runlist.

``shares.py`` sorts the processes of a GPU into *layers* and computes the share of each. The first layer holds the
processes of the best priority: they share the engine by timeslices (``fair.py``). The processes of the other layers
are *fillers*: they get the time that the first layer leaves, in turns (``filler.py``). ``core.py`` puts the two
together. All of these are pure; ``scheduler.py`` acts on a GPU, and ``ends.py`` ends turns on it. Quotas
(``compute.max``) are kept by ``limiter.py``.
"""
