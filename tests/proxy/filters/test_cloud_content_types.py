"""Requests and responses of cloud clients, for a server that knows only the header."""

import json

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.operations import parse_operation
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.calls.dispatch import proxy_call
from gateway.proxy.interfaces import Call
from tests.support.doubles.streaming import (
    EventLog,
    ScriptedClientResponse,
    ScriptedEndpoint,
    ScriptedRequest,
    ScriptedUpstreamResponse,
    make_destination,
)
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_response_header,
    json_request,
    metadata,
)

SAGEMAKER = "application/vnd.sagemaker-triton.binary+json"
VERTEX_AI = "application/vnd.vertex-ai-triton.binary+json"

TENSOR = FLOATS.tobytes()
REQUEST = binary_header(12)
ALL_BINARY = binary_header(12, binary_output=True)
ANSWER_HEADER = binary_response_header(12)
TWO_OUTPUTS = binary_response_header(12, 4)


def binary(header: bytes, *tensors: bytes) -> ScriptedUpstreamResponse:
    """Return a server's response, with the type that Triton sends."""
    body = b"".join((header, *tensors))
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(header))}
    return ScriptedUpstreamResponse(200, {**headers, "Content-Length": str(len(body))}, [body])


ANSWER = binary(ANSWER_HEADER, TENSOR)


class Scene:
    """Calls to one server."""

    def __init__(self, *steps: ScriptedUpstreamResponse) -> None:
        self.endpoint = ScriptedEndpoint(EventLog(), *steps)

    async def run(self, body: bytes, headers: dict[str, str]) -> ScriptedClientResponse:
        log = EventLog()
        request = ScriptedRequest(log, "POST", INFER, headers, [body])
        response = ScriptedClientResponse(log)
        with Deadline(9, 9) as deadline:
            operation = parse_operation("POST", INFER)
            await proxy_call(
                Call(request, response, operation, make_destination(self.endpoint), deadline)
            )
        return response

    @property
    def got_the_protocols_header(self) -> bool:
        headers = self.endpoint.requests[-1].headers
        types = headers.getall("Content-Type")
        return types == ["application/octet-stream"] and len(headers.getall(HEADER_LENGTH)) == 1

    @property
    def tensors(self) -> bytes:
        return self.endpoint.bodies[-1][int(self.endpoint.requests[-1].headers[HEADER_LENGTH]) :]


def of_type(content_type: str, size: object) -> dict[str, str]:
    return {"Content-Type": f"{content_type};json-header-size={size}"}


@pytest.mark.parametrize("content_type", [SAGEMAKER, VERTEX_AI])
async def test_binary_request_gets_a_json_response(content_type: str) -> None:
    scene = Scene(ANSWER)
    response = await scene.run(REQUEST + TENSOR, of_type(content_type, len(REQUEST)))
    assert scene.got_the_protocols_header
    assert scene.tensors == TENSOR
    assert response.headers["Content-Type"] == "application/json"
    assert HEADER_LENGTH not in response.headers
    assert json.loads(response.body)["outputs"][0]["data"] == [1.5, -2, 3e30]


async def test_sagemaker_client_gets_the_header_length_in_the_content_type() -> None:
    scene = Scene(ANSWER)
    response = await scene.run(ALL_BINARY + TENSOR, of_type(SAGEMAKER, len(ALL_BINARY)))
    assert scene.got_the_protocols_header
    expected = f"{SAGEMAKER};json-header-size={len(ANSWER_HEADER)}"
    assert response.headers.getall("Content-Type") == [expected]
    assert HEADER_LENGTH not in response.headers
    assert response.body == ANSWER_HEADER + TENSOR


async def test_vertex_client_gets_the_header_length_in_a_header() -> None:
    # Triton's endpoint sends the header.
    scene = Scene(ANSWER)
    response = await scene.run(ALL_BINARY + TENSOR, of_type(VERTEX_AI, len(ALL_BINARY)))
    assert scene.got_the_protocols_header
    assert response.headers["Content-Type"] == "application/octet-stream"
    assert response.headers[HEADER_LENGTH] == str(len(ANSWER_HEADER))
    assert response.body == ANSWER_HEADER + TENSOR


