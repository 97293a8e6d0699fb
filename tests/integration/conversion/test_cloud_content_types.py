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


@pytest.mark.parametrize("prefix", [SAGEMAKER, VERTEX_AI])
@pytest.mark.parametrize("binary_in", [True, False])
def test_binary_response_has_the_type_of_the_cloud(
    via_gateway: Client, prefix: str, binary_in: bool
) -> None:
    body, headers = asked(prefix, binary_in=binary_in, binary_out=True)
    response = via_gateway.infer("add", body, headers)
    kind, size = response.headers["Content-Type"], response.headers[HEADER_LENGTH]
    if prefix == SAGEMAKER:
        assert kind.startswith(SAGEMAKER)
        assert size is None
        size = kind[len(SAGEMAKER) :]
    else:
        assert kind == "application/octet-stream"
    check(read(response, int(size)))


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
