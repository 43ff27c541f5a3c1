"""benchmarks/README.md, its plots, and the README's part: the contents of a record, and no more."""
