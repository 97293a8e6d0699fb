"""A small inference server process over gRPC.

    python -m tests.resilience.grpc_server HOST PORT

It answers with the tensors of each request, unary and streamed. A request whose id begins with
``slow`` takes half a second.
"""

from __future__ import annotations

import sys
import threading
import time

import grpc

from tests.support.grpc.proto_file import ModelInferRequest
from tests.support.servers.grpc_server import GrpcServer, infer_identity

SLOW = "slow"
_DELAY = 0.5


def _main(host: str, port: str) -> None:
    def infer(data: bytes, context: grpc.ServicerContext) -> bytes:
        for records in (server.paths, server.metadata, server.requests):
            records.clear()  # it serves for long
        if ModelInferRequest.FromString(data).id.startswith(SLOW):
            time.sleep(_DELAY)
        return infer_identity(data, context)

    server = GrpcServer({"ModelInfer": infer}, host=host, port=int(port))
    server.start()
    print("ready", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    _main(*sys.argv[1:])
