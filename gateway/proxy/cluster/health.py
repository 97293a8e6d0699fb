"""The gateway's own health: live if it responds, ready if its upstreams are."""

from __future__ import annotations

from gateway.errors import ErrorKind, GatewayError, ServerName
from gateway.proxy.cluster.scatter_gather import send_json
from gateway.proxy.interfaces import Call

# The protocol requires an object as the body. Triton sends none, and its clients read the status;
# KServe's client reads the object.


async def live(call: Call) -> None:
    """Report that the gateway is live, whatever its servers do."""
    await send_json(call, b'{"live":true}')


async def ready(call: Call) -> None:
    """Report that the gateway is ready; raises GatewayError (503) that tells what is not."""
    readiness = call.readiness
    endpoints = f"the endpoints of {', '.join(readiness.names)}"
    call.deadline.expect_server(ServerName(endpoints, endpoints))
    unready = await readiness.check()
    if unready:
        public_message = f"not ready: {readiness.public_reason}"
        raise GatewayError(
            ErrorKind.NOT_READY, f"not ready: {unready}", public_message=public_message
        )
    await send_json(call, b'{"ready":true}')
