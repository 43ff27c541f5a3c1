"""Level 1: formats of records, of the kernel module's ABI and of messages on sockets, and fuzzers for the parsers."""
