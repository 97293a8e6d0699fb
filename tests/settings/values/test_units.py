import math
from collections.abc import Callable

import pytest

from gateway.settings.values.units import (
    Bounded,
    format_percent,
    parse_count,
    parse_duration,
    parse_percent,
    parse_size,
)

Parse = Callable[[object], float]

VALID: dict[Parse, dict[object, float]] = {
    parse_count: {64: 64, "64": 64},
    parse_size: {
        0: 0,
        4096: 4096,
        "7B": 7,
        "64 MiB": 64 * 1024**2,
        "4GiB": 4 * 1024**3,
        "5kB": 5_000,
        "10MB": 10_000_000,
    },
    parse_duration: {
        5: 5.0,
        0.25: 0.25,
        "1.5": 1.5,
        "500ms": 0.5,
        "5 s": 5.0,
        "2m": 120.0,
        "1.5h": 5400.0,
    },
    parse_percent: {
        "0%": 0.0,
        "7 %": 7.0,
        "100%": 100.0,
        0: 0.0,
        1: 1.0,
        12.5: 12.5,
        "50": 50.0,
        "0.5%": 0.5,
    },
}
"""What is written, and what it means."""
INVALID: dict[Parse, tuple[str, list[object]]] = {
    parse_count: (
        "a whole number",
        ["", "ten", "1.0", "-1", "1 000", "٣", "9" * 5000, 1.0, True, None, []],
    ),
    parse_size: (
        "a size such as 64MiB",
        [
            *("", " ", "lots", "MiB", "-1MiB", "1.5MiB", "64mib", "64M", "64MiB ", "1_000", "٣"),
            *("1\n", "9" * 19, "9" * 5000, True, None, 1.0, [1], {"a": 1}),
        ],
    ),
    parse_duration: (
        "a duration such as 30s",
        [
            *("", "soon", "s", "-1s", "1h30m", "5S", "1d", "12:30", ".inf", "nan", "1e3", ".5"),
            *("5.", "٣s", "9" * 5000, True, None, [], {}),
        ],
    ),
    parse_percent: (
        "a percentage such as 50%",
        [
            *("", "%", "half", "-1%", ".5%", "1e1%", "٣%", "0.5", 0.5, 0.999, -1, True, None, []),
            math.nan,
        ],
    ),
}


@pytest.mark.parametrize("parse", VALID)
def test_values_are_read_as_operators_write_them(parse: Parse) -> None:
    for written, value in VALID[parse].items():
        parsed = parse(written)
        assert (parsed, type(parsed)) == (value, type(value))
        if parse is parse_percent:
            assert parse_percent(format_percent(parsed)) == parsed


@pytest.mark.parametrize("parse", INVALID)
def test_an_invalid_value_is_an_error_with_an_example(parse: Parse) -> None:
    expected, values = INVALID[parse]
    for written in values:
        with pytest.raises(ValueError, match=f"^expected {expected}, got "):
            parse(written)


def test_bounds_are_inclusive_and_named_in_the_error() -> None:
    within = Bounded(parse_duration, "1ms", "1h")
    assert [within("1ms"), within(3600)] == [0.001, 3600.0]
    for written in (0, -5, "2h", math.nan, math.inf):
        with pytest.raises(ValueError, match=r"^expected 1ms to 1h, got "):
            within(written)
