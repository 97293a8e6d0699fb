"""The errors of HTTP/2: RFC 9113, sections 5.4 and 7."""

from __future__ import annotations

from enum import IntEnum


class ErrorCode(IntEnum):
    """The error codes of RST_STREAM and GOAWAY: RFC 9113, section 7.

    A peer may send others; they have no special meaning.
    """

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class Http2Error(ValueError):
    """The peer broke the protocol, or a limit; the message says how.

    ``stream_id`` is 0 for an error of the connection, which must be closed: RFC 9113, section
    5.4.1. Otherwise only that stream has to be reset: section 5.4.2.
    """

    def __init__(self, code: ErrorCode, reason: str, stream_id: int = 0) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.stream_id = stream_id

    @property
    def ends_connection(self) -> bool:
        """Whether the connection cannot go on."""
        return not self.stream_id


def compression_error(reason: str) -> Http2Error:
    """Return the error of a block that cannot be decoded.

    The connection ends, as the tables of both ends may differ from here on: RFC 7541, section 2.2,
    and RFC 9113, section 4.3.
    """
    return Http2Error(ErrorCode.COMPRESSION_ERROR, reason)


def protocol_error(reason: str, stream_id: int = 0) -> Http2Error:
    """Return the error of a peer that breaks the protocol, on one stream or everywhere."""
    return Http2Error(ErrorCode.PROTOCOL_ERROR, reason, stream_id)


def flood_error(reason: str) -> Http2Error:
    """Return the error of a peer that exceeds a limit of the gateway: RFC 9113, section 10.5."""
    return Http2Error(ErrorCode.ENHANCE_YOUR_CALM, reason)
