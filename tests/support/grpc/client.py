"""A gRPC client on grpcio, in threads of its own: the gateway runs in the test's event loop."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import grpc

from tests.support.gateway import running_gateway

SERVICE = "inference.GRPCInferenceService"
PATIENCE = 10.0


@dataclass(frozen=True)
class GrpcResponse:
    """How a call ended: its messages, its status and its metadata."""

    messages: list[bytes]
    code: grpc.StatusCode
    text: str
    headers: dict[str, Any]
    trailers: dict[str, Any]

    @property
    def message(self) -> bytes:
        """Return the one message of a call that succeeded."""
        assert self.code is grpc.StatusCode.OK, (self.code, self.text)
        (message,) = self.messages
        return message


class GrpcClient:
    """Makes calls with messages as bytes."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel

    async def call(
        self,
        method: str,
        *requests: bytes,
        metadata: Sequence[tuple[str, str | bytes]] = (),
        timeout: float = PATIENCE,  # noqa: ASYNC109  (that of grpcio)
        compression: grpc.Compression | None = None,
    ) -> GrpcResponse:
        """Make a call; ``method`` is one of the inference service, or a path."""
        path = method if method.startswith("/") else f"/{SERVICE}/{method}"

        def run() -> GrpcResponse:
            call = self.channel.stream_stream(path)(
                iter(requests), timeout=timeout, metadata=metadata, compression=compression
            )
            messages: list[bytes] = []
            with suppress(grpc.RpcError):
                messages.extend(call)
            return GrpcResponse(
                messages,
                call.code(),
                call.details() or "",
                _as_dict(call.initial_metadata()),
                _as_dict(call.trailing_metadata()),
            )

        return await asyncio.to_thread(run)


async def take_turns(client: GrpcClient, *requests: bytes, pause: float = 0.0) -> list[bytes]:
    """Send a stream for inference, each request ``pause`` seconds after the previous response."""

    def talk() -> list[bytes]:
        sent: queue.Queue[bytes | None] = queue.Queue()
        call = client.channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(
            iter(sent.get, None), timeout=PATIENCE
        )
        received = []
        for request in requests:
            sent.put(request)
            received.append(next(call))
            time.sleep(pause)
        sent.put(None)
        assert list(call) == []
        return received

    return await asyncio.to_thread(talk)


@asynccontextmanager
async def grpc_client(url: str) -> AsyncIterator[GrpcClient]:
    """Connect to the address of a URL."""
    channel = grpc.insecure_channel(
        urlsplit(url).netloc,
        options=(
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
        ),
    )
    try:
        yield GrpcClient(channel)
    finally:
        await asyncio.to_thread(channel.close)


@asynccontextmanager
async def grpc_client_of(*urls: str, **settings: Any) -> AsyncIterator[GrpcClient]:
    """Run a gateway in front of servers, and connect to it."""
    async with running_gateway(*urls, **settings) as gateway, grpc_client(gateway.url) as client:
        yield client


def _as_dict(metadata: Any) -> dict[str, Any]:
    return dict(metadata or ())
