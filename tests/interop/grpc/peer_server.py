"""The server that clients and proxies of gRPC reach through the gateway.

It is a process of its own: grpcio's server can end its process by a segmentation fault when calls
are cancelled, and the tests go on without it.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import grpc

from tests.interop.grpc.calls import EXPECTED, MISSING, PATIENCE, report
from tests.support.gateway_process import Process, running_process
from tests.support.grpc.proto_file import ModelInferRequest, message_class
from tests.support.servers.grpc_server import SERVICE, GrpcServer, infer_identity


class PeerServer:
    """Has the models identity, missing and slow, of which no call ends before its client leaves."""

    def __init__(self, process: Process, url: str) -> None:
        self.url = url
        self._process = process

    async def check(self, reported: dict[str, Any]) -> None:
        """Assert that a client has seen what it should, and that the server saw it leave."""
        assert reported == EXPECTED
        for call in ("deadline", "cancel"):
            await self._process.wait_for_output(f"left: {call}\n")


@asynccontextmanager
async def peer_server() -> AsyncIterator[PeerServer]:
    """Run the server."""
    async with running_process(sys.executable, "-m", __name__) as process:
        found = await process.wait_for_output(r"listening on (\S+)")
        yield PeerServer(process, found[1])


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


def _infer(data: bytes, context: grpc.ServicerContext) -> bytes:
    request = ModelInferRequest.FromString(data)
    if request.model_name == "missing":
        context.set_trailing_metadata((("found-by", "by name"),))
        context.abort(grpc.StatusCode.NOT_FOUND, MISSING)
    if request.model_name == "slow":
        context.send_initial_metadata(())
        over = threading.Event()
        if context.add_callback(over.set):
            over.wait(PATIENCE)
        _say(f"left: {request.id}")
    return infer_identity(data, context)


def _say(line: str) -> None:
    # In one write: several threads do so.
    sys.stderr.write(f"{line}\n")


def _main() -> None:
    server = GrpcServer(unary={"ModelInfer": _infer})
    server.start()
    _say(f"listening on {server.url}")
    threading.Event().wait()


if __name__ == "__main__":
    _main()
