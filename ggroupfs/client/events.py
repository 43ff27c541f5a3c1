"""What a policy tells whoever started it: a JSON object a line on standard output."""

from __future__ import annotations

import json


def emit(event: str, **fields: object) -> None:
    """One line, at once: ``{"event": EVENT, ...}``. Times are in what the name of the field says, sizes in bytes."""
    print(json.dumps({"event": event, **fields}), flush=True)
