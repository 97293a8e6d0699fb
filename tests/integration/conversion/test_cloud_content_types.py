"""Requests with the content types of SageMaker and Vertex AI, built by NVIDIA's client."""

from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton_http

from tests.integration.support.client import HEADER_LENGTH, Client, Response

pytestmark = pytest.mark.triton

SAGEMAKER = "application/vnd.sagemaker-triton.binary+json;json-header-size="
VERTEX_AI = "application/vnd.vertex-ai-triton.binary+json;json-header-size="

LEFT, RIGHT = np.array([1, 2.5], np.float32), np.array([3, 4], np.float32)
OUTPUTS = ("SUM", "DIFFERENCE")


def asked(prefix: str, *, binary_in: bool, binary_out: bool) -> tuple[bytes, dict[str, str]]:
    inputs = [triton_http.InferInput(name, [2], "FP32") for name in ("INPUT0", "INPUT1")]
    inputs[0].set_data_from_numpy(LEFT, binary_data=binary_in)
    inputs[1].set_data_from_numpy(RIGHT, binary_data=False)
    outputs = [
        triton_http.InferRequestedOutput("SUM", binary_data=binary_out),
        triton_http.InferRequestedOutput("DIFFERENCE", binary_data=False),
    ]
    body, size = triton_http.InferenceServerClient.generate_request_body(inputs, outputs=outputs)
    # The client gives none where all is JSON.
    return body, {"Content-Type": f"{prefix}{len(body) if size is None else size}"}


def read(response: Response, size: int | None) -> Any:
    assert response.status == 200, response.body
    return triton_http.InferenceServerClient.parse_response_body(response.body, header_length=size)


def check(result: Any) -> None:
    assert result.as_numpy("SUM").tolist() == (LEFT + RIGHT).tolist()
    assert result.as_numpy("DIFFERENCE").tolist() == (LEFT - RIGHT).tolist()


@pytest.mark.parametrize("binary_in", [True, False])
def test_sagemaker(via_gateway: Client, binary_in: bool) -> None:
    body, headers = asked(SAGEMAKER, binary_in=binary_in, binary_out=True)
    response = via_gateway.infer("add", body, headers)
    content_type = response.headers["Content-Type"]
    assert content_type.startswith(SAGEMAKER)
    assert HEADER_LENGTH not in response.headers
    check(read(response, int(content_type[len(SAGEMAKER) :])))


@pytest.mark.parametrize("binary_in", [True, False])
def test_vertex_ai(via_gateway: Client, binary_in: bool) -> None:
    body, headers = asked(VERTEX_AI, binary_in=binary_in, binary_out=True)
    response = via_gateway.infer("add", body, headers)
    assert response.headers["Content-Type"] == "application/octet-stream"
    check(read(response, int(response.headers[HEADER_LENGTH])))


@pytest.mark.parametrize("prefix", [SAGEMAKER, VERTEX_AI])
@pytest.mark.parametrize("binary_in", [True, False])
def test_json_response_has_the_type_of_json(
    via_gateway: Client, prefix: str, binary_in: bool
) -> None:
    body, headers = asked(prefix, binary_in=binary_in, binary_out=False)
    response = via_gateway.infer("add", body, headers)
    assert response.headers["Content-Type"] == "application/json"
    assert HEADER_LENGTH not in response.headers
    check(read(response, None))


@pytest.mark.parametrize("prefix", [SAGEMAKER, VERTEX_AI])
def test_bare_bytes(via_gateway: Client, prefix: str) -> None:
    response = via_gateway.infer("identity_fp32", LEFT.tobytes(), {"Content-Type": f"{prefix}0"})
    size = response.headers[HEADER_LENGTH] or response.headers["Content-Type"].partition("size=")[2]
    assert read(response, int(size)).as_numpy("OUTPUT0").tolist() == LEFT.tolist()


@pytest.mark.parametrize("prefix", [SAGEMAKER, VERTEX_AI])
@pytest.mark.parametrize("size", ["-123", "12345", "additional-string7", ""])
def test_sizes_that_cannot_be(via_gateway: Client, prefix: str, size: str) -> None:
    body, _ = asked(prefix, binary_in=True, binary_out=True)
    response = via_gateway.infer("add", body, {"Content-Type": prefix + size})
    assert response.status == 400
    assert "Content-Type" in response.error
