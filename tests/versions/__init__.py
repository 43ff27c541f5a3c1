"""Tests across versions: two revisions run against each other (run.py), and recordings of what 0.1 sent and wrote
(v0_1)."""
