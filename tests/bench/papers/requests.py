"""Requests to an LLM server, and what came of them: times to first tokens and between tokens, and SLOs. Pure.

The SLO is that of Ghost (section 6.4) and GVM (section 7.4): "vLLM's P99 latency when running alone". They do not say
of which latency. Here a request attains it where its time to the first token is no longer than the P99 of those alone,
and the mean of its times between tokens no longer than the P99 of such means alone: the exclusive server has 98 to 99 %
then.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from tests.bench.core.arrivals import arrivals
from tests.bench.core.spread import percentile

PROMPT, OUTPUT = (16, 1024), (8, 128)
"""Tokens, from least to most."""
PROMPT_MEDIAN, OUTPUT_MEDIAN, WIDTH = 128, 40, 0.9
"""Of log-normal lengths, and the deviation of their logarithm: as BurstGPT's, a few are far longer than most."""
ON_S, OFF_S = 4.0, 4.0
"""Seconds of requests, and of none, of arrivals that come and go."""
KINDS = ("gamma", "onoff")
ENOUGH = 100
"""Values of which a P99 is told: of fewer it would be the greatest."""


@attrs.frozen
class Request:
    """What is asked of the server."""

    at: float
    """Seconds from the begin of the round."""
    prompt: int
    """Tokens of it."""
    output: int
    """Tokens of the answer."""


def _length(chance: random.Random, median: float, bounds: tuple[int, int]) -> int:
    least, most = bounds
    return max(least, min(most, round(chance.lognormvariate(0, WIDTH) * median)))


def times(kind: str, rate: float, seconds: float, seed: int) -> list[float]:
    """Arrivals of a round: `rate` a second in the mean of it, for both kinds. ValueError for another kind.

    With gaps of the gamma distribution (shape core.arrivals.SHAPE) all the time; or Poisson for ON_S and none for
    OFF_S, by turns.
    """
    if kind == "gamma":
        return arrivals(rate, seconds, seed)
    if kind != "onoff":
        raise ValueError(f"arrivals are {' or '.join(KINDS)}, and not {kind}")
    period = ON_S + OFF_S
    whole, rest = divmod(seconds, period)
    busy = whole * ON_S + min(rest, ON_S)
    found = arrivals(rate * seconds / busy, busy, seed, shape=1.0)
    return [one // ON_S * period + one % ON_S for one in found]


def planned(kind: str, rate: float, seconds: float, seed: int, scale: float = 1.0) -> list[Request]:
    """The requests of a round, the same for a seed; lengths are `scale` times as long."""
    chance = random.Random(seed ^ 0x5EED)
    found = []
    for at in times(kind, rate, seconds, seed):
        prompt, output = _length(chance, PROMPT_MEDIAN, PROMPT), _length(chance, OUTPUT_MEDIAN, OUTPUT)
        found.append(Request(round(at, 6), max(1, round(prompt * scale)), max(2, round(output * scale))))
    return found


@attrs.frozen
class Answer:
    """What came of a request."""

    ttft_ms: float | None
    """From its arrival to its first token; None where there was none in time."""
    itl_ms: Sequence[float]
    """Between each two of its tokens."""

    @property
    def itl_mean_ms(self) -> float:
        """The mean of them; 0 where there is one token."""
        return sum(self.itl_ms) / len(self.itl_ms) if self.itl_ms else 0.0


def answers(found: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """What llm.py wrote, in its order."""
    made = []
    for one in found:
        first = None if one["ttft_s"] is None else round(1e3 * one["ttft_s"], 3)
        made.append(Answer(first, [round(1e3 * gap, 3) for gap in one["itl_s"]]))
    return made


@attrs.frozen
class Slo:
    """What a request is to keep."""

    ttft_ms: float
    itl_ms: float
    """Of the mean of its times between tokens."""

    def attained(self, answer: Answer) -> bool:
        """Whether a request kept it."""
        return answer.ttft_ms is not None and answer.ttft_ms <= self.ttft_ms and answer.itl_mean_ms <= self.itl_ms


def slo_of(alone: Sequence[Answer]) -> Slo:
    """The P99 of a server alone. ValueError where it answered nothing."""
    there = [one for one in alone if one.ttft_ms is not None]
    ttft = percentile([one.ttft_ms for one in there if one.ttft_ms is not None], 0.99)
    return Slo(ttft, percentile([one.itl_mean_ms for one in there], 0.99))


def figures(found: Sequence[Answer], waited_ms: float, slo: Slo | None = None) -> dict[str, float]:
    """Median and P99 of both times, by their names in core.figures. ValueError for no request.

    A request without a token counts as one that waited for `waited_ms`, which makes its percentiles lower bounds: it is
    told as `given_up`. P99s of fewer than ENOUGH values are left out.
    """
    if not found:
        raise ValueError("no request was served")
    first = [waited_ms if one.ttft_ms is None else one.ttft_ms for one in found]
    gaps = [gap for one in found for gap in one.itl_ms]
    told = {
        "ttft_p50_ms": percentile(first, 0.5),
        "requests": float(len(found)),
        "given_up": float(sum(one.ttft_ms is None for one in found)),
    }
    if len(first) >= ENOUGH:
        told["ttft_p99_ms"] = percentile(first, 0.99)
    if gaps:
        told["itl_p50_ms"] = percentile(gaps, 0.5)
    if len(gaps) >= ENOUGH:
        told["itl_p99_ms"] = percentile(gaps, 0.99)
    if slo is not None:
        told["attained"] = sum(slo.attained(one) for one in found) / len(found)
    return told
