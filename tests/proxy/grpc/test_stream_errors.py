"""A stream ends with the first error of its model if the client asks for that, at the gateway."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol.grpc.framing import frame
from gateway.proxy.body_io import stream
from gateway.proxy.grpc.stream_errors import StreamError, end_at_first_error
from tests.support.gateway import running_gateway
from tests.support.grpc.client import GrpcResponse, grpc_client
from tests.support.grpc.proto_file import message_class
from tests.support.servers.grpc_server import grpc_server


def _message(error: str = "", **response: Any) -> bytes:
    message = message_class("ModelStreamInferResponse")(error_message=error)
    if response:
        message.infer_response.CopyFrom(message_class("ModelInferResponse")(**response))
    return bytes(message.SerializeToString())


FIRST = _message(model_name="m", id="1")
EARLY_ERROR = _message("unknown model")
ERROR = _message("no response 1", model_name="m", id="1")
LARGE = _message(model_name="m", raw_output_contents=[bytes(100_000)])


async def _until_error(*pieces: bytes) -> tuple[bytes, str]:
    sent = b""
    try:
        async for chunk in end_at_first_error(stream(pieces)):
            sent += chunk
    except StreamError as error:
        return sent, error.text
    return sent, ""


def _framed(*messages: bytes, is_compressed: bool = False) -> bytes:
    return b"".join(frame(len(each), is_compressed) + each for each in messages)


@given(cuts=st.lists(st.integers(0, 150_000), max_size=8))
async def test_stream_ends_at_the_error_of_a_model_wherever_it_is_cut(cuts: list[int]) -> None:
    before = _framed(FIRST, b"", EARLY_ERROR, LARGE)
    body = before + _framed(ERROR, FIRST)
    ends = sorted(min(cut, len(body)) for cut in cuts)
    pieces = [body[start:end] for start, end in zip([0, *ends], [*ends, len(body)], strict=True)]
    assert await _until_error(*pieces) == (before, "no response 1")


@pytest.mark.parametrize(
    "body",
    [
        _framed(FIRST, EARLY_ERROR),
        _framed(ERROR, is_compressed=True),
        _framed(b"\x0a\x05ab"),
        _framed(_message("x" * 70_000, model_name="m")),
    ],
    ids=["early", "compressed", "invalid", "large"],
)
async def test_other_messages_pass(body: bytes) -> None:
    assert await _until_error(body) == (body, "")


async def _call(*metadata: tuple[str, str]) -> tuple[GrpcResponse, dict[str, Any]]:
    def serve(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterable[bytes]:
        next(requests)
        yield from (FIRST, ERROR, FIRST)

    with grpc_server(streams={"ModelStreamInfer": serve}) as server:
        async with running_gateway(server.url) as gateway, grpc_client(gateway.url) as client:
            response = await client.call("ModelStreamInfer", b"\x0a\x01m", metadata=metadata)
            (state,) = gateway.pool.snapshot()
            assert state.last_error is None
    return response, dict(server.metadata[-1])


async def test_metadata_that_kills_a_triton_does_not_reach_it() -> None:
    response, sent = await _call(("triton_grpc_error", "true"))
    assert (response.code, response.text) == (grpc.StatusCode.INTERNAL, "no response 1")
    assert response.messages == [FIRST]
    assert "triton_grpc_error" not in sent
    assert "grpc-accept-encoding" not in sent


@pytest.mark.parametrize("metadata", [(), (("triton_grpc_error", "false"),)])
async def test_errors_are_messages_for_other_clients(metadata: tuple[Any, ...]) -> None:
    response, sent = await _call(*metadata)
    assert (response.code, response.messages) == (grpc.StatusCode.OK, [FIRST, ERROR, FIRST])
    assert "triton_grpc_error" not in sent
