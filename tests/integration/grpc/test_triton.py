"""Clients get from Triton through the gateway what they get without it, with gRPC on one side.

A stream to Triton's HTTP port gets what its gRPC port sends. An error comes with model, id and the
note that it is the last response; Triton leaves them out where it refuses a request before the
inference. The model may name its error in other words.

Requests to generate get from Triton's gRPC port what its HTTP port sends. What differs on purpose:

- A request that is invalid by itself gets 400 in the words of the gateway, where Triton says 400 or
  500 in its own; so do integers out of range, which Triton wraps.
- ``generate`` gets 400 unless the model sends one response; Triton sends that error with the status
  of the first response, mostly 200. The gateway doesn't wait for more than two of them.
- FP16 and BF16 inputs are served.
- Numbers and control characters have another spelling with the same value.
- Bytes that are not UTF-8 are an error, as the policy says, where Triton sends invalid JSON.
- ``timeout``, ``priority``, ``sequence_id``, ``sequence_start`` and ``sequence_end`` mean what they
  mean over gRPC; as parameters of the model Triton's gRPC endpoint knows none of them, and none
  that begins with ``triton_``.
"""

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.integration.support.client import Client, Response
from tests.integration.support.client_forms import open_channel, stub_of
from tests.integration.support.gateway import Gateway, running_gateway
from tests.integration.triton.server import HOST, TritonServer

pytestmark = pytest.mark.triton

PATIENCE = 60.0


