"""Operations on shared memory: the gateway's own regions are not for clients."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import orjson

from gateway.errors import ErrorKind, GatewayError, bad_request, bad_response
from gateway.http1.head import RequestHead
from gateway.protocol.grpc.rpcs import rpc_of
from gateway.protocol.json_errors import quote_value
from gateway.protocol.operations import quote_name
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.attempts.retry import send_call
from gateway.proxy.body_io import passthrough
from gateway.proxy.calls.handler import PassthroughHandler, ServerRequest
from gateway.proxy.cluster.scatter_gather import (
    BufferedResponse,
    SubResponse,
    make_sub_request,
    query_servers,
    read_response,
    send_buffered,
    send_json,
    send_merged,
)
from gateway.proxy.destination import Destination, Upstream
from gateway.proxy.headers import with_body
from gateway.proxy.interfaces import Call
from gateway.system.shared_memory import PREFIX
from gateway.upstream.transport import UpstreamRequest

_STATUS: Final = "SystemSharedMemoryStatus"
_REGISTER: Final = "SystemSharedMemoryRegister"
_UNREGISTER: Final = "SystemSharedMemoryUnregister"

_PATH: Final = "/v2/systemsharedmemory"
_SEGMENT: Final = re.compile(r"(?!\.\.?$)[\w.~%!$&'()*+,;=:@-]{1,8000}", re.ASCII)
"""Names that a path has as they are: Triton decodes none (RFC 3986, section 3.3), and closes the
connection for longer paths."""
_UNKNOWN: Final = (400, 404)
"""Statuses of a server that does not have a region."""


class SharedMemoryHandler(PassthroughHandler):
    """Passes the operations untouched, but for the regions of the gateway itself.

    Those exist only where tensors may go to an upstream through shared memory.
    """

    def to_server(
        self,
        head: RequestHead,
        body: bytes | memoryview,
        destination: Destination,
        request_id: str,
    ) -> ServerRequest | None:
        """Return the request for a server."""
        if destination.upstream.shared_memory is not None:
            return None
        return super().to_server(head, body, destination, request_id)

    async def serve(self, call: Call) -> None:
        """Serve a call in a task."""
        rpc = None
        if call.destination.upstream.shared_memory is not None:
            rpc = rpc_of("POST", call.request.target)  # the server refuses other methods itself
        if rpc is None or not is_for_all_regions(rpc.rpc, rpc.path.get("name", "")):
            await passthrough(call)
        elif rpc.rpc == _STATUS:
            await _list_regions(call)
        else:
            await _unregister_all(call)


def is_for_all_regions(rpc: str, name: str) -> bool:
    """Tell whether an RPC is for all regions, the gateway's too; ``name`` is that of its region.

    Raises GatewayError if the RPC is for a region of the gateway: 404 as from the server for a
    region that it does not have, 403 for a change. 400 for a new region without a name, with which
    servers take it over gRPC: nobody could unregister it without all others.
    """
    is_own = name.startswith(PREFIX)
    if rpc == _REGISTER and not name:
        text = "'region name' is necessary to register system shared memory region"
        raise bad_request(text)
    if rpc == _STATUS and is_own:
        text = f"Unable to find system shared memory region: '{name}'"
        raise GatewayError(ErrorKind.NOT_FOUND, text)
    if rpc in (_REGISTER, _UNREGISTER) and is_own:
        text = f"shared memory regions whose names begin with '{PREFIX}' are the gateway's own"
        raise GatewayError(ErrorKind.FORBIDDEN, text)
    return rpc in (_STATUS, _UNREGISTER) and not name


async def _list_regions(call: Call) -> None:
    """Send the regions that the server lists, without those of the gateway."""
    with call.reserve() as reservation:
        request = make_sub_request(call.request, call.request.target)
        received = await read_response(send_call(call, request), call.deadline, reservation)
    if received.status != 200:
        await send_buffered(call, received)
        return
    try:
        regions = _of_clients(orjson.loads(received.body))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise bad_response("the server sent no list of shared memory regions") from None
    call.deadline.expect_client()
    headers = with_body(received.headers, {})
    await call.response.send(200, received.reason, headers, orjson.dumps(regions))


def _of_clients(regions: Any) -> list[Any]:
    return [each for each in regions if not each["name"].startswith(PREFIX)]


async def _unregister_all(call: Call) -> None:
    """Unregister the regions of clients at every endpoint, one by one, and respond as Triton does.

    Raises GatewayError: 405 for another method than POST, 501 for a name that fits into no path,
    and as ``merge_responses``.
    """
    if call.request.method != "POST":  # a server over gRPC would not see it
        raise GatewayError(ErrorKind.NOT_ALLOWED, "Method Not Allowed")
    upstream = call.destination.upstream
    call = replace(call, upstreams=(upstream,))
    with call.reserve() as reservation:
        status = make_sub_request(call.request, f"{_PATH}/status", method="GET")
        listed = await _query(call, status, reservation)
        results = {each.server.url: each for each in listed}
        regions = {
            region["name"]
            for each in listed
            if each.success
            for region in each.parse(_of_clients, "list of shared memory regions")
        }
        for target in [_unregister_target(name, upstream) for name in sorted(regions)]:
            request = make_sub_request(call.request, target, (b"",))
            with call.reserve() as part:  # a server may send much each time
                responses = await _query(call, request, part)
            for each in responses:
                url = each.server.url
                if not _lacks_region(each) and (url not in results or results[url].success):
                    results[url] = each
            if not call.deadline.seconds_left and not _are_successes(results.values()):
                break  # no other one gets a response
        if _are_successes(results.values()):
            await send_json(call, b"")
        else:
            await send_merged(call, tuple(results.values()))


async def _query(
    call: Call, request: UpstreamRequest, reservation: Reservation
) -> list[SubResponse]:
    return await query_servers(call, lambda _: request, reservation)


def _are_successes(responses: Iterable[SubResponse]) -> bool:
    return all(each.success for each in responses)


def _lacks_region(response: SubResponse) -> bool:
    result = response.result
    return isinstance(result, BufferedResponse) and result.status in _UNKNOWN


def _unregister_target(name: str, upstream: Upstream) -> str:
    if not upstream.inference_protocol.has_http:
        name = quote_name(name)
    elif not _SEGMENT.fullmatch(name):
        text = f"shared memory region {quote_value(name)} has a name that fits into no path"
        raise GatewayError(ErrorKind.UNSUPPORTED, f"{text}; unregister it by its name over gRPC")
    return f"{_PATH}/region/{name}/unregister"
