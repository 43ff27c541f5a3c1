"""The events that a policy reports to the program that started it: one JSON object per line on standard output."""

from __future__ import annotations

import json


def emit(event: str, **fields: object) -> None:
    """Write one line at once: ``{"event": EVENT, ...}``. Field names give the unit of times; sizes are in bytes."""
    print(json.dumps({"event": event, **fields}), flush=True)
