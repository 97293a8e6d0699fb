"""Reads and writes ``grpc-timeout``: "Timeout" of PROTOCOL-HTTP2.md, section "Requests"."""

from __future__ import annotations

import re
from typing import Final

from gateway.errors import bad_request
from gateway.protocol.json_errors import quote_value

# A unit is so many seconds, or a second is so many units: one of both is 1, so both stay exact.
_UNITS: Final = {
    "n": (1, 10**9),
    "u": (1, 10**6),
    "m": (1, 10**3),
    "S": (1, 1),
    "M": (60, 1),
    "H": (3600, 1),
}
_MAX_VALUE: Final = 10**8 - 1
_MAX_SECONDS: Final = _MAX_VALUE * 3600

_TIMEOUT: Final = re.compile(r"([0-9]{1,8})([HMSmun])")


def parse_timeout(value: str) -> float:
    """Return the seconds of a ``grpc-timeout``; 0 means that the deadline has passed.

    Raises GatewayError (400) that quotes any other form. grpc-go refuses it too, C-core ignores it.
    """
    match = _TIMEOUT.fullmatch(value)
    if match is None:
        raise bad_request(
            "grpc-timeout must be 1 to 8 digits and one of H, M, S, m, u and n, "
            f"got {quote_value(value)}"
        )
    seconds, per_second = _UNITS[match[2]]
    return int(match[1]) * seconds / per_second


def format_timeout(seconds: float) -> str:
    """Write the time that is left in the smallest unit that takes at most 8 digits.

    It is rounded down, so that the server never has longer; less than a nanosecond is ``1n``. Up to
    27 hours it is exact to a millisecond, above 11,415 years it is cut.
    """
    # The exact value of the float: a product of floats could be rounded up.
    numerator, denominator = min(seconds, float(_MAX_SECONDS)).as_integer_ratio()
    for unit, (unit_seconds, per_second) in _UNITS.items():
        count = numerator * per_second // (denominator * unit_seconds)
        if count <= _MAX_VALUE:
            return f"{max(count, 1)}{unit}"
    raise AssertionError("hours take all that is not cut")
