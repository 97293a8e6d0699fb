"""Tells gRPC clients why their call was dropped, when nobody can wait for it any more."""

from __future__ import annotations

from gateway.observe.call_record import CallRecord
from gateway.protocol.grpc.headers import GRPC_TYPE, MESSAGE, STATUS, is_grpc_type
from gateway.protocol.grpc.status import GrpcStatus, encode_message, http_status
from gateway.proxy.interfaces import HeaderLines


def is_grpc_content(content_type: bytes) -> bool:
    """Tell whether a Content-Type, as it was received, is that of gRPC."""
    return is_grpc_type(content_type.decode("latin-1").strip())


def end_dropped_call(record: CallRecord, has_started: bool) -> HeaderLines:
    """Record that a call ends with UNAVAILABLE, and return the headers that end it.

    They are trailers if its response has started, else a whole response without a body. The error
    of the record is the message.
    """
    code = GrpcStatus.UNAVAILABLE
    record.grpc_status = code
    record.status = http_status(code)
    trailers = ((STATUS, str(int(code))), (MESSAGE, encode_message(record.error)))
    if has_started:
        return trailers
    return ((":status", "200"), ("content-type", GRPC_TYPE), *trailers)  # "Trailers-Only"
