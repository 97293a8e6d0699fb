"""Scans messages in pieces, and reads them whole."""

from __future__ import annotations

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.grpc.model_scanner import ModelScanner
from gateway.protocol.grpc.wire import WireError, WireReader
from tests.support.grpc.proto_file import message_class

Named = message_class("ModelReadyRequest")


"""Its name and version are fields 1 and 2; all else is unknown to it."""


def scan(scanner: ModelScanner, pieces: list[bytes]) -> str:
    """Scan a whole message; return the error."""
    failure = None
    try:
        for piece in pieces:
            scanner.feed(memoryview(piece))
            assert not scanner.ended
        scanner.end()
    except GatewayError as error:
        failure = error
    assert scanner.ended == (failure is None)
    if failure is None:
        return ""
    assert failure.kind is ErrorKind.BAD_REQUEST
    return failure.message


def reader_error(data: bytes) -> str:
    """Return the error of the reader of whole messages."""
    reader = WireReader(data)
    try:
        while tag := reader.next_tag():
            if tag in (10, 18):
                reader.read_text()
            else:
                reader.skip(tag)
    except WireError as error:
        return f"the request is not valid protobuf: {error}"
    return ""
