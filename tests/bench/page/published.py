"""Published figures of MIG, GVM and Ghost. None was measured here, and their programs and GPUs differ.

The papers give most of their results only in plots; these are the numbers in their text.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class Published:
    """One statement of a paper."""

    system: str
    what: str
    """Measured quantity."""
    value: str
    """Value as the paper has it."""
    source: str
    """Paper and section."""


GHOST, GVM = "Ghost, section", "GVM, section"

FIGURES = (
    Published(
        "GVM",
        "vLLM beside a diffusion model under memory pressure, A100-40G: median and P99 TTFT and ITL",
        "within 15 % of those alone",
        f"{GVM} 7.3.1",
    ),
    Published("Ghost (AC)", "the same: P99 ITL", "within 3 % of that alone", f"{GHOST} 6.3.1"),
    Published(
        "MIG",
        "the same with memory enough, A100-80G, half of the GPU each: median and P99 TTFT, median and P99 ITL",
        "up to 480, 184, 2.75 and 2.0 times those of Ghost",
        f"{GHOST} 6.3.2",
    ),
    Published(
        "MIG",
        "the same: median and P99 TTFT, median and P99 ITL",
        "up to 480, 183, 2.75 and 2.28 times those of GVM",
        f"{GVM} 7.3.2",
    ),
    Published("Ghost (FT)", "the same: batch throughput, of MIG's", "0.88 and 0.88", f"{GHOST} 6.3.2"),
    Published("GVM", "the same: batch throughput, of MIG's", "0.867 and 0.883", f"{GVM} 7.3.2"),
    Published(
        "Ghost",
        "SLO attainment, with as much batch throughput as the best other system",
        "1.0; no other above 0.8, none with more than 0.35 of the throughput",
        f"{GHOST} 6.4, figure 14",
    ),
    Published("Ghost (AC)", "SLO attainment, at 0.48 of the batch throughput alone", "above 0.93", f"{GHOST} 6.4"),
    Published("GVM (DYN)", "SLO attainment", "above 0.9", f"{GVM} 7.4, figure 15"),
    Published(
        "GVM, Ghost",
        "diffusion with 40 % of its memory on the GPU",
        "half of its throughput",
        f"{GVM} 7.5, {GHOST} 6.5",
    ),
    Published("the driver's unified memory", "the same", "less than a 15th", f"{GVM} 7.5"),
)
