"""``GET /v2``: what the server says of itself, and what the gateway adds to it."""

from __future__ import annotations

import orjson
from multidict import CIMultiDict

from gateway.exchange.attempts import Attempts
from gateway.exchange.base import ClientAnswer, ClientRequest, Route
from gateway.exchange.deadline import Deadline
from gateway.exchange.forward import forward_answer
from gateway.exchange.infer_answer import relay_document
from gateway.exchange.pump import response_chunks
from gateway.upstream.base import UpstreamRequest

_EXTENSION = "binary_tensor_data"
_LARGEST_DOCUMENT = 1024 * 1024


async def server_metadata(
    request: ClientRequest, answer: ClientAnswer, route: Route, deadline: Deadline
) -> None:
    """Pass the server's metadata on, with the binary form among its extensions."""
    headers = CIMultiDict(request.headers)
    # The answer has to be read here, and a body, if there is one, is not passed on.
    for name in ("Accept-Encoding", "Content-Length"):
        headers.popall(name, None)
    asked = UpstreamRequest(request.method, request.target, headers)
    async with Attempts(route.upstream, asked, deadline) as attempt:
        response, url = attempt.response, attempt.url
        if response.status != 200:
            await forward_answer(response, answer, url, deadline)
            return
        chunks = response_chunks(response, url, deadline)
        await relay_document(response, chunks, answer, _with_extension, _LARGEST_DOCUMENT, deadline)


def _with_extension(document: bytes) -> bytes:
    try:
        fields = orjson.loads(document)
        extensions = fields.setdefault("extensions", [])
        if _EXTENSION in extensions:
            return document
        extensions.append(_EXTENSION)
    except (ValueError, AttributeError, TypeError):
        return document
    return orjson.dumps(fields)
