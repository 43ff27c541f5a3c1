"""The view from outside: what reads a mounted tree, and how that is shown. It imports nothing of fs."""
