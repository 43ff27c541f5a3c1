"""The journal: what must outlive a killed daemon, in a file of its own.

It holds the books, where the kernel does not keep them, the levers, and the owners that files were given.

    state.py       the content, and the operations on it        pure
    format.py      the content as text, and back                pure
    first.py       the part that 0.1 reads, and how the rest goes past it    pure
    file.py        the file: locked, appended to, compacted
    ledger.py      a SoftLedger that writes down what changes
    levers.py      a Gpu that writes down what is about to move, and what holds
    moves.py       programs on the way from one GPU to another
    totals.py      what was done in each group, ever
    attributes.py  owners and modes of files

A journal is of one boot: pids, channels and contexts do not outlive the machine, so there is nothing that a later one
could go on with.
"""
