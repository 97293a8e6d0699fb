"""Raw binary requests get a header made from the metadata of the model."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.integration.support.client import HEADER_LENGTH, Client, check_same
from tests.integration.support.infer_messages import read_outputs

pytestmark = pytest.mark.triton

RAW = {HEADER_LENGTH: "0"}


def floats(count: int) -> bytes:
    return np.arange(count, dtype="<f4").tobytes()


# Model, body, the output's shape and binary form.
ACCEPTED: list[tuple[str, bytes, list[int], bytes]] = [
    ("identity_fp32", b"", [0], b""),
    ("batched_fp32", floats(4), [1, 4], floats(4)),
    ("batched_var", floats(12), [1, 3, 4], floats(12)),
    ("image", floats(150_528), [1, 3, 224, 224], floats(150_528)),
    ("batched_bytes", b"\xff\0" * 50_000, [1, 1], b"\xa0\x86\x01\0" + b"\xff\0" * 50_000),
    ("zeros", b"\x03\0\0\0", [3], bytes(12)),
    ("versioned/versions/1", floats(1), [1], b"\x01\0\0\0"),
]


@pytest.mark.parametrize(("model", "body", "shape", "data"), ACCEPTED)
def test_accepted(
    via_gateway: Client, direct: Client, model: str, body: bytes, shape: list[int], data: bytes
) -> None:
    response = via_gateway.infer(model, body, RAW)
    check_same(response, direct.infer(model, body, RAW))
    (output,) = read_outputs(response)
    assert output.binary
    assert list(output.shape) == shape
    assert output.data == data


def load(client: Client, model: str, **config: Any) -> None:
    """Load a model that is loaded already, with another configuration."""
    tensor = {"data_type": "TYPE_FP32", **config.pop("tensor")}
    whole = {
        "name": model,
        "backend": "python",
        "input": [{"name": "INPUT0", **tensor}],
        "output": [{"name": "OUTPUT0", **tensor}],
        **config,
    }
    body = json.dumps({"parameters": {"config": json.dumps(whole)}}).encode()
    response = client.send("POST", f"/v2/repository/models/{model}/load", body)
    assert response.status == 200, response.body


@pytest.fixture
def changing(via_gateway: Client) -> Iterator[str]:
    """A model that a test may change: batched, of shape [4]."""
    yield "batched_fp32"
    # Loading alone would keep the configuration.
    for call in ("unload", "load"):
        path = f"/v2/repository/models/batched_fp32/{call}"
        assert via_gateway.send("POST", path, b"{}").status == 200


def test_a_loaded_model_is_asked_for_again(via_gateway: Client, changing: str) -> None:
    (output,) = read_outputs(via_gateway.infer(changing, floats(4), RAW))
    assert output.shape == (1, 4)
    load(via_gateway, changing, tensor={"dims": [2]}, max_batch_size=0)
    (output,) = read_outputs(via_gateway.infer(changing, floats(2), RAW))
    assert output.shape == (2,)
    load(via_gateway, changing, tensor={"dims": [3]}, max_batch_size=2)
    (output,) = read_outputs(via_gateway.infer(changing, floats(3), RAW))
    assert output.shape == (1, 3)


def test_a_model_changed_elsewhere_is_asked_for_again_when_the_server_refuses(
    via_gateway: Client, direct: Client, changing: str
) -> None:
    assert via_gateway.infer(changing, floats(4), RAW).status == 200
    load(direct, changing, tensor={"dims": [4]}, max_batch_size=0)
    via_gateway.infer(changing, floats(4), RAW)
    (output,) = read_outputs(via_gateway.infer(changing, floats(4), RAW))
    assert output.shape == (4,)
