"""The papers' own pairs, on real programs (`python -m tests.bench.papers`): README.md beside this says how.

programs/  the programs, whole: torch and transformers are all that they need, and no network
lab.py     those programs on this machine's GPU; sharing.py: ways to share it between two; site.py: trees of many
pairs.py, salus.py, flyt.py, scale.py   what is measured, as cells
cells.py   a cell, a plan, what is merged; requests.py, digest.py, clocks.py: what is told of one
page.py    tables and plots
"""
