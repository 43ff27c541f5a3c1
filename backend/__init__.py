"""The backend of ggroupfs: the books (Ledger), the hardware (Gpu), and the Controller where they meet.

The tree uses :class:`backend.core.controller.Controller` and no other object of this package. The program that mounts
the tree puts the parts together (choose.py). All of them use the same names, records and errors.
"""
