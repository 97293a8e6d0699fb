"""Ends a stream of Triton with its first error for clients that ask for that: triton_grpc_error.

Triton 2.51 dies if it is asked itself, and its model sends anything after an error.
"""

from __future__ import annotations

from typing import Final

from gateway.codec.grpc.infer import read_stream_response
from gateway.errors import GatewayError
from gateway.protocol.error_vocabulary import RESPONSE
from gateway.protocol.grpc import fields
from gateway.protocol.grpc.framing import MessagePiece, MessageReader, frame
from gateway.protocol.grpc.headers import WANTS_STATUS
from gateway.protocol.grpc.status import GrpcStatus
from gateway.protocol.grpc.wire import MAX_MESSAGE
from gateway.proxy.body_io import Chunks
from gateway.proxy.interfaces import ClientRequest

_MAX_ERROR: Final = 64 * 1024
"""Bytes of a message that may be an error; Triton's have no tensors."""


class StreamError(Exception):
    """An error of the model, which ends a stream."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = GrpcStatus.INTERNAL
        """What Triton ends the stream with."""
        self.text = text


def wants_status(request: ClientRequest) -> bool:
    """Tell whether a client wants the first error of a stream as the status."""
    return request.headers.get(WANTS_STATUS, "").lower() == "true"


async def end_at_first_error(chunks: Chunks) -> Chunks:
    """Yield a stream of ModelStreamInferResponse messages up to the first error of a model.

    It raises StreamError then. An error from before the inference, which names no model, passes as
    a message: Triton ends no stream for it. So do compressed messages, which are not read.
    """
    reader = MessageReader(MAX_MESSAGE, "protobuf's limit", RESPONSE)
    held = bytearray()
    is_known = False
    async for chunk in chunks:
        for piece in reader.feed(chunk):
            if piece.begins:
                held.clear()
                is_known = False
            if not is_known:
                held += piece.data
                if piece.ends and (text := _error_of(piece, held)):
                    raise StreamError(text)
                if piece.ends or not _may_be_error(piece, held):
                    is_known = True
                    yield frame(piece.size, piece.is_compressed)
                    yield bytes(held)
            elif piece.data:
                yield piece.data
    reader.end()


def _may_be_error(piece: MessagePiece, start: bytearray) -> bool:
    """Tell by the start of a message whether it may be an error: protobuf writes that first."""
    if piece.is_compressed or piece.size > _MAX_ERROR:
        return False
    return not start or start[0] == fields.ERROR_MESSAGE


def _error_of(piece: MessagePiece, message: bytearray) -> str:
    """Return the error of a model; empty if the message is none."""
    if not _may_be_error(piece, message):
        return ""
    try:
        read = read_stream_response(bytes(message), _MAX_ERROR)
    except GatewayError:
        return ""  # the client finds out
    return read.error or "" if read.has_begun else ""
