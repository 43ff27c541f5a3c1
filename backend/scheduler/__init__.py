"""Schedulers of GPU time: turn priorities and weights into timeslices and places on the runlist.

``shares.py`` computes the share that each process is due. ``core.py`` decides how to bring it about, with ``fair.py``
for the processes that share the engine and ``filler.py`` for those that fill the time left over. All of these are
pure; ``scheduler.py`` acts on a GPU.
"""
