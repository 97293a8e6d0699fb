"""Writes requests for servers that accept only JSON."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence

from gateway.codec.v2.json_request import JsonRequestWriter
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.body_io import Chunks, slices
from gateway.sizes import ENCODE_CHUNK
from gateway.upstream.transport import Body

_MAX_BUFFERED = 16 * 1024
"""Bytes of a binary request that is written in one go; its JSON is mostly four times as large."""

NewWriter = Callable[[], JsonRequestWriter]


def json_body(body: Body, size: int, new_writer: NewWriter, scheduler: ConversionScheduler) -> Body:
    """Write a request with ``size`` bytes of data as JSON; ``body`` is the data.

    A small buffered request is written in one go; raises GatewayError (400) for what JSON cannot
    hold. A larger one is written while it is sent, anew for each attempt. A streamed request is
    written as it arrives.
    """
    assert body is not None
    if isinstance(body, AsyncIterator):
        return _write_json(body, new_writer(), scheduler)
    assert not isinstance(body, AsyncIterable)
    if size > _MAX_BUFFERED:
        return _RepeatableJson(body, new_writer, scheduler)
    writer = new_writer()
    text = b"".join([writer.feed(data) for data in body])
    return [text + writer.finish()]


class _RepeatableJson(AsyncIterable[bytes]):
    """A buffered binary request as JSON, which can be sent more than once."""

    def __init__(
        self,
        body: Sequence[bytes | memoryview],
        new_writer: NewWriter,
        scheduler: ConversionScheduler,
    ) -> None:
        self._body = body
        self._new_writer = new_writer
        self._scheduler = scheduler

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Write the request from the start."""
        return _write_json(_views(self._body), self._new_writer(), self._scheduler)


async def _views(chunks: Sequence[bytes | memoryview]) -> Chunks:
    for chunk in chunks:
        yield memoryview(chunk)


async def _write_json(
    body: Chunks, writer: JsonRequestWriter, scheduler: ConversionScheduler
) -> AsyncIterator[bytes]:
    async for piece in slices(body, ENCODE_CHUNK, scheduler):
        yield writer.feed(piece)
    yield writer.finish()
