"""The papers' own pairs, on real programs (`python -m tests.bench.papers`): README.md beside this says how.

programs/   the programs, whole: torch and transformers are all that they need, and no network
lab.py      those programs on this machine's GPU; sharing.py: ways to share it between two; site.py: trees of many
apps.py     applications that come and go; bands.py: gangs
pairs.py, salus.py, flyt.py, actions.py, scale.py, gangs.py   what is measured, as cells
cells.py    a cell, a plan; bounds.py: its time, and what it leaves; prepare.py: what it needs of a machine
requests.py, digest.py, clocks.py   what is told of a cell; merging.py: a record of cells
page.py     tables and plots of a record; headlines.py: what papers say first; kept.py: what is committed
"""
