"""The ledgers: the books in memory, in the kernel module, and in the journal of a daemon."""
