"""A small inference server process over gRPC.

    python -m tests.resilience.grpc_server HOST PORT

It answers with the tensors of each request, unary and streamed. A request whose id begins with
``slow`` takes half a second.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

SLOW = "slow"
_DELAY = 0.5


class _Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.id.startswith(SLOW):
            await asyncio.sleep(_DELAY)
        response = service_pb2.ModelInferResponse(
            model_name=request.model_name, model_version="1", id=request.id
        )
        for tensor in request.inputs:
            output = response.outputs.add(name=tensor.name, datatype=tensor.datatype)
            output.shape.extend(tensor.shape)
            if not request.raw_input_contents:
                output.contents.CopyFrom(tensor.contents)
        response.raw_output_contents.extend(request.raw_input_contents)
        return response

    async def ModelStreamInfer(  # noqa: N802
        self, requests: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[Any]:
        async for request in requests:
            response = await self.ModelInfer(request, context)
            yield service_pb2.ModelStreamInferResponse(infer_response=response)

    async def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ServerReadyResponse(ready=True)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        response = service_pb2.ModelMetadataResponse(name=request.name, versions=["1"])
        for tensors in (response.inputs, response.outputs):
            tensors.add(name="N", datatype="INT32", shape=[-1])
        return response


async def _main(host: str, port: str) -> None:
    unlimited = ("grpc.max_receive_message_length", "grpc.max_send_message_length")
    server = grpc.aio.server(
        options=[*((name, -1) for name in unlimited), ("grpc.so_reuseport", 0)]
    )
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Servicer(), server)
    server.add_insecure_port(f"{host}:{port}")
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
