"""benchmarks/README.md, its plots, and the README's part: what a record says, and no more."""
