"""Quantities in the notation of Kubernetes: ``20Gi``, ``500M``, ``1.5e9``."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal

NUMBER = r"(?P<number>[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})"
QUANTITY = re.compile(rf"\+?{NUMBER}(?:(?P<suffix>[KMGTPE]i|[numkMGTPE])|[eE](?P<exponent>[+-]?[0-9]{{1,2}}))?")
"""A non-negative quantity in the syntax of k8s.io/apimachinery/pkg/api/resource."""

FACTORS = {
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
    **{letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", 1)},
    **{letter: Decimal(1000) ** -power for power, letter in enumerate("mun", 1)},
}
"""Factor of each suffix."""


def whole(text: str) -> int:
    """Parse a quantity, rounded up to a whole number. ValueError if it is invalid."""
    match = QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError("not a quantity of Kubernetes, such as 20Gi or 500M")
    number = Decimal(match["number"]) * FACTORS.get(match["suffix"], Decimal(1))
    if match["exponent"]:
        number *= Decimal(10) ** int(match["exponent"])
    if number >= 1 << 63:
        raise ValueError("too large")
    return int(number.to_integral_value(ROUND_CEILING))


def text(number: int) -> str:
    """Format a number of bytes in the largest unit of which it is a whole multiple."""
    for suffix in ("Ti", "Gi", "Mi", "Ki"):
        if number and number % int(FACTORS[suffix]) == 0:
            return f"{number // int(FACTORS[suffix])}{suffix}"
    return str(number)
