"""Servers that take JSON only: what clients send becomes JSON, and the answer what they want."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence

from gateway.codec.v2.json_request import JsonRequestConverter
from gateway.protocol.request_header import OutputEncoding
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.body_io import response_chunks
from gateway.proxy.infer.buffered_response import relay_in_binary
from gateway.proxy.infer.convert_response import naming_endpoint, with_wishes
from gateway.proxy.interfaces import ClientResponse, Route
from gateway.proxy.passthrough import forward_answer
from gateway.sizes import ENCODE_CHUNK
from gateway.upstream.transport import Body, UpstreamResponse

_AT_ONCE = 16 * 1024
"""Bytes of a request in binary form that are written at once, mostly as four times as many."""


def json_body(
    body: Body, size: int, writer: Callable[[], JsonRequestConverter], turns: ConversionScheduler
) -> Body:
    """Write a request in binary form, of so many bytes, as JSON.

    A small one at hand is written as a whole; raises GatewayError (400) for what JSON cannot hold.
    A larger one is written while it is sent, anew each time that is done. What is still to come
    from the client is written as it comes.
    """
    assert body is not None
    if isinstance(body, AsyncIterator):
        return _written(body, writer(), turns)
    assert not isinstance(body, AsyncIterable)
    if size > _AT_ONCE:
        return _WrittenAnew(body, writer, turns)
    codec = writer()
    text = b"".join([codec.feed(data) for data in body])
    codec.finish()
    return [text]


class _WrittenAnew(AsyncIterable[bytes]):
    """A request in binary form at hand, as JSON: it can be sent more than once."""

    def __init__(
        self,
        body: Sequence[bytes | memoryview],
        writer: Callable[[], JsonRequestConverter],
        turns: ConversionScheduler,
    ) -> None:
        self._body = body
        self._writer = writer
        self._turns = turns

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Write it from the start."""
        return _written(_each(self._body), self._writer(), self._turns)


async def _each(chunks: Sequence[bytes | memoryview]) -> AsyncIterator[bytes | memoryview]:
    for chunk in chunks:
        yield chunk


async def _written(
    body: AsyncIterator[bytes | memoryview], codec: JsonRequestConverter, turns: ConversionScheduler
) -> AsyncIterator[bytes]:
    async for chunk in body:
        data = memoryview(chunk)
        for start in range(0, len(data), ENCODE_CHUNK):
            yield codec.feed(data[start : start + ENCODE_CHUNK])
            await turns.next()
    codec.finish()


def passes_as_it_is(form: OutputEncoding, route: Route) -> bool:
    """Tell whether a client gets the JSON that the server writes."""
    return form.all_json and not with_wishes(route, form).policies.any_base64


async def relay_json_answer(
    response: UpstreamResponse,
    answer: ClientResponse,
    form: OutputEncoding,
    route: Route,
    url: str,
    deadline: Deadline,
) -> None:
    """Pass a JSON answer on in the client's form; errors of the server's own pass as they are."""
    if response.status != 200 or passes_as_it_is(form, route):
        await forward_answer(response, answer, url, deadline)
        return
    route = with_wishes(route, form)
    with naming_endpoint(url):
        chunks = response_chunks(response, url, deadline)
        await relay_in_binary(response, chunks, answer, form, route, deadline)
