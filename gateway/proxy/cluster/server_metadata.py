"""Server metadata (``GET /v2``): that of the servers, with the gateway's own extension."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gateway.protocol.dialect_detection import add_binary_extension, merge_server_metadata
from gateway.proxy.attempts.retry import send_call
from gateway.proxy.cluster.scatter_gather import (
    make_sub_request,
    merge_responses,
    query_servers,
    send_buffered,
)
from gateway.proxy.headers import with_body
from gateway.proxy.interfaces import Call
from gateway.proxy.passthrough import ResponseRelay, relay_response, relay_rewritten
from gateway.sizes import MAX_SERVER_DOCUMENT
from gateway.upstream.content_decoding import decode_response
from gateway.upstream.transport import UpstreamRequest


async def server_metadata(call: Call) -> None:
    """Send the server's metadata, with the binary extension added.

    With several upstreams it is that of the first one, with the extensions that all share.
    """
    request = make_sub_request(call.request, call.request.target)
    if len(call.upstreams) == 1:
        await _relay_metadata(call, request)
        return
    with call.reserve() as reservation:
        sub_responses = await query_servers(
            call, lambda _: request, reservation, queries_all=lambda _: False
        )
        first = merge_responses(call.request, sub_responses)
        succeeded = [each for each in sub_responses if each.success]
        servers = [each.parse(_as_object, "valid server metadata") for each in succeeded]
        if not servers:
            await send_buffered(call, first)
            return
        document = merge_server_metadata(servers)
        call.deadline.expect_client()
        headers = with_body(first.headers, {})
        await call.response.send(first.status, first.reason, headers, document)


async def _relay_metadata(call: Call, request: UpstreamRequest) -> None:
    async with send_call(call, request, to_any=True) as upstream_call:
        received, server = upstream_call.response, upstream_call.server
        relay = ResponseRelay(received, server, call.response, call.destination, call.deadline)
        if received.status != 200:
            await relay_response(relay)
            return
        relay = replace(relay, upstream_response=decode_response(received, server))
        await relay_rewritten(relay, relay.chunks(), add_binary_extension, MAX_SERVER_DOCUMENT)


def _as_object(document: Any) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise TypeError
    return document
