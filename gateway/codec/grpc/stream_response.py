"""Reads and writes ModelStreamInferResponse, the messages of streams."""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.codec.grpc.contents import Chunks
from gateway.codec.grpc.response import ReadResponse, read_infer_response
from gateway.protocol.error_vocabulary import RESPONSE
from gateway.protocol.grpc import fields
from gateway.protocol.grpc.wire import (
    Buffer,
    WireError,
    WireReader,
    bytes_field,
    length_prefix,
    varint_field,
)

FINAL_RESPONSE: Final = "triton_final_response"
"""The parameter that tells whether a response is the last one of its request."""


_BARE_TAGS: Final = frozenset(
    (fields.ID_TAG, fields.PARAMETERS_TAG, fields.OUTPUTS_TAG, fields.RAW_OUTPUT_CONTENTS_TAG)
)
"""Fields of a ModelInferResponse that are not in a message around it."""


class StreamResponse(NamedTuple):
    """A message of a stream: a response, or the text of an error.

    ``has_begun`` tells of an error that the model has begun to serve its request.
    """

    error: str | None
    response: ReadResponse | None
    has_begun: bool = True


def read_stream_response(data: Buffer, header_cap: int) -> StreamResponse:
    """Read a message; its raw contents become views of ``data``.

    ``header_cap`` limits the bytes beside data. MLServer streams ModelInferResponse, without the
    message of the protocol around it. Raises GatewayError (502) for an invalid message.
    """
    error: str | None = None
    inner: memoryview | None = None
    try:
        reader = WireReader(data)
        while tag := reader.next_tag():
            if tag == fields.ERROR_MESSAGE_TAG:
                error = str(reader.read_view(), "utf-8", "replace")
            elif tag == fields.INFER_RESPONSE_TAG:
                inner = reader.read_view()
            elif tag in _BARE_TAGS:
                return StreamResponse(None, read_infer_response(data, header_cap))
            else:
                reader.skip(tag)
    except WireError as wire_error:
        raise RESPONSE.invalid_protobuf(wire_error) from None
    if error:
        return StreamResponse(error, None, bool(inner))
    return StreamResponse(None, read_infer_response(inner or b"", header_cap))


_IS_FINAL: Final = bytes_field(
    fields.PARAMETERS,
    bytes_field(fields.KEY, FINAL_RESPONSE.encode())
    + bytes_field(fields.VALUE, varint_field(fields.BOOL_PARAM, True)),
)


def write_stream_response(response: Chunks) -> Chunks:
    """Write a ModelInferResponse, the only one to its request, as a message of a stream."""
    size = len(_IS_FINAL) + sum(map(len, response))
    return [length_prefix(fields.INFER_RESPONSE, size), *response, _IS_FINAL]


def write_stream_error(text: str, model: str, request_id: str | None) -> Chunks:
    """Write an error as a message of a stream; it tells which request failed."""
    request = bytes_field(fields.MODEL_NAME, model.encode())
    if request_id:
        request += bytes_field(fields.ID, request_id.encode())
    error = bytes_field(fields.ERROR_MESSAGE, text.encode(errors="replace"))
    return [error, bytes_field(fields.INFER_RESPONSE, request + _IS_FINAL)]
