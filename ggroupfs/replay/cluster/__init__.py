"""Cluster replay: a day of jobs on many nodes, placed by one policy or another, in virtual time."""
