"""Priorities and weights become timeslices and places on the runlist.

``shares.py`` says who is to have what, ``core.py`` how that is brought about: both are pure.
"""
