"""What ``ggroupfs doctor`` has to say."""

from __future__ import annotations

import attrs

BAD = frozenset(("missing", "failed"))
"""Verdicts that make its exit code 1."""


@attrs.frozen
class Finding:
    """One thing that was looked at, or done."""

    subject: str
    """What."""
    verdict: str
    """``ok``, ``missing``, or a capability: ``enforced``, ``advisory``, ``unsupported``; ``thawed`` or ``failed``."""
    why: str
    """In words."""
