"""Requests other than inference, and their responses, pass unchanged."""

import gzip
import json
import socket
import zlib
from collections.abc import Iterator

import pytest

from tests.integration.support.client import Client, Response
from tests.integration.support.gateway import Gateway

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
    ("GET", "/v2/models/versioned/versions/2", None),
    ("GET", "/v2/models/add/versions/1/ready", None),
    ("GET", "/v2/models/batched_fp32/config", None),
    ("GET", "/v2/models/add/stats", None),
    ("GET", "/v2/models/stats", None),
    ("GET", "/v2/systemsharedmemory/status", None),
    ("GET", "/v2/cudasharedmemory/region/x/status", None),
    ("GET", "/v2/logging", None),
    ("POST", "/v2/repository/index", b'{"ready": true}'),
    ("POST", "/v2/systemsharedmemory/unregister", b""),
    ("POST", "/v2/logging", b'{"log_verbose_level": 0}'),
    ("POST", "/v2/models/identity_fp32/generate", b'{"INPUT0": [1.5, 2]}'),
    ("POST", "/v2/models/stream/generate_stream", b'{"text_input": "x"}'),
    # What the server refuses.
    ("GET", "/v2/models/nope/config", None),
    ("GET", "/v2/models/add/versions/9/ready", None),
    ("GET", "/v2/repository/index", None),
    ("GET", "/v2/models/a%2Fb", None),
    ("GET", "/v2//models/add", None),
    ("GET", "/metrics", None),
    ("HEAD", "/v2/models/add", None),
    ("HEAD", "/nope", None),
    ("PUT", "/v2/models/add", None),
    ("OPTIONS", "/v2", None),
    ("POST", "/v2/repository/index", b"nonsense"),
    ("POST", "/v2/repository/models/nope/load", b""),
    (
        "POST",
        "/v2/systemsharedmemory/region/x/register",
        b'{"key": "/x", "offset": 0, "byte_size": 8}',
    ),
    ("POST", "/v2/models/stream/generate", b'{"text_input": "x"}'),
    ("POST", "/v2/models/fails/generate_stream", b'{"INPUT0": 1}'),
    ("POST", "/v2/models/add/infer/", b"{}"),
    ("POST", "/nope", b"x" * 300_000),
]


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
def test_request_passes_unchanged(
    via_gateway: Client, direct: Client, method: str, path: str, body: bytes | None
) -> None:
    check_same(via_gateway.send(method, path, body), direct.send(method, path, body))
    # A body that ought not to be there must not be taken for the next answer.
    assert via_gateway.get("/v2/health/live").status == 200


def test_again_and_again_on_one_connection(via_gateway: Client) -> None:
    """With answers that have no body in between."""
    assert via_gateway.get("/v2/health/live").status == 200
    connection = via_gateway.local_port
    for _ in range(20):
        assert via_gateway.get("/v2/health/ready").fields == {"ready": True}
        assert via_gateway.send("POST", "/v2/systemsharedmemory/unregister", b"").status == 200
    assert via_gateway.local_port == connection


def test_logging_settings(via_gateway: Client, direct: Client) -> None:
    before = direct.get("/v2/logging").fields
    try:
        response = via_gateway.send("POST", "/v2/logging", b'{"log_info": false}')
        assert response.fields == {**before, "log_info": False}
        assert direct.get("/v2/logging").fields == response.fields
    finally:
        direct.send("POST", "/v2/logging", b'{"log_info": true}')


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


INFER = b'{"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}'
WANTED = INFER[:-1] + b', "parameters": {"binary_data_output": true}}'


@pytest.mark.parametrize("accepted", ["gzip", "gzip;q=0", "*"])
def test_encoded_response_passes_unless_it_is_read(
    via_gateway: Client, direct: Client, accepted: str
) -> None:
    headers = {"Accept-Encoding": accepted}
    check_same(*(each.infer("identity_fp32", WANTED, headers) for each in (via_gateway, direct)))
    response = via_gateway.infer("identity_fp32", INFER, headers)
    assert response.status == 200
    assert response.headers.get("Content-Encoding", "identity") == "identity"
    assert response.fields["outputs"][0]["data"] == [1.0, 2.0]
    extensions = via_gateway.send("GET", "/v2", headers=headers).fields["extensions"]
    assert "binary_tensor_data" in extensions


def _bare_deflate(data: bytes) -> bytes:
    pack = zlib.compressobj(wbits=-15)
    return pack.compress(data) + pack.flush()


def test_bare_deflate_is_decoded(via_gateway: Client, direct: Client) -> None:
    """Which the server alone takes for an empty tensor."""
    headers = {"Content-Encoding": "deflate"}
    response = via_gateway.infer("identity_fp32", _bare_deflate(INFER), headers)
    check_same(response, direct.infer("identity_fp32", INFER))
    alone = direct.infer("identity_fp32", _bare_deflate(INFER), headers)
    assert alone.fields["outputs"][0]["shape"] == [0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/models/stream/generate_stream", b'{"text_input": "hi"}'),
        ("/v2/repository/index", b'{"ready": true}'),
    ],
)
def test_encoded_request_that_triton_does_not_decode_is_decoded(
    via_gateway: Client, direct: Client, path: str, body: bytes
) -> None:
    headers = {"Content-Encoding": "gzip"}
    packed = gzip.compress(body)
    assert direct.send("POST", path, packed, headers).status in (400, 500)
    response = via_gateway.send("POST", path, packed, headers)
    check_same(response, direct.send("POST", path, body))
    assert response.status == 200


def events(gateway: Gateway, text: str) -> Iterator[bytes]:
    """Ask for a stream of events, and give what comes as soon as it comes."""
    body = json.dumps({"text_input": text}).encode()
    head = (
        "POST /v2/models/stream/generate_stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((gateway.host, gateway.port), 30) as sock:
        sock.sendall(head.encode() + body)
        while piece := sock.recv(65536):
            yield piece


def came_one_by_one(gateway: Gateway) -> bool:
    """Return whether the first event was here before the last one."""
    seen = b""
    for piece in events(gateway, "hi"):
        seen += piece
        if b"hi 0" in seen:
            return b"hi 4" not in seen
    return False


def test_events_come_one_by_one(gateway: Gateway) -> None:
    # This process may sleep through all of them, but hardly each time.
    assert any(came_one_by_one(gateway) for _ in range(5))


def test_a_client_that_leaves_a_stream_does_no_harm(gateway: Gateway, via_gateway: Client) -> None:
    for _ in range(3):
        assert next(events(gateway, "hi")).startswith(b"HTTP/1.1 200 ")
    assert via_gateway.get("/v2/health/live").status == 200
