"""V1 clients use a real Triton, which serves only V2."""

import json
from typing import Any

import numpy as np
import pytest

from tests.integration.support.client import Client, Response

pytestmark = pytest.mark.triton


def predict(client: Client, model: str, body: Any) -> Response:
    """Send a V1 request; ``model`` may be NAME/versions/VERSION."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = client.send("POST", f"/v1/models/{model}:predict", text)
    assert response.headers["Content-Type"] == "application/json"
    return response


TOLD: dict[str, tuple[str, Any, Any]] = {
    "no elements": ("identity_fp32", {"inputs": []}, {"outputs": []}),
    "FP16, which Triton takes in no JSON": (
        "identity_fp16_2d",
        {"inputs": {"INPUT0": [[0.5], [2]]}},
        {"outputs": [[0.5], [2]]},
    ),
    "several tensors in rows": (
        "add",
        {"instances": [{"INPUT0": 1, "INPUT1": 5}, {"INPUT1": 7.5, "INPUT0": 2}]},
        {"predictions": [{"SUM": 6, "DIFFERENCE": -4}, {"SUM": 9.5, "DIFFERENCE": -5.5}]},
    ),
    "several tensors in columns": (
        "add",
        {"inputs": {"INPUT0": [1, 2], "INPUT1": [5, 7.5]}},
        {"outputs": {"SUM": [6, 9.5], "DIFFERENCE": [-4, -5.5]}},
    ),
    "a batch of a variable dimension": (
        "batched_var",
        {"instances": [[[1, 2, 3, 4]], [[5, 6, 7, 8]]]},
        {"predictions": [[[1, 2, 3, 4]], [[5, 6, 7, 8]]]},
    ),
    "a batch of named rows": (
        "batched_bytes",
        {"instances": [{"INPUT0": ["a"]}, {"INPUT0": [{"b64": "w6k="}]}]},
        {"predictions": [["a"], ["é"]]},
    ),
    "a version": ("versioned/versions/1", {"instances": [1]}, {"predictions": [1]}),
}


@pytest.mark.parametrize(("model", "body", "told"), TOLD.values(), ids=TOLD)
def test_v1_responses_match(via_gateway: Client, model: str, body: Any, told: Any) -> None:
    response = predict(via_gateway, model, body)
    assert (response.status, response.fields) == (200, told)


def test_an_image(via_gateway: Client) -> None:
    image = np.random.default_rng(1).random((2, 3, 224, 224), dtype=np.float32)
    for form, key in (("instances", "predictions"), ("inputs", "outputs")):
        response = predict(via_gateway, "image", {form: image.tolist()})
        assert response.status == 200
        np.testing.assert_array_equal(np.array(response.fields[key], np.float32), image)


REFUSED: dict[str, tuple[str, Any, int, str]] = {
    "a row too short": ("batched_fp32", {"instances": [[1, 2, 3]]}, 400, "[-1, 4]"),
    "an input that lacks": ("add", {"instances": [{"INPUT0": 1}]}, 400, "INPUT1"),
    "a batch too large": ("batched_fp32", {"instances": [[1, 2, 3, 4]] * 9}, 400, "batch-size"),
    "an unknown model": ("none", {"instances": [1]}, 404, "none"),
    "a model that fails": ("fails", {"instances": [1]}, 500, "fails"),
    "an output that is no text": ("bad_bytes", {"instances": ["a"]}, 406, "end in _bytes"),
}


@pytest.mark.parametrize(("model", "body", "status", "part"), REFUSED.values(), ids=REFUSED)
def test_refusals(via_gateway: Client, model: str, body: Any, status: int, part: str) -> None:
    response = predict(via_gateway, model, body)
    assert response.status == status, response.body
    assert part in response.error


def test_models(via_gateway: Client) -> None:
    assert via_gateway.get("/v1/models/add").fields == {"name": "add", "ready": True}
    assert via_gateway.get("/v1/models/versioned/versions/2").status == 200
    assert {"add", "image", "versioned"} <= set(via_gateway.get("/v1/models").fields["models"])
    unknown = via_gateway.get("/v1/models/none")
    assert (unknown.status, "none" in unknown.error) == (404, True)
