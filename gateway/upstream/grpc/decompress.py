"""Decompresses messages of servers that compress them, although the gateway asks for none."""

from __future__ import annotations

from collections.abc import Callable

from gateway.codec.decompress import Decompressor
from gateway.errors import ErrorKind, GatewayError, ServerName, bad_response
from gateway.http1.content_codings import CODINGS
from gateway.protocol.error_vocabulary import RESPONSE
from gateway.protocol.grpc.headers import ENCODING
from gateway.system.time_slices import time_slice_queue
from gateway.upstream.content_decoding import MAX_RATIO, unknown_coding_error
from gateway.upstream.transport import UpstreamResponse


async def decompress_message(
    message: bytes | memoryview,
    response: UpstreamResponse,
    server: ServerName,
    cap: int,
    max_ratio: int = MAX_RATIO,
    reserve: Callable[[int], None] = lambda size: None,
) -> bytes:
    """Decompress a message of a response, which may become ``cap`` bytes.

    Beyond the first MiB it may grow to ``max_ratio`` times its size. ``reserve`` gets the size of
    each piece before it is kept. Other calls have their turn between the pieces. Raises
    GatewayError (502) that names the server, and what ``reserve`` raises.
    """
    encoding = response.headers.get(ENCODING, "identity")
    if encoding not in CODINGS:
        raise unknown_coding_error(server, "message", ENCODING, encoding)
    decompressor = Decompressor(encoding, max_ratio, RESPONSE, f"the response of {server.url}")
    reserve(len(message))  # the decompressor has a copy
    decompressor.feed(message, last=True)
    text = bytearray()
    try:
        while (piece := decompressor.step()) is not None:
            reserve(len(piece))
            text += piece
            if len(text) > cap:
                break
            await time_slice_queue().next_slice()
    except GatewayError as error:
        if error.kind is not ErrorKind.BAD_RESPONSE:
            raise
        raise bad_response(error.message, server) from None
    if len(text) > cap:
        raise bad_response(
            f"the response of {server.url} becomes larger than {cap} bytes when it is decompressed",
            server,
        )
    return bytes(text)
