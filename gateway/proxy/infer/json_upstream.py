"""Writes requests for servers that accept only JSON."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable

from gateway.codec.v2.json_writer import JsonRequestWriter
from gateway.protocol.messages import InferRequest
from gateway.proxy.body_io import Chunks, slices, stream
from gateway.proxy.destination import Destination
from gateway.sizes import ENCODE_CHUNK
from gateway.upstream.transport import Body

_MAX_BUFFERED = 16 * 1024
"""Bytes of a binary request that is written in one go; its JSON is mostly four times as large."""
_MAX_BUFFERED_PIECES = 64
"""Pieces of it: one for each tensor, which takes some 20 us, however small it is."""


def json_body(body: Body, request: InferRequest, destination: Destination) -> Body:
    """Write a request as JSON; ``body`` is the data of its tensors.

    A small buffered request is written in one go; raises GatewayError (400) for what JSON cannot
    hold. A larger one is written while it is sent, anew for each attempt. A streamed request is
    written as it arrives.
    """

    async def write(chunks: Chunks) -> AsyncIterator[bytes]:
        writer = JsonRequestWriter(request, destination.policies)
        async for piece in slices(chunks, ENCODE_CHUNK, destination.scheduler):
            yield writer.feed(piece)
        yield writer.finish()

    assert body is not None
    if isinstance(body, AsyncIterator):
        return write(body)
    assert not isinstance(body, AsyncIterable)
    pieces = body
    if request.data_size > _MAX_BUFFERED or len(pieces) > _MAX_BUFFERED_PIECES:
        return _Repeatable(lambda: write(stream(map(memoryview, pieces))))
    writer = JsonRequestWriter(request, destination.policies)
    text = b"".join([writer.feed(data) for data in body])
    return [text + writer.finish()]


class _Repeatable(AsyncIterable[bytes]):
    """A body that can be sent more than once, as each iteration starts it anew."""

    def __init__(self, start: Callable[[], AsyncIterator[bytes]]) -> None:
        self._start = start

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Start the body."""
        return self._start()
