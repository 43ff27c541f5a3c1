"""Priorities and weights become timeslices and places on the runlist.

``shares.py`` says who is to have what, ``core.py`` how that is brought about, with ``fair.py`` for those who share and
``filler.py`` for those who fill what is left: all of it pure. ``scheduler.py`` acts on a GPU.
"""
