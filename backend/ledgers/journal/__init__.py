"""What must outlive a daemon that is killed, in a file of its own: the books, where the kernel does not keep them, the
levers, and the users that files were given to.

    state.py       what is known, and what can happen to it     pure
    format.py      that as text, and back                        pure
    first.py       what 0.1 reads of that, and how it goes past the rest    pure
    file.py        the file: locked, appended to, compacted
    ledger.py      a SoftLedger that writes down what changes
    levers.py      a Gpu that writes down what is about to move, and what holds
    moves.py       programs on the way from one GPU to another
    totals.py      what was done in each group, ever
    attributes.py  owners and modes of files

A journal is of one boot: pids, channels and contexts do not outlive the machine, so there is nothing that a later one
could go on with.
"""
