"""``GET /v2``: what the servers say of themselves, and what the gateway adds to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from gateway.errors import bad_response
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.body_io import response_chunks
from gateway.proxy.cluster.scatter_gather import (
    BufferedResponse,
    SubResponse,
    agreed,
    ask_one_of_each,
    pass_on,
    question,
)
from gateway.proxy.headers import with_body
from gateway.proxy.infer.convert_response import relay_document
from gateway.proxy.interfaces import ClientRequest, ClientResponse, Route, Upstream
from gateway.proxy.passthrough import forward_answer
from gateway.proxy.retry import UpstreamCall
from gateway.sizes import MAX_SERVER_DOCUMENT
from gateway.upstream.transport import UpstreamRequest

_EXTENSION = "binary_tensor_data"


async def server_metadata(
    request: ClientRequest,
    answer: ClientResponse,
    route: Route,
    upstreams: Sequence[Upstream],
    deadline: Deadline,
) -> None:
    """Pass the server's metadata on, with the binary form among its extensions.

    Of several upstreams, it is that of the first one, with the extensions that all of them have.
    """
    asked = question(request, request.target)
    if len(upstreams) == 1:
        await _of_one(asked, answer, route, deadline)
        return
    with route.held.reserve() as holding:
        replies = await ask_one_of_each(route, upstreams, asked, deadline, holding)
        first = agreed(request, replies)
        good = [(each, each.good) for each in replies if each.good]
        if not good:
            await pass_on(first, answer, deadline)
            return
        document = orjson.dumps(_shared([_fields(each, reply) for each, reply in good]))
        deadline.expect_client()
        await answer.send(first.status, first.reason, with_body(first.headers, {}), document)


async def _of_one(
    asked: UpstreamRequest, answer: ClientResponse, route: Route, deadline: Deadline
) -> None:
    async with UpstreamCall(route, asked, deadline) as attempt:
        response, url = attempt.response, attempt.url
        if response.status != 200:
            await forward_answer(response, answer, url, deadline)
            return
        chunks = response_chunks(response, url, deadline)
        await relay_document(
            response, chunks, answer, _with_extension, MAX_SERVER_DOCUMENT, route, deadline
        )


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


def _fields(asked: SubResponse, reply: BufferedResponse) -> dict[str, Any]:
    try:
        fields = orjson.loads(reply.body)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise bad_response(f"{asked.name} answered what is no server metadata")
    return fields


def _shared(servers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Give the first server's metadata, with the extensions that all have, and the gateway's."""
    first, *others = [_extensions(fields) for fields in servers]
    shared = [name for name in first if all(name in extensions for extensions in others)]
    if _EXTENSION not in shared:
        shared.append(_EXTENSION)
    return {**servers[0], "extensions": shared}


def _extensions(fields: dict[str, Any]) -> list[Any]:
    """Give what a server says that it can do; some say nothing."""
    extensions = fields.get("extensions")
    return extensions if isinstance(extensions, list) else []
