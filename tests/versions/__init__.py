"""Tests across versions: two revisions run against each other (run.py), and recordings of 0.1 (v0_1)."""
