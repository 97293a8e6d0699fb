from __future__ import annotations

import math
import re
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.grpc.timeout import format_timeout, parse_timeout
from tests.support.scale import scaled

LAW = settings(max_examples=scaled(300))
UNITS = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 10**3),
    "S": Fraction(1),
    "M": Fraction(60),
    "H": Fraction(3600),
}


def exact(value: str) -> Fraction:
    return int(value[:-1]) * UNITS[value[-1]]


@pytest.mark.parametrize(
    "value",
    [
        *("", "1", "S", "1s", "1h", "100000000n", "000000001S", "-1S", "+1S", "1.5S", " 1S", "1 S"),
        *("1S ", "1S\n", "1SS", "1m1S", "0x1S", "١S", "²S", "1_0S", "tomorrow"),
    ],
)
def test_timeout_of_another_form_is_refused_and_quoted(value: str) -> None:
    with pytest.raises(GatewayError) as caught:
        parse_timeout(value)
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    assert caught.value.message.startswith("grpc-timeout must be 1 to 8 digits and one of H, M, ")
    assert value in caught.value.message or "\\n" in caught.value.message


@pytest.mark.parametrize(
    ("seconds", "value"),
    [
        (0.0, "1n"),
        (1, "1000000u"),
        (100.0, "100000m"),
        (100000.0, "100000S"),
        (1e8 - 0.5, "99999999S"),
        (1e8, "1666666M"),
        (6e9, "1666666H"),
        (math.inf, "99999999H"),
    ],
)
def test_timeout_is_written_in_the_smallest_unit_that_fits(seconds: float, value: str) -> None:
    assert format_timeout(seconds) == value


@LAW
@given(
    st.one_of(
        st.floats(1e-9, 1e12),
        st.floats(1e-9, 100),
        st.integers(1, 10**9).map(lambda value: value / 1000),
    )
)
@example(0.29)
@example(0.1)
def test_timeout_is_never_longer_than_what_is_left_and_nearly_as_long(seconds: float) -> None:
    value = format_timeout(seconds)
    assert re.fullmatch(r"[0-9]{1,8}[HMSmun]", value)
    left = min(Fraction(seconds), 99999999 * UNITS["H"])
    assert left - UNITS[value[-1]] < exact(value) <= left
    assert parse_timeout(value) <= seconds
    if seconds < 27 * 3600:
        assert UNITS[value[-1]] <= UNITS["m"]


@LAW
@given(st.integers(0, 10**8 - 1), st.sampled_from(sorted(UNITS)))
def test_seconds_are_the_nearest_to_the_timeout(number: int, unit: str) -> None:
    assert parse_timeout(f"{number}{unit}") == float(number * UNITS[unit])
