"""Level 2: parts on their own: the ledgers, the software GPU, the scheduler, the NVIDIA code on a fake driver."""
