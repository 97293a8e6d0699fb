"""A stream over gRPC gets the same from a Triton over HTTP as from its own gRPC endpoint.

An error comes with model, id and the note that it is the last response; Triton leaves them out
where it refuses a request before the inference. The model may name its error in other words.
"""

from collections.abc import Iterator
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


def _stream(
    address: str, *requests: service_pb2.ModelInferRequest
) -> list[service_pb2.ModelStreamInferResponse]:
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(
            METHOD,
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )
        return list(call(iter(requests), timeout=60))


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
