"""Operations on shared memory: the gateway's own regions are not for clients."""

from __future__ import annotations

from typing import Final

import orjson

from gateway.errors import ErrorKind, GatewayError, bad_response
from gateway.http1.head import RequestHead
from gateway.protocol.grpc.rpcs import rpc_of
from gateway.proxy.attempts.retry import send_call
from gateway.proxy.body_io import passthrough
from gateway.proxy.calls.handler import PassthroughHandler, ServerRequest
from gateway.proxy.cluster.scatter_gather import make_sub_request, read_response, send_buffered
from gateway.proxy.destination import Destination
from gateway.proxy.headers import with_body
from gateway.proxy.interfaces import Call
from gateway.system.shared_memory import PREFIX

_STATUS: Final = "SystemSharedMemoryStatus"
_REGISTER: Final = "SystemSharedMemoryRegister"
_UNREGISTER: Final = "SystemSharedMemoryUnregister"


class SharedMemoryHandler(PassthroughHandler):
    """Passes the operations untouched, but for the regions of the gateway itself.

    Those exist only where tensors go to an upstream through shared memory.
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
        if rpc is not None and lists_regions(rpc.rpc, rpc.path.get("name", "")):
            await _list_regions(call)
        else:
            await passthrough(call)


def lists_regions(rpc: str, name: str) -> bool:
    """Tell whether the response to an RPC lists all regions; ``name`` is that of its region.

    Raises GatewayError if the RPC is for a region of the gateway: 404 as from the server for a
    region that it does not have, 403 for a change, and for a change of all regions.
    """
    is_own = name.startswith(PREFIX)
    if rpc == _STATUS and is_own:
        text = f"Unable to find system shared memory region: '{name}'"
        raise GatewayError(ErrorKind.NOT_FOUND, text)
    if rpc in (_REGISTER, _UNREGISTER) and is_own:
        text = f"shared memory regions whose names begin with '{PREFIX}' are the gateway's own"
        raise GatewayError(ErrorKind.FORBIDDEN, text)
    if rpc == _UNREGISTER and not name:
        text = "this would unregister the gateway's own shared memory, too; unregister each region"
        raise GatewayError(ErrorKind.FORBIDDEN, f"{text} by its name")
    return rpc == _STATUS and not name


async def _list_regions(call: Call) -> None:
    """Send the regions that the server lists, without those of the gateway."""
    with call.reserve() as reservation:
        request = make_sub_request(call.request, call.request.target)
        received = await read_response(send_call(call, request), call.deadline, reservation)
    if received.status != 200:
        await send_buffered(call, received)
        return
    try:
        regions = [
            each for each in orjson.loads(received.body) if not each["name"].startswith(PREFIX)
        ]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise bad_response("the server sent no list of shared memory regions") from None
    call.deadline.expect_client()
    headers = with_body(received.headers, {})
    await call.response.send(200, received.reason, headers, orjson.dumps(regions))
