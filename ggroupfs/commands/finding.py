"""The findings that ``ggroupfs doctor`` reports."""

from __future__ import annotations

import attrs

BAD = frozenset(("missing", "failed"))
"""Verdicts that make the exit code of the doctor 1."""


@attrs.frozen
class Finding:
    """The result of one check or repair."""

    subject: str
    """Subject of the finding."""
    verdict: str
    """``ok``, ``missing``, or a capability: ``enforced``, ``advisory``, ``unsupported``; ``thawed`` or ``failed``."""
    why: str
    """Reason, in words."""
