"""When a failed lever is pulled again, and when its failure is logged."""

from __future__ import annotations

import errno

PASSING = frozenset((errno.EAGAIN, errno.EBUSY, errno.ENOMEM, errno.ETIMEDOUT))
"""Errors that are logged only if they persist. While two dozen programs start at once, the driver does not answer
within the time that one lever has.
"""
AGAIN_S, AGAIN_MOST_S = 5.0, 60.0
"""Seconds until a failed lever is pulled again: the first delay, which doubles with each failure, and its maximum."""
