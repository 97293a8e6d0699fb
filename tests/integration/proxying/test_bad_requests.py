"""Triton's own errors pass, and it runs no request of which a part lacks.

Each way to be invalid for the gateway is in tests/end_to_end/conversion/test_refused_requests.py.
"""

import json
from typing import Any

import pytest

from tests.integration.support.client import HEADER_LENGTH, Client

pytestmark = pytest.mark.triton


def body(datatype: str = "FP32", data: Any = (1, 2), **changes: Any) -> bytes:
    """Make a request of one input; ``changes`` are members of it."""
    entry = {"name": "INPUT0", "datatype": datatype, "shape": [len(data or ())], "data": data}
    kept = {name: value for name, value in (entry | changes).items() if value is not None}
    return json.dumps({"inputs": [kept]}).encode()


GOOD = body()


def send_good(client: Client) -> None:
    response = client.infer("identity_fp32", GOOD)
    assert response.status == 200
    assert response.fields["outputs"][0]["data"] == [1.0, 2.0]


def binary(promised: int) -> tuple[bytes, dict[str, str]]:
    header = body(data=None, shape=[2], parameters={"binary_data_size": promised})
    return header, {HEADER_LENGTH: str(len(header))}


def inference_count(client: Client) -> int:
    """Ask how many requests the model has run, well or not."""
    stats = client.get("/v2/models/identity_fp32/stats").fields["model_stats"][0]
    return sum(stats["inference_stats"][outcome]["count"] for outcome in ("success", "fail"))


@pytest.mark.parametrize("data", [b"1234567", b"123456789"])
def test_chunked_binary_part_of_another_size_is_not_run(
    via_gateway: Client, direct: Client, data: bytes
) -> None:
    """Its length is not known beforehand: the server may see a part, but never a whole request."""
    header, length = binary(8)
    before = inference_count(direct)
    response = via_gateway.infer("identity_fp32", iter([header, data]), length)
    assert response.status == 400
    assert "the body" in response.error
    assert inference_count(direct) == before
    send_good(via_gateway)
    assert inference_count(direct) == before + 1


REGION = {"shared_memory_region": "x", "shared_memory_byte_size": 4}
SERVER_ERRORS = {
    "unknown model": ("nope", GOOD),
    "another datatype": ("identity_fp32", body("FP64")),
    "model that fails": ("fails", GOOD),
    "decoupled model": ("stream", body("BYTES", ["a"])),
    "unknown region": ("identity_fp32", body(data=None, shape=[1], parameters=REGION)),
}


@pytest.mark.parametrize(("model", "sent"), SERVER_ERRORS.values(), ids=SERVER_ERRORS)
def test_error_of_triton_passes(
    via_gateway: Client, direct: Client, model: str, sent: bytes
) -> None:
    send_good(via_gateway)
    connection = via_gateway.local_port
    response, like = via_gateway.infer(model, sent), direct.infer(model, sent)
    assert like.status >= 400
    assert (response.status, response.reason, response.body) == (
        like.status,
        like.reason,
        like.body,
    )
    for name in ("Content-Type", "Content-Length", HEADER_LENGTH):
        assert response.headers[name] == like.headers[name]
    send_good(via_gateway)
    assert via_gateway.local_port == connection


def test_parameters_and_unknown_members_reach_the_model(
    via_gateway: Client, direct: Client
) -> None:
    parameters = {"a": 2**63 - 1, "b": -(2**63), "c": 'é\n"', "d": True, "e": 1.5, "data": "x"}
    extra = {"model_name": "other", "more": {"data": 1, "list": [1, {"data": "x"}]}}
    sent = json.dumps({**json.loads(GOOD), **extra, "parameters": parameters}).encode()
    response, like = (client.infer("with_parameters", sent) for client in (via_gateway, direct))
    assert json.loads(response.fields["outputs"][0]["data"][0]) == parameters
    assert response.body == like.body
