"""Text to number and back: what each parser accepts and refuses, and with which errno."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.records import MAX
from ggroupfs.text import values


@pytest.mark.parametrize(
    ("word", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("8G", 8 << 30),
        ("8g", 8 << 30),
        ("512M", 512 << 20),
        ("3k", 3 << 10),
        ("2T", 2 << 40),
        ("0x10", 16),
        ("010", 8),
        ("+7", 7),
        ("-0", 0),
        ("max", MAX),
        (str(MAX), MAX),
        (str(2**64 - 1), MAX),
    ],
)
def test_size(word: str, nbytes: int) -> None:
    assert values.size(word) == nbytes


@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("", errno.EINVAL),
        ("MAX", errno.EINVAL),
        ("8GB", errno.EINVAL),
        ("8 G", errno.EINVAL),
        ("1.5G", errno.EINVAL),
        ("1e9", errno.EINVAL),
        ("08", errno.EINVAL),
        ("0x", errno.EINVAL),
        ("-", errno.EINVAL),
        ("1\n2", errno.EINVAL),
        ("-1", errno.ERANGE),
        (str(2**64), errno.ERANGE),
        ("16777216T", errno.ERANGE),
    ],
)
def test_size_refuses(word: str, code: int) -> None:
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the errno is what matters
        values.size(word)
    assert caught.value.errno == code


@given(st.integers(0, MAX))
def test_what_is_shown_can_be_written_back(nbytes: int) -> None:
    assert values.size(values.show_size(nbytes)) == nbytes


@given(st.integers(1, 2**40))
def test_a_timeslice_reads_as_it_was_written(us: int) -> None:
    assert values.span(values.show_ms(us)) == us
    assert values.span(f"{us}us") == us


@pytest.mark.parametrize(
    ("word", "us"),
    [("2.048", 2048), ("0.5", 500), (".5", 500), ("10", 10000), ("500us", 500), ("2 ms", 2000), ("default", 0)],
)
def test_timeslice(word: str, us: int) -> None:
    assert values.span(word) == us


@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("", errno.EINVAL),
        ("1s", errno.EINVAL),
        ("-1", errno.EINVAL),
        ("ms", errno.EINVAL),
        ("0", errno.ERANGE),
        ("0.0001", errno.ERANGE),
        ("1" * 30, errno.ERANGE),
    ],
)
def test_timeslice_refuses(word: str, code: int) -> None:
    with pytest.raises(OSError) as caught:  # noqa: PT011
        values.span(word)
    assert caught.value.errno == code


def test_text_ends_at_a_nul_and_loses_the_blanks_around() -> None:
    assert values.text(b" \t8G\n") == "8G"
    assert values.text(b"1\0garbage") == "1"
    assert values.text(b"\xa05\xa0") == "5", "a no-break space is a blank to the kernel"
    with pytest.raises(OSError, match="Invalid argument"):
        values.size(values.text(b"\xff"))


def test_flat_keyed_leaves_out_what_is_not_known() -> None:
    assert values.flat_keyed({"a": 1, "b": None, "c": "x"}) == "a 1\nc x\n"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("max", (MAX, None)),
        ("max 50000", (MAX, 50_000)),
        ("30000", (30_000, None)),
        ("30000 100000", (30_000, 100_000)),
        ("1000\t10000", (1000, 10_000)),
        ("2000000 1000000", (2_000_000, 1_000_000)),
        (str(MAX), (MAX, None)),
    ],
)
def test_a_quota(word: str, expected: tuple[int, int | None]) -> None:
    assert values.quota(word) == expected


@pytest.mark.parametrize(
    "word",
    [
        *("", "0", "999", "-1", "max max", "30000 max", "30000 9999", "30000 1000001", "1000 0", "30%", "0x7530"),
        *("30000us", "30000 100000 1", "default", f"{MAX + 1}", "9" * 30, "٣٠٠٠٠"),
    ],
)
def test_what_is_no_quota_is_einval_as_in_cpu_max(word: str) -> None:
    with pytest.raises(OSError) as refused:  # noqa: PT011 - the errno is what matters
        values.quota(word)
    assert refused.value.errno == errno.EINVAL
