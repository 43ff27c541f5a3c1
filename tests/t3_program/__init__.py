"""Level 3: the whole program in one process and in virtual time, without a kernel's mount."""
