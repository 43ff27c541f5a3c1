"""The measured comparison (`python -m tests.bench`), and the benchmarks of the files (`files.py`) beside it.

core/    what a measurement is: arrivals, records, spread, changes since the last record; pure
gpu/     systems that share a GPU, the scenarios that compare them, and their CUDA programs
host/    scenarios that need no GPU
papers/  the papers' own pairs, with real programs, cell by cell (`python -m tests.bench.papers`)
page/    benchmarks/README.md and its plots, from a record
"""
