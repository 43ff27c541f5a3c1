"""Level 0: tests of values and tables in memory, and of manual pages, completions and folders against the code.

Nothing is mounted and no daemon runs.
"""
