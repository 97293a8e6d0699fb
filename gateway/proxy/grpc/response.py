"""Writes responses of messages to gRPC clients."""

from __future__ import annotations

from collections.abc import Sequence

from multidict import CIMultiDict

from gateway.protocol.grpc.framing import frame
from gateway.protocol.grpc.headers import GRPC_TYPE
from gateway.protocol.grpc.status import GrpcStatus
from gateway.proxy.errors import record_status, status_lines
from gateway.proxy.interfaces import ClientResponse


async def start_response(response: ClientResponse) -> None:
    """Start a response of messages."""
    await response.start(200, "", CIMultiDict((("Content-Type", GRPC_TYPE),)))


async def write_message(response: ClientResponse, chunks: Sequence[bytes | memoryview]) -> None:
    """Write a message, which is not compressed."""
    await response.write(frame(sum(map(len, chunks))))
    for chunk in chunks:
        await response.write(chunk)


async def finish(response: ClientResponse) -> None:
    """End a response with the status OK."""
    await response.finish(status_lines(GrpcStatus.OK, ""))
    record_status(response.record, GrpcStatus.OK)
