"""The backend of ggroupfs: the books (Ledger), the hardware (Gpu) and the Controller where they meet.

The filesystem talks to :class:`backend.controller.Controller` and to nothing else in here.
"""
