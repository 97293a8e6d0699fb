import asyncio

import grpc
import numpy as np
import pytest

from gateway.demo.walkthrough.grpc_client import (
    INFER,
    GrpcError,
    call,
    read_tensors,
    write_request,
)
from tests.support.addresses import free_address
from tests.support.grpc.proto_file import ModelInferRequest
from tests.support.servers.grpc_server import fail, grpc_server

ARRAYS = {
    "IN0": np.arange(300, dtype=np.float32).reshape(2, 150),
    "IN1": np.array([0.5], np.float32),
}


def test_request_is_read_by_the_official_runtime() -> None:
    request = ModelInferRequest.FromString(write_request("add", ARRAYS, "FP32"))
    assert request.model_name == "add"
    assert [(each.name, each.datatype, list(each.shape)) for each in request.inputs] == [
        ("IN0", "FP32", [2, 150]),
        ("IN1", "FP32", [1]),
    ]
    assert list(request.raw_input_contents) == [array.tobytes() for array in ARRAYS.values()]


async def test_server_on_grpcio_is_called() -> None:
    with grpc_server() as server:
        url = f"http://{server.address}"
        response = await call(url, INFER, write_request("m", ARRAYS, "FP32"))
    tensors = {tensor.name: tensor.array for tensor in read_tensors(response, outputs=True)}
    assert tensors.keys() == {"OUT0", "OUT1"}
    assert np.array_equal(tensors["OUT0"], ARRAYS["IN0"])
    assert np.array_equal(tensors["OUT1"], ARRAYS["IN1"])


async def test_refused_call_is_an_error() -> None:
    refuse = fail(grpc.StatusCode.INTERNAL, "out of memory")
    with (
        grpc_server(unary={"ModelInfer": refuse}) as server,
        pytest.raises(GrpcError, match="out of memory"),
    ):
        await call(f"http://{server.address}", INFER, b"")


async def test_address_without_a_server_is_an_error() -> None:
    with pytest.raises(GrpcError, match="Connection refused"):
        await call(f"http://{free_address()}", INFER, b"")


async def test_server_that_leaves_within_a_response_is_an_error() -> None:
    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(24)
        writer.write(b"\0\0\5\0\0\0\0\0\1ab")
        writer.close()

    server = await asyncio.start_server(leave, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(GrpcError, match="does not speak HTTP/2"):
            await call(f"http://{host}:{port}", INFER, b"")


@pytest.mark.parametrize(
    "message",
    [
        b"\x08\x01",  # a number
        b"\x2a\x05",  # a field that is cut off
        b"\x2a\x03\x0a\x01x\x32\x00",  # a tensor without a datatype
        b"\x2a\x0c\x0a\x01x\x12\x04FP32\x1a\x01\x03\x32\x01a",  # contents that do not fit
        b"\x32\x00",  # contents without a tensor
        b"\xff",
    ],
)
def test_other_messages_are_errors(message: bytes) -> None:
    with pytest.raises(GrpcError, match="the message has no tensors"):
        read_tensors(message, outputs=True)
