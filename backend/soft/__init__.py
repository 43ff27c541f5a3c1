"""A GPU in software, in plain Python: with `backend.ledgers.soft`, the executable specification of the real ones."""
