"""The gRPC calls of the show."""

import asyncio
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from gateway.demo.server.server import DemoServer
from gateway.demo.walkthrough.client import DemoClient, GrpcResult, ShowError
from tests.support.addresses import free_address
from tests.support.servers.grpc_server import fail, grpc_server

ARRAYS = {
    "IN0": np.arange(300, dtype=np.float32).reshape(2, 150),
    "IN1": np.array([0.5], np.float32),
}


async def _infer(server: DemoServer, address: str) -> GrpcResult:
    async with DemoClient(server) as client:
        return await client.infer_grpc(f"http://{address}", "m", ARRAYS)


async def test_server_on_grpcio_is_called(server: DemoServer) -> None:
    with grpc_server() as upstream:
        result = await _infer(server, upstream.address)
    assert [*result.inputs] == ["IN0", "IN1"]
    for given, array in zip(result.outputs.values(), ARRAYS.values(), strict=True):
        assert np.array_equal(given, array)


@pytest.fixture
def refusing() -> Iterator[str]:
    refuse = fail(grpc.StatusCode.INTERNAL, "out of memory")
    with grpc_server(unary={"ModelInfer": refuse}) as upstream:
        yield upstream.address


async def test_call_without_a_response_is_an_error(server: DemoServer, refusing: str) -> None:
    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(24)
        writer.write(b"\0\0\5\0\0\0\0\0\1ab")
        writer.close()

    leaving = await asyncio.start_server(leave, "127.0.0.1", 0)
    async with leaving:
        host, port = leaving.sockets[0].getsockname()
        for address, said in [
            (refusing, "out of memory"),
            (free_address(), "Connection refused"),
            (f"{host}:{port}", "does not speak HTTP/2"),
        ]:
            with pytest.raises(ShowError, match=said):
                await _infer(server, address)


@pytest.mark.parametrize(
    "message",
    [
        b"\x2a\x05",  # a field that is cut off
        b"\x2a\x03\x0a\x01x\x32\x00",  # a tensor without a datatype
        b"\x2a\x0c\x0a\x01x\x12\x04FP32\x1a\x01\x03\x32\x01a",  # contents that do not fit
        b"\x32\x00",  # contents without a tensor
    ],
)
def test_other_messages_are_errors(message: bytes) -> None:
    with pytest.raises(ShowError, match="the response was"):
        _ = GrpcResult("", b"", message, 0.0, None).outputs
