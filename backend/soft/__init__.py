"""The embedded backend: a ledger and a GPU in plain Python, the executable specification of the real ones."""
