"""Level 0: values as systemd spells them, and what they are in the control files."""

from __future__ import annotations

import pytest

from backend.core.settings import BY_CONTROL, PERIOD
from ggroupfs.fs.controls import CONTROLS
from ggroupfs.text.properties import BY_NAME, PROPERTIES, text_of

GPU = 80 << 30


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("GMemHigh", "8G", str(8 << 30)),
        ("GMemHigh", " 1.5M ", str(3 << 19)),
        ("GMemHigh", "512", "512"),
        ("GMemHigh", "512B", "512"),
        ("GMemHigh", "infinity", "max"),
        ("GMemHigh", "", "max"),
        ("GMemHigh", "25%", str(20 << 30)),
        ("GMemHigh", "12.5%", str(10 << 30)),
        ("GMemLow", "1T", str(1 << 40)),
        ("GMemLow", "", "0"),
        ("GMemSwapMax", "0", "0"),
        ("ComputeTimeSlice", "2", "2000us"),
        ("ComputeTimeSlice", "2ms", "2000us"),
        ("ComputeTimeSlice", "1ms 500us", "1500us"),
        ("ComputeTimeSlice", "500usec", "500us"),
        ("ComputeTimeSlice", "0.5", "500us"),
        ("ComputePriority", "15", "15"),
        ("ComputeWeight", "10000", "10000"),
        ("ComputeQuota", "30%", "30000 100000"),
        ("ComputeQuota", "12.5%", "12500 100000"),
        ("ComputeQuota", "150%", "150000 100000"),
        ("ComputeQuota", "30% 1s", "300000 1000000"),
        ("ComputeQuota", "10%  50ms", "5000 50000"),
        ("ComputeQuota", "infinity", "max 100000"),
        ("ComputeQuota", "", "max 100000"),
        ("ComputeFreeze", "Yes", "1"),
        ("ComputeFreeze", "off", "0"),
        ("gmem.limit.high", "8G", "8G"),
    ],
)
def test_values(name: str, value: str, text: str) -> None:
    control, written = text_of(name, value, GPU)
    assert (control, written) == (BY_NAME[name].control if name in BY_NAME else name, text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GMemHigh", "8Q"),
        ("GMemHigh", "-1"),
        ("GMemHigh", "101%"),
        ("GMemHigh", "max"),
        ("GMemHigh", "999999999T"),
        ("ComputeTimeSlice", "2 hours"),
        ("ComputeTimeSlice", "0"),
        ("ComputeTimeSlice", "ms"),
        ("ComputePriority", "16"),
        ("ComputePriority", "-1"),
        ("ComputePriority", "¼"),
        ("ComputeWeight", "0"),
        ("ComputeFreeze", "maybe"),
        ("ComputeQuota", "30"),
        ("ComputeQuota", "0%"),
        ("ComputeQuota", "0.99%"),
        ("ComputeQuota", "30% 2s"),
        ("ComputeQuota", "30% 9ms"),
        ("ComputeQuota", "30% soon"),
        ("ComputeQuota", "max"),
        ("ComputeQuota", "infinity 1s"),
    ],
)
def test_what_makes_no_sense(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        text_of(name, value, GPU)


def test_each_is_a_control_that_takes_its_default() -> None:
    controls = {control.name: control for control in CONTROLS}
    for one in PROPERTIES:
        parse = controls[one.control].parse
        assert parse is not None
        default = BY_CONTROL[one.control].default
        assert parse(one.default) == ((default, PERIOD.default) if one.control == "compute.max" else default)
