"""Raw binary requests get a header made from the metadata of the model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.support.client import HEADER_LENGTH, Client, Response
from tests.integration.support.gateway import running_gateway
from tests.integration.support.infer_messages import DTYPES, read_outputs
from tests.integration.support.tap import Tap
from tests.integration.triton.server import TritonServer

pytestmark = pytest.mark.triton

RAW = {HEADER_LENGTH: "0"}


def floats(count: int) -> bytes:
    return np.arange(count, dtype="<f4").tobytes()


def check_same(response: Response, like: Response) -> None:
    assert (response.status, response.reason, response.body) == (
        like.status,
        like.reason,
        like.body,
    )
    for name in ("Content-Type", "Content-Length", HEADER_LENGTH):
        assert response.headers[name] == like.headers[name]


# Model, body, the output's shape and binary form.
ACCEPTED: list[tuple[str, bytes, list[int], bytes]] = [
    ("identity_fp32", floats(2), [2], floats(2)),
    ("identity_fp32", b"", [0], b""),
    ("batched_fp32", floats(4), [1, 4], floats(4)),
    ("batched_var", floats(4), [1, 1, 4], floats(4)),
    ("batched_var", floats(12), [1, 3, 4], floats(12)),
    ("batched_var", b"", [1, 0, 4], b""),
    ("image", floats(150_528), [1, 3, 224, 224], floats(150_528)),
    ("batched_bytes", b"abc", [1, 1], b"\x03\0\0\0abc"),
    ("batched_bytes", b"", [1, 1], b"\0\0\0\0"),
    ("batched_bytes", b"\xff\0" * 50_000, [1, 1], b"\xa0\x86\x01\0" + b"\xff\0" * 50_000),
    ("zeros", b"\x03\0\0\0", [3], bytes(12)),
    ("slow", bytes(4), [1], bytes(4)),
    ("with_parameters", floats(1), [1], b"\x02\0\0\0{}"),
    ("versioned", floats(1), [1], b"\x02\0\0\0"),
    ("versioned/versions/1", floats(1), [1], b"\x01\0\0\0"),
    ("versioned/versions/2", floats(1), [1], b"\x02\0\0\0"),
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


@pytest.mark.parametrize("datatype", [each for each in DTYPES if each != "BYTES"])
def test_every_datatype_of_fixed_size(via_gateway: Client, direct: Client, datatype: str) -> None:
    model = f"identity_{datatype.lower()}"
    body = bytes([0, 1] * 8)
    response = via_gateway.infer(model, body, RAW)
    check_same(response, direct.infer(model, body, RAW))
    (output,) = read_outputs(response)
    assert (output.datatype, output.data) == (datatype, body)


# Model, body, what the gateway says.
REFUSED: list[tuple[str, bytes, list[str]]] = [
    ("add", floats(1), ["'add'", "2 inputs"]),
    ("mixed", floats(1), ["'mixed'", "4 inputs"]),
    ("two_variable", floats(4), ["'INPUT0'", "[-1, -1]", "1 variable dimension"]),
    ("identity_bytes", b"abc", ["'INPUT0'", "[-1]", "[1]"]),
    ("identity_bytes_2d", b"abc", ["'INPUT0'", "[-1, -1]", "[1]"]),
    ("identity_fp32", bytes(7), ["'INPUT0'", "FP32", "multiple of 4", "7"]),
    ("identity_fp64", bytes(12), ["'INPUT0'", "FP64", "multiple of 8", "12"]),
    ("batched_fp32", floats(3), ["'INPUT0'", "16 bytes", "12"]),
    ("batched_fp32", floats(8), ["'INPUT0'", "16 bytes", "32"]),
    ("batched_var", floats(5), ["'INPUT0'", "multiple of 16", "20"]),
    ("image", bytes(5), ["'INPUT0'", "[3, 224, 224]", "602112", "5"]),
    ("zeros", bytes(8), ["'INPUT0'", "4 bytes", "8"]),
    ("zeros", b"", ["'INPUT0'", "4 bytes", "0"]),
]


@pytest.mark.parametrize(("model", "body", "said"), REFUSED)
def test_refused(
    tapped: Client, direct: Client, tap: Tap, model: str, body: bytes, said: list[str]
) -> None:
    """As by the server, which is asked for its metadata only."""
    assert direct.infer(model, body, RAW).status == 400
    tap.forget()
    response = tapped.infer(model, body, RAW)
    assert response.status == 400
    for words in said:
        assert words in response.error
    connection = tapped.local_port
    assert all(request.startswith("GET ") for request in tap.requests)
    assert tapped.infer("identity_fp32", floats(1), RAW).status == 200
    assert tapped.local_port == connection


@pytest.mark.parametrize(
    ("model", "body"),
    [
        ("nope", floats(1)),
        ("versioned/versions/9", floats(1)),
        ("versioned/versions/x", floats(1)),
        ("fails", floats(1)),
        ("stream", b"hi"),
    ],
)
def test_errors_of_the_server_pass(
    via_gateway: Client, direct: Client, model: str, body: bytes
) -> None:
    response, like = via_gateway.infer(model, body, RAW), direct.infer(model, body, RAW)
    assert like.status >= 400
    assert (response.status, response.body) == (like.status, like.body)


@pytest.mark.parametrize("sizes", [[8], [1] * 8, [3, 5], [0, 8], []])
def test_chunked(via_gateway: Client, sizes: list[int]) -> None:
    """The shape needs the length, which is known at the end only."""
    body = floats(2)[: sum(sizes)]
    ends = np.cumsum(sizes).tolist()
    chunks = [body[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    response = via_gateway.infer("identity_fp32", iter([chunk for chunk in chunks if chunk]), RAW)
    check_same(response, via_gateway.infer("identity_fp32", body, RAW))
    (output,) = read_outputs(response)
    assert output.data == body


def test_chunked_bytes(via_gateway: Client) -> None:
    response = via_gateway.infer("batched_bytes", iter([b"ab", b"c"]), RAW)
    (output,) = read_outputs(response)
    assert output.elements.tolist() == [b"abc"]


def test_chunked_that_does_not_fit(via_gateway: Client) -> None:
    response = via_gateway.infer("identity_fp32", iter([bytes(4), bytes(3)]), RAW)
    assert response.status == 400
    assert "got 7" in response.error


def test_the_buffered_part_of_a_chunked_body_is_limited(
    triton: TritonServer, tmp_path: Path
) -> None:
    with (
        running_gateway(
            tmp_path, triton.http_url, limits={"max_buffered_body_bytes": "4KiB"}
        ) as gateway,
        Client(gateway.host, gateway.port) as client,
    ):
        pieces = [bytes(1024)] * 4
        assert client.infer("identity_fp32", iter(pieces), RAW).status == 200
        response = client.infer("identity_fp32", iter([*pieces, bytes(4)]), RAW)
        assert response.status == 413
        assert "limits.max_buffered_body_bytes" in response.error
        # With a length it need not be held.
        assert client.infer("identity_fp32", bytes(8192), RAW).status == 200


def test_metadata_is_asked_for_once(tapped: Client, tap: Tap) -> None:
    tapped.infer("identity_int8", b"1", RAW)
    tap.forget()
    for _ in range(3):
        assert tapped.infer("identity_int8", b"1", RAW).status == 200
    assert tap.requests == ["POST /v2/models/identity_int8/infer"] * 3


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


def test_an_unloaded_model_is_gone(via_gateway: Client, direct: Client, changing: str) -> None:
    assert via_gateway.infer(changing, floats(4), RAW).status == 200
    path = f"/v2/repository/models/{changing}"
    assert via_gateway.send("POST", f"{path}/unload", b"{}").status == 200
    while direct.get(f"/v2/models/{changing}/ready").status == 200:
        pass
    response, like = (
        via_gateway.infer(changing, floats(4), RAW),
        direct.infer(changing, floats(4), RAW),
    )
    assert like.status >= 400
    assert (response.status, response.body) == (like.status, like.body)
    assert via_gateway.send("POST", f"{path}/load", b"{}").status == 200
    assert via_gateway.infer(changing, floats(4), RAW).status == 200


def test_a_model_changed_elsewhere_is_asked_for_again_when_the_server_refuses(
    via_gateway: Client, direct: Client, changing: str
) -> None:
    assert via_gateway.infer(changing, floats(4), RAW).status == 200
    load(direct, changing, tensor={"dims": [4]}, max_batch_size=0)
    via_gateway.infer(changing, floats(4), RAW)
    (output,) = read_outputs(via_gateway.infer(changing, floats(4), RAW))
    assert output.shape == (4,)


def test_a_model_changed_elsewhere_is_asked_for_again_before_a_request_is_refused(
    via_gateway: Client, direct: Client, changing: str
) -> None:
    assert via_gateway.infer(changing, floats(4), RAW).status == 200
    load(direct, changing, tensor={"dims": [3]}, max_batch_size=2)
    (output,) = read_outputs(via_gateway.infer(changing, floats(3), RAW))
    assert output.shape == (1, 3)
