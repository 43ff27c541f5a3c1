"""Spaces: programs of a slice that share a GPU at the same time, and the MPS server that runs them side by side."""