@pytest.fixture(scope="module")
def to_grpc(triton: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway in front of Triton's gRPC port."""
    folder = tmp_path_factory.mktemp("gateway")
    with running_gateway(folder, triton.grpc_url, dialect="auto") as running:
        yield running


@pytest.fixture(scope="module")
def own(triton: TritonServer) -> Iterator[Any]:
    """Triton's own gRPC port."""
    with open_channel(f"{HOST}:{triton.grpc_port}") as channel:
        yield stub_of(channel)


@pytest.fixture(scope="module")
def over_grpc(to_grpc: Gateway) -> Iterator[Any]:
    with open_channel(to_grpc.address) as channel:
        yield stub_of(channel)


@pytest.fixture(scope="module")
def over_http(gateway: Gateway) -> Iterator[Any]:
    """The gateway in front of Triton's HTTP port, for a client over gRPC."""
    with open_channel(gateway.address) as channel:
        yield stub_of(channel)


@pytest.fixture(scope="module")
def http_over_grpc(to_grpc: Gateway) -> Iterator[Client]:
    """The gateway in front of Triton's gRPC port, for a client over HTTP."""
    with Client(to_grpc.host, to_grpc.port) as client:
        yield client


# ------------------------------------------------------------------------------------- unary calls


def outcome(stub: Any, rpc: str, request: Any) -> Any:
    """Return the response, or code and text of the error."""
    try:
        return getattr(stub, rpc)(request, timeout=PATIENCE)
    except grpc.RpcError as error:
        return error.code(), error.details()


def request_of(rpc: str, **fields: Any) -> Any:
    return getattr(service_pb2, f"{rpc}Request")(**fields)


def infer_request(
    model: str = "identity_fp32", shape: tuple[int, ...] = (3,), **fields: Any
) -> Any:
    request = request_of("ModelInfer", model_name=model, **fields)
    request.inputs.add(name="INPUT0", datatype="FP32", shape=shape)
    size = math.prod(shape)
    request.raw_input_contents.append(np.arange(size, dtype=np.float32).tobytes())
    return request


def typed_request() -> Any:
    request = request_of("ModelInfer", model_name="identity_fp32", id="8")
    tensor = request.inputs.add(name="INPUT0", datatype="FP32", shape=[2])
    tensor.contents.fp32_contents.extend([0.1, -2])
    return request


CALLS: dict[str, tuple[str, Any]] = {
    "server metadata": ("ServerMetadata", request_of("ServerMetadata")),
    "no model metadata": ("ModelMetadata", request_of("ModelMetadata")),
    "config": ("ModelConfig", request_of("ModelConfig", name="batched_fp32")),
    "index": ("RepositoryIndex", request_of("RepositoryIndex", ready=True)),
    "load unknown": ("RepositoryModelLoad", request_of("RepositoryModelLoad", model_name="nope")),
    "infer typed": ("ModelInfer", typed_request()),
    "infer an image": ("ModelInfer", infer_request("image", (1, 3, 224, 224))),
    "infer that fails": ("ModelInfer", infer_request("fails", (1,))),
    "infer decoupled": ("ModelInfer", infer_request("stream")),
}
"""Calls that pass: what Triton does with them is not the gateway's."""


@pytest.mark.parametrize(("rpc", "request_"), CALLS.values(), ids=CALLS)
def test_unary_call_has_the_same_outcome(own: Any, over_grpc: Any, rpc: str, request_: Any) -> None:
    # In this order, so that what is loaded has been loaded.
    expected = outcome(own, rpc, request_)
    assert outcome(over_grpc, rpc, request_) == expected


CONFIG_OF_ZEROS = """{
  "name": "zeros", "backend": "python", "max_batch_size": 0,
  "input": [{"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [1]}],
  "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
  "instance_group": [{"kind": "KIND_CPU", "count": 1}],
  "parameters": {"color": {"string_value": "red"}}
}"""


def test_model_is_unloaded_and_loaded(own: Any, over_grpc: Any) -> None:
    request = request_of("RepositoryModelUnload", model_name="zeros")
    unloaded = outcome(over_grpc, "RepositoryModelUnload", request)
    assert unloaded == service_pb2.RepositoryModelUnloadResponse()
    ready = request_of("ModelReady", name="zeros")
    try:
        assert not outcome(own, "ModelReady", ready).ready
        assert not outcome(over_grpc, "ModelReady", ready).ready
    finally:
        config = {"config": service_pb2.ModelRepositoryParameter(string_param=CONFIG_OF_ZEROS)}
        load = request_of("RepositoryModelLoad", model_name="zeros", parameters=config)
        loaded = outcome(over_grpc, "RepositoryModelLoad", load)
    assert loaded == service_pb2.RepositoryModelLoadResponse()
    assert outcome(over_grpc, "ModelReady", ready).ready
    config = outcome(over_grpc, "ModelConfig", request_of("ModelConfig", name="zeros")).config
    assert config.parameters["color"].string_value == "red"


def test_classification_of_strings_kills_no_triton(own: Any, over_grpc: Any) -> None:
    """Triton 2.51 dies as it compares them."""
    request = request_of("ModelInfer", model_name="identity_bytes")
    request.inputs.add(name="INPUT0", datatype="BYTES", shape=[2])
    request.raw_input_contents.append(b"\1\0\0\0a\1\0\0\0b")
    request.outputs.add(name="OUTPUT0").parameters["classification"].int64_param = 1
    code, text = outcome(over_grpc, "ModelInfer", request)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert text == "output 'OUTPUT0' of model 'identity_bytes' is BYTES, which cannot be classified"
    assert outcome(own, "ServerLive", request_of("ServerLive")).live


# ----------------------------------------------------------------------------------------- streams

REQUESTS = [
    infer_request(id="1"),
    infer_request("fails", (1,), id="2"),
    infer_request("nope", (1,)),
    infer_request("versioned", (1,), model_version="1"),
    infer_request("identity_bytes", (1,)),
    infer_request("stream", (1,)),
    infer_request(shape=(0,)),
]


def stream(
    stub: Any, *requests: Any, **metadata: str
) -> tuple[list[service_pb2.ModelStreamInferResponse], grpc.StatusCode, str]:
    """Return the messages of a stream, and its status."""
    call = stub.ModelStreamInfer(iter(requests), timeout=PATIENCE, metadata=[*metadata.items()])
    messages = []
    with suppress(grpc.RpcError):
        messages.extend(call)
    return messages, call.code(), call.details()


def test_messages_over_http_are_those_of_triton(own: Any, over_http: Any) -> None:
    # Triton 2.51 crashes at times with several of these in one stream.
    expected = [message for request in REQUESTS for message in stream(own, request)[0]]
    found, code, text = stream(over_http, *REQUESTS)
    assert code is grpc.StatusCode.OK, text
    assert len(found) == len(expected) == len(REQUESTS)
    for mine, its in zip(found, expected, strict=True):
        assert bool(mine.error_message) == bool(its.error_message)
        if not its.error_message:
            assert mine.infer_response == its.infer_response


@pytest.mark.parametrize("request_alone", REQUESTS, ids=lambda request: request.model_name)
def test_status_of_a_stream_is_that_of_triton(
    request_alone: service_pb2.ModelInferRequest, own: Any, over_grpc: Any
) -> None:
    """A client may want the first error as the status."""
    found = stream(over_grpc, request_alone, triton_grpc_error="true")
    assert found == stream(own, request_alone, triton_grpc_error="true")


def test_stream_that_would_kill_triton_ends_with_the_first_error(own: Any, over_grpc: Any) -> None:
    """Triton 2.51 dies if its model goes on after the error, were it only to say that it ends.

    The model ends here: Triton also dies at times if a stream is cancelled whose model goes on.
    """
    request = request_of("ModelInfer", model_name="decoupled", id="7")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(b"\2\0\0\0hi")
    for name, value in (("count", 2), ("fail_at", 1)):
        request.parameters[name].int64_param = value
    for _ in range(10):
        messages, code, text = stream(over_grpc, request, triton_grpc_error="true")
        assert len(messages) == 1
        assert (code, text) == (grpc.StatusCode.INTERNAL, "no response 1")
    assert len(stream(own, REQUESTS[0])[0]) == 1  # it is alive


# ---------------------------------------------------------------------------------------- generate


def _text(**members: Any) -> dict[str, Any]:
    return {"text_input": "hi", **members}


BOTH = ("generate", "generate_stream")
STREAM = ("generate_stream",)
GENERATED: list[tuple[str, Any, tuple[str, ...]]] = [
    ("decoupled", _text(id="42", parameters={"count": 1, "a": True, "s": "x"}, extra=7), BOTH),
    ("decoupled", _text(big=2**63 - 1, small=-(2**63), above=2**63, huge=1e300, whole=1.0), BOTH),
    ("decoupled", {"text_input": 'quotes " \\ / \n\t \u2028 \u007f é 😀'}, BOTH),
    ("decoupled", {"text_input": [["in two"]]}, BOTH),
    ("decoupled", {"parameters": {"text_input": "among the parameters"}}, BOTH),
    ("decoupled", _text(count=1, fail_at=0), BOTH),
    ("decoupled", {}, BOTH),
    ("nope", {}, BOTH),
    ("versioned/versions/1", {"INPUT0": 1}, BOTH),
    ("with_parameters", {"INPUT0": 1, "id": "7", "x": 3}, BOTH),
    (
        "mixed",
        {"IN_FP32": [1, 2.5], "IN_INT64": 5, "IN_BYTES": ["a", "b"], "IN_BOOL": [True]},
        BOTH,
    ),
    ("mixed", {"IN_FP32": [], "IN_INT64": [], "IN_BYTES": "", "IN_BOOL": False}, BOTH),
    ("batched_fp32", {"INPUT0": [1, 2, 3, 4, 5, 6, 7, 8]}, BOTH),
    ("batched_bytes", {"INPUT0": ["a", "b"]}, BOTH),
    ("stream", {"text_input": "café"}, STREAM),
    ("decoupled", _text(count=0), STREAM),
    ("decoupled", _text(count=20, id="7"), STREAM),
    ("decoupled", _text(count=3, fail_at=1), STREAM),
]


@pytest.mark.parametrize(("model", "document", "kinds"), GENERATED)
def test_generated_response_is_that_of_triton(
    direct: Client, http_over_grpc: Client, model: str, document: Any, kinds: tuple[str, ...]
) -> None:
    for kind in kinds:
        path, body = f"/v2/models/{model}/{kind}", json.dumps(document).encode()
        expected = direct.send("POST", path, body)
        assert _seen(http_over_grpc.send("POST", path, body)) == _seen(expected)


def _seen(response: Response) -> tuple[int, str | None, list[Any]]:
    """Return what a client sees, with parameters in an order of their own.

    Triton's gRPC endpoint has them in a map.
    """
    events = response.body.split(b"\n\n")
    return response.status, response.headers["Content-Type"], [*map(_without_order, events)]


def _without_order(text: bytes) -> bytes:
    fields = json.loads(text.removeprefix(b"data: ") or b"null")
    if not isinstance(fields, dict):
        return text
    for name in ("parameters", "OUTPUT0"):
        value = fields.get(name)
        if isinstance(value, str) and value.startswith("{"):
            ordered = json.dumps(dict(sorted(json.loads(value).items()))).encode()
            text = text.replace(json.dumps(value, ensure_ascii=False).encode(), ordered)
    return text


@pytest.mark.parametrize("count", [0, 1000])
def test_generate_wants_one_response(direct: Client, http_over_grpc: Client, count: int) -> None:
    path, body = "/v2/models/decoupled/generate", json.dumps(_text(count=count)).encode()
    expected = direct.send("POST", path, body)
    found = http_over_grpc.send("POST", path, body)
    assert (found.status, found.body) == (400, expected.body)
    assert expected.status == 200
