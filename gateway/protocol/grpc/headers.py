"""The header fields of gRPC calls: PROTOCOL-HTTP2.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gateway.protocol.grpc.status import GrpcStatus, decode_message

GRPC_TYPE: Final = "application/grpc"
STATUS: Final = "grpc-status"
MESSAGE: Final = "grpc-message"
TIMEOUT: Final = "grpc-timeout"
ENCODING: Final = "grpc-encoding"
ACCEPT_ENCODING: Final = "grpc-accept-encoding"

_GRPC_TYPES: Final = (f"{GRPC_TYPE}+", f"{GRPC_TYPE};")
_MAX_DIGITS: Final = 9


def is_grpc_type(content_type: str) -> bool:
    """Tell whether a Content-Type is that of gRPC; application/grpc-web is another protocol."""
    return content_type == GRPC_TYPE or content_type.startswith(_GRPC_TYPES)


def is_grpc_field(name: str) -> bool:
    """Tell whether a header of an HTTP client would say something of a gRPC call made for it."""
    return name.lower().startswith("grpc-")


def read_status(fields: Iterable[tuple[str, str]]) -> int | None:
    """Return the status in the trailers, or in the headers of a response without a body.

    None if there is none; one that is no number is UNKNOWN.
    """
    for name, value in fields:
        if name.lower() == STATUS:
            is_number = value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS
            return int(value) if is_number else GrpcStatus.UNKNOWN
    return None


def read_message(fields: Iterable[tuple[str, str]]) -> str:
    """Return the text of the error in the trailers or headers of a response; empty if none."""
    return next((decode_message(value) for name, value in fields if name.lower() == MESSAGE), "")
