"""What is done where levers of a process fail: it is tried again later, and said where it matters."""

from __future__ import annotations

import errno

PASSING = frozenset((errno.EAGAIN, errno.EBUSY, errno.ENOMEM, errno.ETIMEDOUT))
"""Errors that are not worth a word before the second time. A driver in which two dozen programs begin at once does not
answer in the time for one lever."""
AGAIN_S, AGAIN_MOST_S = 5.0, 60.0
"""Seconds after which a lever that failed is tried again; each time twice as long, up to the second."""
