"""The backend of ggroupfs: the books (Ledger), the hardware (Gpu) and the Controller where they meet.

The tree talks to :class:`backend.core.controller.Controller` and to no other object in here. What mounts it puts
the parts together (choose.py), and all use the same names, records and errors.
"""
