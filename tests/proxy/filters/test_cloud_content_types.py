"""Requests and responses of cloud clients, for a server that knows only the header."""

import json

import pytest

from tests.support.doubles.cluster import ServerStep, one_upstream
from tests.support.doubles.streaming import (
    ScriptedClientResponse,
    ScriptedEndpoint,
    ScriptedUpstreamResponse,
)
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_response_header,
    json_request,
)

SAGEMAKER = "application/vnd.sagemaker-triton.binary+json"
VERTEX_AI = "application/vnd.vertex-ai-triton.binary+json"

TENSOR = FLOATS.tobytes()
ALL_BINARY = binary_header(12, binary_output=True)
BODY = ALL_BINARY + TENSOR
ANSWER_HEADER = binary_response_header(12)


def binary(header: bytes, *tensors: bytes) -> ServerStep:
    """Return a server's response, with the type that Triton sends."""
    body = b"".join((header, *tensors))
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(header))}
    return ScriptedUpstreamResponse(200, {**headers, "Content-Length": str(len(body))}, [body])


ANSWER = binary(ANSWER_HEADER, TENSOR)


def of_type(content_type: str, size: object) -> dict[str, str]:
    return {"Content-Type": f"{content_type};json-header-size={size}"}


async def ask(
    *steps: ServerStep, body: bytes = BODY, headers: dict[str, str]
) -> tuple[ScriptedClientResponse, ScriptedEndpoint]:
    """Ask a server, which must get the protocol's own header if it is asked."""
    cluster = one_upstream(a=steps)
    response = await cluster.ask("POST", INFER, body, headers=headers)
    (endpoint,) = cluster.endpoints
    for request in endpoint.requests[-1:]:
        assert request.headers.getall("Content-Type") == ["application/octet-stream"]
        assert len(request.headers.getall(HEADER_LENGTH)) == 1
    return response, endpoint


async def test_vertex_client_gets_the_header_length_in_a_header() -> None:
    # Triton's endpoint sends the header.
    response, _ = await ask(ANSWER, headers=of_type(VERTEX_AI, len(ALL_BINARY)))
    assert response.headers["Content-Type"] == "application/octet-stream"
    assert response.headers[HEADER_LENGTH] == str(len(ANSWER_HEADER))
    assert response.body == ANSWER_HEADER + TENSOR


async def test_mixed_response_has_its_header_length_in_the_content_type() -> None:
    fields = json.loads(json_request())
    fields["outputs"] = [{"name": "OUT0", "parameters": {"binary_data": True}}, {"name": "OUT1"}]
    body = json.dumps(fields).encode()
    # The whole request is JSON: the size is that of the body, or missing.
    for headers in (of_type(SAGEMAKER, len(body)), {"Content-Type": SAGEMAKER}):
        answer = binary(binary_response_header(12, 4), TENSOR, bytes(4))
        response, _ = await ask(answer, body=body, headers=headers)
        start, _, size = response.headers["Content-Type"].partition(";json-header-size=")
        assert start == SAGEMAKER
        header, tensors = response.body[: int(size)], response.body[int(size) :]
        assert tensors == TENSOR
        assert json.loads(header)["outputs"][1]["data"] == [0]
        assert HEADER_LENGTH not in response.headers


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        (
            {**of_type(SAGEMAKER, 5), HEADER_LENGTH: "6"},
            f"{HEADER_LENGTH} is 6, but json-header-size of the Content-Type 5",
        ),
        (
            of_type(SAGEMAKER, len(BODY) + 1),
            f"json-header-size of the Content-Type is {len(BODY) + 1}, the body has "
            f"{len(BODY)} bytes",
        ),
        (
            {**of_type(SAGEMAKER, len(BODY) + 1), "Transfer-Encoding": "chunked"},
            "the body is 1 bytes shorter than",
        ),
    ],
)
async def test_invalid_header_length_is_refused(headers: dict[str, str], message: str) -> None:
    response, endpoint = await ask(headers=headers)
    assert response.status == 400
    assert message in json.loads(response.body)["error"]
    assert endpoint.requests == []
