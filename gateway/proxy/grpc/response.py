"""What gRPC clients get: messages, and statuses in trailers instead of HTTP statuses."""

from __future__ import annotations

from collections.abc import Sequence

from multidict import CIMultiDict

from gateway.errors import Audience, GatewayError, describe_error
from gateway.observe.call_record import CallRecord
from gateway.protocol.grpc.framing import frame
from gateway.protocol.grpc.headers import GRPC_TYPE, MESSAGE, STATUS
from gateway.protocol.grpc.status import GrpcStatus, encode_message, http_status, status_name
from gateway.proxy.interfaces import ClientResponse, HeaderLines


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


async def send_status(response: ClientResponse, code: int, text: str) -> None:
    """End a call with the status of an error, whether its response has started or not."""
    lines = status_lines(code, text)
    if response.started:
        await response.finish(lines)
    else:
        # "Trailers-Only" of PROTOCOL-HTTP2.md.
        await response.start(200, "", CIMultiDict((("Content-Type", GRPC_TYPE), *lines)))
        await response.finish()
    record_status(response.record, code, text)


async def send_grpc_error(
    response: ClientResponse, error: GatewayError, audience: Audience = Audience.CLIENTS
) -> None:
    """End a call with an error of the gateway, whether its response has started or not."""
    await send_status(response.unwrapped, *status_of(error, audience))


def status_of(error: GatewayError, audience: Audience = Audience.CLIENTS) -> tuple[int, str]:
    """Return the status and its text for an error of the gateway."""
    return error.kind.value.grpc_code, error.message_for(audience)


def record_status(record: CallRecord, code: int, text: str = "") -> None:
    """Record how a call ended; in metrics the HTTP status stands for that of gRPC.

    ``text`` is the message of a server's error.
    """
    record.grpc_status = code
    record.status = http_status(code)
    if code and not record.error:
        record.server_error = describe_error(status_name(code), text)


def status_lines(code: int, text: str) -> HeaderLines:
    """Return the status of a call as header fields."""
    lines: HeaderLines = ((STATUS, str(int(code))),)
    return (*lines, (MESSAGE, encode_message(text.strip(" ")))) if text else lines
