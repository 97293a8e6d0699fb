"""The server that clients and proxies of gRPC reach through the gateway."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import grpc

from tests.interop.grpc.calls import EXPECTED, MISSING, PATIENCE, report
from tests.support.grpc.proto_file import ModelInferRequest, message_class
from tests.support.servers.grpc_server import SERVICE, GrpcServer, infer_identity


class PeerServer(GrpcServer):
    """Has the models identity, missing and slow, of which no call ends before its client leaves."""

    def __init__(self) -> None:
        super().__init__(unary={"ModelInfer": self._infer})
        self._left: set[str] = set()
        self._changed = threading.Condition()

    def _infer(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        request = ModelInferRequest.FromString(data)
        if request.model_name == "missing":
            context.set_trailing_metadata((("found-by", "by name"),))
            context.abort(grpc.StatusCode.NOT_FOUND, MISSING)
        if request.model_name == "slow":
            context.send_initial_metadata(())
            over = threading.Event()
            if context.add_callback(over.set):
                over.wait(PATIENCE)
            with self._changed:
                self._left.add(request.id)
                self._changed.notify_all()
        return infer_identity(data, context)

    def has_been_left(self) -> bool:
        """Wait until clients have left both calls to the model slow; return whether they have."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._left == {"deadline", "cancel"}, PATIENCE / 2
            )

    async def check(self, reported: dict[str, Any]) -> None:
        """Assert that a client has seen what it should, and that the server saw it leave."""
        assert reported == EXPECTED
        assert await asyncio.to_thread(self.has_been_left)


@asynccontextmanager
async def peer_server() -> AsyncIterator[PeerServer]:
    """Run the server."""
    server = PeerServer()
    server.start()
    try:
        yield server
    finally:
        await asyncio.to_thread(server.stop)


async def calls_by_grpcio(url: str) -> dict[str, Any]:
    """Make the calls by the grpcio of this environment."""

    def call() -> dict[str, Any]:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(urlsplit(url).netloc, options) as channel:
            infer, stream = (
                make(
                    f"/{SERVICE}/{method}",
                    request_serializer=ModelInferRequest.SerializeToString,
                    response_deserializer=message_class(response).FromString,
                )
                for make, method, response in (
                    (channel.unary_unary, "ModelInfer", "ModelInferResponse"),
                    (channel.stream_stream, "ModelStreamInfer", "ModelStreamInferResponse"),
                )
            )
            return report(infer, stream, ModelInferRequest)

    return await asyncio.to_thread(call)
