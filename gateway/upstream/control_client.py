"""Questions of the gateway's own, and a server's answers to them as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from multidict import CIMultiDict

from gateway.errors import ErrorKind, GatewayError, bad_response
from gateway.upstream.transport import UpstreamEndpoint, UpstreamRequest


@dataclass(frozen=True, slots=True)
class ControlResponse:
    """An answer, whole."""

    status: int
    content_type: str
    body: bytes


async def send_control_request(
    endpoint: UpstreamEndpoint, method: str, path: str, largest: int, body: bytes | None = None
) -> ControlResponse:
    """Ask a server; ``largest`` is the most that its answer's body may have, in bytes.

    Raises GatewayError: 502 or 503 where there is no answer, or a larger one, and 508 where the
    endpoint leads back to a gateway that asks or passes this on.
    """
    headers = CIMultiDict(endpoint.own_request_headers)
    if body is not None:
        headers["Content-Type"] = "application/json"
    chunks = None if body is None else (body,)
    response = await endpoint.send(UpstreamRequest(method, path, headers, chunks))
    try:
        if response.status == ErrorKind.LOOP.value.status:
            raise GatewayError(ErrorKind.LOOP, f"loop: {endpoint.url} leads back to the gateway")
        held = bytearray()
        while chunk := await response.read():
            held += chunk
            if len(held) > largest:
                raise bad_response(f"{endpoint.url}{path} is larger than {largest} bytes")
    finally:
        response.close()
    content_type = response.headers.get("Content-Type", "application/json")
    return ControlResponse(response.status, content_type, bytes(held))
