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
