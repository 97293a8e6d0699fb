"""The header fields of gRPC calls: PROTOCOL-HTTP2.md."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final
from urllib.parse import unquote

from gateway.errors import bad_request
from gateway.protocol.grpc.status import GrpcStatus
from gateway.protocol.json_errors import quote_value

GRPC_TYPE: Final = "application/grpc"
STATUS: Final = "grpc-status"
MESSAGE: Final = "grpc-message"
TIMEOUT: Final = "grpc-timeout"
ENCODING: Final = "grpc-encoding"
ACCEPT_ENCODING: Final = "grpc-accept-encoding"
WANTS_STATUS: Final = "triton_grpc_error"
"""Asks Triton for a stream that ends with its first error, as its status.

Triton 2.51 dies if its model sends anything after that, so that no server gets it.
"""

_GRPC_TYPES: Final = (f"{GRPC_TYPE}+", f"{GRPC_TYPE};")
_MAX_DIGITS: Final = 9
"""Clients read a status as a number of 32 bits."""


def is_grpc_type(content_type: str) -> bool:
    """Tell whether a Content-Type is that of gRPC; application/grpc-web is another protocol."""
    return content_type == GRPC_TYPE or content_type.startswith(_GRPC_TYPES)


def is_grpc_field(name: str) -> bool:
    """Tell whether a header of an HTTP client would say something of a gRPC call made for it."""
    return name.lower().startswith("grpc-")


def read_status(fields: Iterable[tuple[str, str]]) -> int | None:
    """Return the status in the trailers, or in the headers of a response without a body.

    None if there is none. One that is no number is UNKNOWN, as for grpc's C core. A number that no
    list has is returned as it is: clients take it for UNKNOWN, and newer ones may know it.
    """
    value = _status_value(fields)
    if value is None:
        return None
    return int(value) if _is_number(value) else GrpcStatus.UNKNOWN


def is_written_well(fields: Iterable[tuple[str, str]]) -> bool:
    """Tell whether all clients read the same status, if there is one: some refuse leading zeros."""
    value = _status_value(fields)
    return value is None or (_is_number(value) and value == str(int(value)))


def read_error(fields: Collection[tuple[str, str]], server: str) -> str:
    """Return the text of an error in the trailers or headers of a response; empty if none.

    A status that is no number is quoted in it, with the name of the ``server``.
    """
    message, value = read_message(fields), _status_value(fields)
    if value is None or _is_number(value):
        return message
    text = f"{server} sent an invalid grpc-status: {quote_value(value)}"
    return f"{text}: {message}" if message else text


def _status_value(fields: Iterable[tuple[str, str]]) -> str | None:
    """Return the status as it was sent; several are a list: RFC 9110, section 5.3."""
    values = [value for name, value in fields if name.lower() == STATUS]
    return ", ".join(values) if values else None


def _is_number(value: str) -> bool:
    return value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS


def read_message(fields: Iterable[tuple[str, str]]) -> str:
    """Return the text of the error in the trailers or headers of a response; empty if none.

    Invalid parts of it must not lose the rest, so they stay as they are. Bytes that are not UTF-8
    become U+FFFD.
    """
    return next((unquote(value) for name, value in fields if name.lower() == MESSAGE), "")


# ----------------------------------------------- grpc-timeout: "Timeout" of PROTOCOL-HTTP2.md

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
