"""A stream over gRPC gets the same from a Triton over HTTP as from its own gRPC endpoint.

An error comes with model, id and the note that it is the last response; Triton leaves them out
where it refuses a request before the inference. The model may name its error in other words.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.integration.support.gateway import running_gateway
from tests.integration.triton.server import HOST, TritonServer

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


def infer_request(model: str, *values: float, **members: Any) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model, **members)
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[len(values)])
    request.raw_input_contents.append(np.array(values, "<f4").tobytes())
    return request


REQUESTS = [
    infer_request("identity_fp32", 1.5, -2.0, id="1"),
    infer_request("fails", 1.0, id="2"),
    infer_request("nope", 1.0),
    infer_request("versioned", 1.0, model_version="1"),
    infer_request("versioned", 1.0),
    infer_request("identity_bytes", 1.0),
    infer_request("stream", 1.0),
    infer_request("identity_fp32"),
]


@pytest.fixture(scope="module")
def over_http(triton: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a gateway that reaches the Triton server over HTTP."""
    with running_gateway(tmp_path_factory.mktemp("gateway"), triton.http_url) as gateway:
        yield f"{gateway.host}:{gateway.port}"


def _outcome(
    address: str, *requests: service_pb2.ModelInferRequest, **metadata: str
) -> tuple[list[service_pb2.ModelStreamInferResponse], grpc.StatusCode, str]:
    """Return the messages of a stream, and its status."""
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(
            METHOD,
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )(iter(requests), timeout=60, metadata=[*metadata.items()])
        messages = []
        with suppress(grpc.RpcError):
            messages.extend(call)
        return messages, call.code(), call.details()


def _stream(
    address: str, *requests: service_pb2.ModelInferRequest
) -> list[service_pb2.ModelStreamInferResponse]:
    messages, code, text = _outcome(address, *requests)
    assert code is grpc.StatusCode.OK, text
    return messages


def _until_error(
    address: str, request: service_pb2.ModelInferRequest
) -> tuple[list[service_pb2.ModelStreamInferResponse], grpc.StatusCode, str]:
    """Send a request of a client that wants the first error as the status."""
    return _outcome(address, request, triton_grpc_error="true")


def test_messages_are_those_of_triton(triton: TritonServer, over_http: str) -> None:
    address = f"{HOST}:{triton.grpc_port}"
    # Triton 2.51 crashes at times with several of these in one stream.
    expected = [message for request in REQUESTS for message in _stream(address, request)]
    found = _stream(over_http, *REQUESTS)
    assert len(found) == len(expected) == len(REQUESTS)
    for mine, own in zip(found, expected, strict=True):
        assert bool(mine.error_message) == bool(own.error_message)
        if not own.error_message:
            assert mine.infer_response == own.infer_response


def _decoupled(**parameters: int) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name="decoupled", id="7")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(b"\2\0\0\0hi")
    for name, value in parameters.items():
        request.parameters[name].int64_param = value
    return request


@pytest.fixture(scope="module")
def over_grpc(triton: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a gateway that reaches the Triton server over gRPC."""
    url = f"grpc://{HOST}:{triton.grpc_port}"
    with running_gateway(tmp_path_factory.mktemp("gateway"), url) as gateway:
        yield f"{gateway.host}:{gateway.port}"


@pytest.mark.parametrize("request_alone", REQUESTS, ids=lambda request: request.model_name)
def test_status_of_a_stream_is_that_of_triton(
    request_alone: service_pb2.ModelInferRequest, triton: TritonServer, over_grpc: str
) -> None:
    found = _until_error(over_grpc, request_alone)
    assert found == _until_error(f"{HOST}:{triton.grpc_port}", request_alone)


def test_stream_that_would_kill_triton_ends_with_the_first_error(
    triton: TritonServer, over_grpc: str
) -> None:
    """Triton 2.51 dies if its model goes on after the error, were it only to say that it ends.

    The model ends here: Triton also dies at times if a stream is cancelled whose model goes on.
    """
    for _ in range(10):
        messages, code, text = _until_error(over_grpc, _decoupled(count=2, fail_at=1))
        assert len(messages) == 1
        assert (code, text) == (grpc.StatusCode.INTERNAL, "no response 1")
    assert len(_stream(f"{HOST}:{triton.grpc_port}", REQUESTS[0])) == 1  # it is alive
