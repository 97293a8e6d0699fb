"""V1 clients use a real Triton, which serves only V2."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.support.client import Client, Response
from tests.integration.support.gateway import running_gateway
from tests.integration.support.infer_messages import DTYPES
from tests.integration.triton.server import TritonServer

pytestmark = pytest.mark.triton


def predict(client: Client, model: str, body: Any) -> Response:
    """Send a V1 request; ``model`` may be NAME/versions/VERSION."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = client.send("POST", f"/v1/models/{model}:predict", text)
    assert response.headers["Content-Type"] == "application/json"
    return response


ROWS = [{"INPUT0": 1, "INPUT1": 5}, {"INPUT1": 7.5, "INPUT0": 2}]
B64 = {"b64": "/wA="}

TOLD: dict[str, tuple[str, Any, Any]] = {
    "rows": ("identity_fp32", {"instances": [1, 2.5]}, {"predictions": [1, 2.5]}),
    "a column": ("identity_fp32", {"inputs": [1, 2.5]}, {"outputs": [1, 2.5]}),
    "no elements": ("identity_fp32", {"inputs": []}, {"outputs": []}),
    "two dimensions": (
        "identity_fp32_2d",
        {"instances": [[1, 2, 3], [4, 5, 6]]},
        {"predictions": [[1, 2, 3], [4, 5, 6]]},
    ),
    "FP16, which Triton takes in no JSON": (
        "identity_fp16_2d",
        {"inputs": {"INPUT0": [[0.5], [2]]}},
        {"outputs": [[0.5], [2]]},
    ),
    "several tensors in rows": (
        "add",
        {"instances": ROWS},
        {"predictions": [{"SUM": 6, "DIFFERENCE": -4}, {"SUM": 9.5, "DIFFERENCE": -5.5}]},
    ),
    "several tensors in columns": (
        "add",
        {"inputs": {"INPUT0": [1, 2], "INPUT1": [5, 7.5]}},
        {"outputs": {"SUM": [6, 9.5], "DIFFERENCE": [-4, -5.5]}},
    ),
    "a batch": (
        "batched_fp32",
        {"instances": [[1, 2, 3, 4], [5, 6, 7, 8]]},
        {"predictions": [[1, 2, 3, 4], [5, 6, 7, 8]]},
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
    "strings": ("identity_bytes", {"instances": ["a", "é", ""]}, {"predictions": ["a", "é", ""]}),
    "base64": ("identity_bytes_2d", {"inputs": [[{"b64": "YQ=="}]]}, {"outputs": [["a"]]}),
    "all kinds": (
        "mixed",
        {"instances": [{"IN_FP32": 0.5, "IN_INT64": 2**62, "IN_BYTES": "x", "IN_BOOL": True}]},
        {
            "predictions": [
                {"OUT_FP32": 0.5, "OUT_INT64": 2**62, "OUT_BYTES": "x", "OUT_BOOL": True}
            ]
        },
    ),
    "a version": ("versioned/versions/1", {"instances": [1]}, {"predictions": [1]}),
    "another version": ("versioned/versions/2", {"inputs": [1]}, {"outputs": [2]}),
}


@pytest.mark.parametrize(("model", "body", "told"), TOLD.values(), ids=TOLD)
def test_v1_responses_match(via_gateway: Client, model: str, body: Any, told: Any) -> None:
    response = predict(via_gateway, model, body)
    assert (response.status, response.fields) == (200, told)


@pytest.mark.parametrize("datatype", [each for each in DTYPES if each not in ("BOOL", "BYTES")])
def test_every_datatype(via_gateway: Client, datatype: str) -> None:
    values = [0, 1, 100]
    response = predict(via_gateway, f"identity_{datatype.lower()}", {"instances": values})
    assert response.fields == {"predictions": values}


def test_an_image(via_gateway: Client) -> None:
    image = np.random.default_rng(1).random((2, 3, 224, 224), dtype=np.float32)
    for form, key in (("instances", "predictions"), ("inputs", "outputs")):
        response = predict(via_gateway, "image", {form: image.tolist()})
        assert response.status == 200
        np.testing.assert_array_equal(np.array(response.fields[key], np.float32), image)


REFUSED: dict[str, tuple[str, Any, int, str]] = {
    "a row too short": ("batched_fp32", {"instances": [[1, 2, 3]]}, 400, "[-1, 4]"),
    "ragged rows": ("identity_fp32_2d", {"instances": [[1], [2, 3]]}, 400, "ragged"),
    "a dimension too many": ("identity_fp32", {"instances": [[1]]}, 400, "[1, 1]"),
    "an input that lacks": ("add", {"instances": [{"INPUT0": 1}]}, 400, "INPUT1"),
    "no names": ("add", {"instances": [1]}, 400, "INPUT0, INPUT1"),
    "a number that does not fit": (
        "identity_int8",
        {"instances": [1, 300]},
        400,
        "element 1 (300)",
    ),
    "a batch too large": ("batched_fp32", {"instances": [[1, 2, 3, 4]] * 9}, 400, "batch-size"),
    "an unknown model": ("none", {"instances": [1]}, 404, "none"),
    "an unknown version": ("add/versions/9", {"instances": [1]}, 404, "9"),
    "a model that fails": ("fails", {"instances": [1]}, 500, "fails"),
    "an output that is no text": ("bad_bytes", {"instances": ["a"]}, 406, "end in _bytes"),
}


@pytest.mark.parametrize(("model", "body", "status", "part"), REFUSED.values(), ids=REFUSED)
def test_refusals(via_gateway: Client, model: str, body: Any, status: int, part: str) -> None:
    response = predict(via_gateway, model, body)
    assert response.status == status, response.body
    assert part in response.error


@pytest.fixture(scope="module")
def encoding(triton: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A connection to a gateway whose answers have BYTES in base64."""
    folder: Path = tmp_path_factory.mktemp("gateway")
    with (
        running_gateway(folder, triton.http_url, route={"bytes": "base64"}) as gateway,
        Client(gateway.host, gateway.port) as client,
    ):
        yield client


def test_bytes_that_are_not_utf8(encoding: Client) -> None:
    data = bytes(range(256)) * 1000
    element = {"b64": base64.b64encode(data).decode()}
    response = predict(encoding, "identity_bytes", {"instances": [element, "a"]})
    assert response.fields == {"predictions": [element, {"b64": "YQ=="}]}


def test_models(via_gateway: Client) -> None:
    assert via_gateway.get("/v1/models/add").fields == {"name": "add", "ready": True}
    assert via_gateway.get("/v1/models/versioned/versions/2").status == 200
    assert {"add", "image", "versioned"} <= set(via_gateway.get("/v1/models").fields["models"])
    unknown = via_gateway.get("/v1/models/none")
    assert (unknown.status, "none" in unknown.error) == (404, True)
