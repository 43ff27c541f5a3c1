"""The socket of a tree: its messages, the process at the other end, and what a program needs before it connects."""
