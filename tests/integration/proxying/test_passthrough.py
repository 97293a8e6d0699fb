"""Requests other than inference, and their responses, pass unchanged."""

import json
from collections.abc import Iterator

import pytest

from tests.integration.support.client import Client, Response

pytestmark = pytest.mark.triton

# What belongs to one connection or one message, and so may differ, and what the gateway adds.
MAY_DIFFER = ("Server", "Date", "Connection", "Keep-Alive", "Transfer-Encoding", "X-Request-Id")


def check_same(response: Response, like: Response) -> None:
    assert (response.status, response.reason, response.body) == (
        like.status,
        like.reason,
        like.body,
    )
    names = [name.lower() for name in response.headers]
    assert names.count("x-request-id") == 1
    assert passed(response) == passed(like)
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
    check_same(via_gateway.send(method, path, body), direct.send(method, path, body))
    # A body that ought not to be there must not be taken for the next answer.
    assert via_gateway.get("/v2/health/live").status == 200


def test_unload_and_load(via_gateway: Client, direct: Client) -> None:
    path = "/v2/repository/models/versioned"
    response = via_gateway.send("POST", f"{path}/unload", b"{}")
    assert (response.status, response.body) == (200, b"")
    while direct.get("/v2/models/versioned/ready").status == 200:
        pass
    check_same(*(each.get("/v2/models/versioned/ready") for each in (via_gateway, direct)))
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
    check_same(via_gateway.get(path), direct.get(own))
    assert direct.get(own).fields == response.fields
