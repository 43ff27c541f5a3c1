"""Level 1: records, the kernel module's ABI, messages of sockets, and the fuzzers of what is parsed."""
