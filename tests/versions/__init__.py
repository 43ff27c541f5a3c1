"""Versions that meet: the real ones of two revisions (run.py), and what 0.1 said and wrote, recorded (v0_1)."""
