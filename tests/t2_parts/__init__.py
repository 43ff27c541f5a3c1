"""Level 2: parts by themselves: the ledgers, the software GPU, the scheduler, the NVIDIA code on a fake driver."""
