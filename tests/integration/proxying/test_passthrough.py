"""Requests other than inference, their responses, and errors of Triton pass unchanged.

Each way to be invalid for the gateway is in tests/end_to_end/conversion/test_refused_requests.py.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.support.client import Client, Response, check_same

pytestmark = pytest.mark.triton

# What belongs to one connection or one message, and so may differ, and what the gateway adds.
MAY_DIFFER = ("Server", "Date", "Connection", "Keep-Alive", "Transfer-Encoding", "X-Request-Id")


def check_passed(response: Response, like: Response) -> None:
    check_same(response, like, {*passed(response), *passed(like)})
    names = [name.lower() for name in response.headers]
    assert names.count("x-request-id") == 1
    assert ("Transfer-Encoding" in response.headers) == ("Transfer-Encoding" in like.headers)


def passed(response: Response) -> dict[str, str]:
    """Return the headers that have to be the same."""
    return {name: value for name, value in response.headers.items() if name not in MAY_DIFFER}


REQUESTS: list[tuple[str, str, bytes | None]] = [
    ("GET", "/v2?x=1", None),
    ("GET", "/v2/models/batched_fp32/config", None),
    ("GET", "/v2/models/stats", None),
    ("POST", "/v2/repository/index", b'{"ready": true}'),
    ("POST", "/v2/systemsharedmemory/unregister", b""),
    ("POST", "/v2/models/identity_fp32/generate", b'{"INPUT0": [1.5, 2]}'),
    ("POST", "/v2/models/stream/generate_stream", b'{"text_input": "x"}'),
    # What the server refuses.
    ("GET", "/v2/models/a%2Fb", None),
    ("HEAD", "/v2/models/add", None),
    ("OPTIONS", "/v2", None),
    ("POST", "/v2/repository/index", b"nonsense"),
    ("POST", "/v2/models/fails/generate_stream", b'{"INPUT0": 1}'),
    ("POST", "/nope", b"x" * 300_000),
]


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
def test_request_passes_unchanged(
    via_gateway: Client, direct: Client, method: str, path: str, body: bytes | None
) -> None:
    check_passed(via_gateway.send(method, path, body), direct.send(method, path, body))
    # A body that ought not to be there must not be taken for the next answer.
    assert via_gateway.get("/v2/health/live").status == 200


def test_unload_and_load(via_gateway: Client, direct: Client) -> None:
    path = "/v2/repository/models/versioned"
    response = via_gateway.send("POST", f"{path}/unload", b"{}")
    assert (response.status, response.body) == (200, b"")
    while direct.get("/v2/models/versioned/ready").status == 200:
        pass
    check_passed(*(each.get("/v2/models/versioned/ready") for each in (via_gateway, direct)))
    response = via_gateway.send("POST", f"{path}/load", b"{}")
    assert (response.status, response.body) == (200, b"")
    assert via_gateway.get("/v2/models/versioned/ready").status == 200


# What a client may ask for, and where the server has it.
TRACES = [
    ("/v2/trace", "/v2/trace/setting"),
    ("/v2/models/add/versions/1/trace", "/v2/models/add/trace/setting"),
]


@pytest.fixture
def trace_settings(direct: Client) -> Iterator[None]:
    """Undo what a test has set of them."""
    yield
    names = ("trace_level", "trace_rate", "trace_count", "log_frequency")
    clear = json.dumps(dict.fromkeys(names)).encode()
    for path in ("/v2/models/add/trace/setting", "/v2/trace/setting"):
        assert direct.send("POST", path, clear).status == 200


@pytest.mark.parametrize(("path", "own"), TRACES)
@pytest.mark.usefixtures("trace_settings")
def test_trace_settings_are_read_and_updated(
    via_gateway: Client, direct: Client, path: str, own: str
) -> None:
    before = via_gateway.get(path).fields
    assert before == direct.get(own).fields
    changes = {"trace_level": ["OFF"], "trace_rate": "77", "trace_count": "5"}
    response = via_gateway.send("POST", path, json.dumps(changes).encode())
    assert response.status == 200
    assert response.fields == {**before, **changes}
    check_passed(via_gateway.get(path), direct.get(own))
    assert direct.get(own).fields == response.fields


# ----------------------------------------------------------------------------- inference


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
    like = direct.infer(model, sent)
    assert like.status >= 400
    check_same(via_gateway.infer(model, sent), like)
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