async def test_mixed_response_has_its_header_length_in_the_content_type() -> None:
    fields = json.loads(json_request())
    fields["outputs"] = [{"name": "OUT0", "parameters": {"binary_data": True}}, {"name": "OUT1"}]
    body = json.dumps(fields).encode()
    # The whole request is JSON: the size is that of the body, or missing.
    for headers in (of_type(SAGEMAKER, len(body)), {"Content-Type": SAGEMAKER}):
        scene = Scene(binary(TWO_OUTPUTS, TENSOR, bytes(4)))
        response = await scene.run(body, headers)
        assert scene.got_the_protocols_header
        start, _, size = response.headers["Content-Type"].partition(";json-header-size=")
        assert start == SAGEMAKER
        header, tensors = response.body[: int(size)], response.body[int(size) :]
        assert tensors == TENSOR
        assert json.loads(header)["outputs"][1]["data"] == [0]
        assert HEADER_LENGTH not in response.headers


async def test_size_of_0_means_raw_binary() -> None:
    scene = Scene(
        ScriptedUpstreamResponse(200, {}, [metadata(-1)]), ScriptedUpstreamResponse(404), ANSWER
    )
    response = await scene.run(TENSOR, of_type(SAGEMAKER, 0))
    assert scene.got_the_protocols_header
    assert scene.tensors == TENSOR
    expected = f"{SAGEMAKER};json-header-size={len(ANSWER_HEADER)}"
    assert response.headers["Content-Type"] == expected


async def test_equal_header_lengths_in_header_and_content_type_are_accepted() -> None:
    headers = {**of_type(SAGEMAKER, len(ALL_BINARY)), HEADER_LENGTH: str(len(ALL_BINARY))}
    scene = Scene(ANSWER)
    response = await scene.run(ALL_BINARY + TENSOR, headers)
    assert scene.got_the_protocols_header
    assert response.body == ANSWER_HEADER + TENSOR
    # A type without a size states no length.
    scene = Scene(ANSWER)
    headers = {"Content-Type": VERTEX_AI, HEADER_LENGTH: str(len(ALL_BINARY))}
    assert (await scene.run(ALL_BINARY + TENSOR, headers)).body == ANSWER_HEADER + TENSOR


SIZE = len(ALL_BINARY) + len(TENSOR)


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        (
            {**of_type(SAGEMAKER, 5), HEADER_LENGTH: "6"},
            f"{HEADER_LENGTH} is 6, but json-header-size of the Content-Type 5",
        ),
        (
            {**of_type(VERTEX_AI, 5), HEADER_LENGTH: "x"},
            f"{HEADER_LENGTH} must be one number of bytes, got 'x'",
        ),
        (
            of_type(SAGEMAKER, SIZE + 1),
            f"json-header-size of the Content-Type is {SIZE + 1}, the body has {SIZE} bytes",
        ),
        (
            of_type(VERTEX_AI, "-1"),
            "json-header-size of the Content-Type must be a number of bytes, got '-1'",
        ),
        (
            {"Content-Type": f"application/json, {SAGEMAKER};json-header-size=5"},
            f"the Content-Type must begin with {SAGEMAKER}, got "
            f"'application/json, {SAGEMAKER};json-header-size=5'",
        ),
    ],
)
async def test_invalid_header_length_is_refused(headers: dict[str, str], message: str) -> None:
    scene = Scene()
    with pytest.raises(GatewayError) as caught:
        await scene.run(ALL_BINARY + TENSOR, headers)
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    assert caught.value.message == message
    assert scene.endpoint.requests == []


async def test_header_length_beyond_a_chunked_body_is_refused() -> None:
    headers = {**of_type(SAGEMAKER, SIZE + 1), "Transfer-Encoding": "chunked"}
    with pytest.raises(GatewayError, match="the body is 1 bytes shorter than"):
        await Scene().run(ALL_BINARY + TENSOR, headers)


async def test_error_response_of_the_server_passes_untouched() -> None:
    refused = ScriptedUpstreamResponse(
        400, {"Content-Type": "application/json"}, [b'{"error":"no"}']
    )
    scene = Scene(refused)
    response = await scene.run(ALL_BINARY + TENSOR, of_type(SAGEMAKER, len(ALL_BINARY)))
    assert (response.status, response.body) == (400, b'{"error":"no"}')
    assert response.headers["Content-Type"] == "application/json"


async def test_response_without_binary_outputs_is_json() -> None:
    text = b'{"model_name":"m","outputs":[]}'
    scene = Scene(ScriptedUpstreamResponse(200, {"Content-Type": "application/json"}, [text]))
    response = await scene.run(ALL_BINARY + TENSOR, of_type(SAGEMAKER, len(ALL_BINARY)))
    assert (response.headers["Content-Type"], response.body) == ("application/json", text)
