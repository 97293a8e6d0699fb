"""Requests other than inference, and their responses, pass unchanged."""

import gzip
import json
import socket
import zlib
from collections.abc import Callable, Iterator

import pytest

from tests.integration.support.client import HEADER_LENGTH, Client, Response
from tests.integration.support.gateway import Gateway
from tests.integration.triton.server import TritonServer

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


GETS = [
    "/v2",
    "/v2?x=1",
    "/v2/models/add",
    "/v2/models/add/versions/1",
    "/v2/models/batched_fp32",
    "/v2/models/versioned/versions/2",
    "/v2/models/add/ready",
    "/v2/models/add/versions/1/ready",
    "/v2/models/add/config",
    "/v2/models/add/versions/1/config",
    "/v2/models/add/stats",
    "/v2/models/add/versions/1/stats",
    "/v2/models/stats",
    "/v2/systemsharedmemory/status",
    "/v2/systemsharedmemory/region/x/status",
    "/v2/cudasharedmemory/status",
    "/v2/cudasharedmemory/region/x/status",
    "/v2/logging",
    # What the server refuses.
    "/v2/models/nope",
    "/v2/models/nope/ready",
    "/v2/models/nope/config",
    "/v2/models/nope/stats",
    "/v2/models/add/versions/9",
    "/v2/models/add/versions/9/ready",
    "/v2/repository/index",
    "/v2/models/add/infer",
    "/",
    "/nope",
    "/v2/nope?x=1",
    "/v2/",
    "//v2",
    "/v2//models/add",
    "/v2/models/add/",
    "/v2/models/%61dd",
    "/v2/models/a%2Fb",
    "/v2/models/add;x",
    "/v2/models/../models/add",
    "/v2/./health/live",
    "/V2/health/live",
    "/metrics",
]


@pytest.mark.parametrize("path", GETS)
def test_get_passes_unchanged(via_gateway: Client, direct: Client, path: str) -> None:
    check_same(via_gateway.get(path), direct.get(path))


def test_the_metadata_tells_of_the_binary_form(via_gateway: Client) -> None:
    assert "binary_tensor_data" in via_gateway.get("/v2").fields["extensions"]


def test_again_and_again_on_one_connection(via_gateway: Client) -> None:
    """With answers that have no body in between."""
    assert via_gateway.get("/v2/health/live").status == 200
    connection = via_gateway.local_port
    for _ in range(20):
        assert via_gateway.get("/v2/health/ready").fields == {"ready": True}
        assert via_gateway.send("POST", "/v2/systemsharedmemory/unregister", b"").status == 200
    assert via_gateway.local_port == connection


POSTS = [
    ("/v2/repository/index", b""),
    ("/v2/repository/index", b"{}"),
    ("/v2/repository/index", b'{"ready": true}'),
    ("/v2/repository/index", b"nonsense"),
    ("/v2/repository/models/nope/load", b""),
    ("/v2/repository/models/nope/load", b"nonsense"),
    ("/v2/repository/models/nope/unload", b"{}"),
    ("/v2/repository/models/nope/reload", b"{}"),
    ("/v2/systemsharedmemory/region/x/register", b'{"key": "/x", "offset": 0, "byte_size": 8}'),
    ("/v2/systemsharedmemory/region/x/register", b"{}"),
    ("/v2/systemsharedmemory/region/x/register", b""),
    ("/v2/systemsharedmemory/region/x/unregister", b""),
    ("/v2/systemsharedmemory/unregister", b""),
    (
        "/v2/cudasharedmemory/region/x/register",
        b'{"raw_handle": {"b64": "AAAA"}, "device_id": 0, "byte_size": 8}',
    ),
    ("/v2/cudasharedmemory/unregister", b""),
    ("/v2/logging", b'{"log_verbose_level": 0}'),
    ("/v2/logging", b'{"log_verbose_level": "x"}'),
    ("/v2/logging", b"nonsense"),
    ("/v2/models/identity_fp32/generate", b'{"INPUT0": [1.5, 2]}'),
    ("/v2/models/identity_bytes/generate", b'{"INPUT0": ["x"]}'),
    ("/v2/models/identity_fp32/generate", b'{"INPUT0": ["x"]}'),
    ("/v2/models/identity_fp32/versions/1/generate", b'{"INPUT0": 1.5}'),
    ("/v2/models/nope/generate", b"{}"),
    ("/v2/models/stream/generate", b'{"text_input": "x"}'),
    ("/v2/models/stream/generate_stream", b'{"text_input": "x"}'),
    ("/v2/models/identity_fp32/generate_stream", b'{"INPUT0": [1.5, 2]}'),
    ("/v2/models/nope/generate_stream", b"{}"),
    ("/v2/models/fails/generate_stream", b'{"INPUT0": 1}'),
    ("/v2/models/add", b"{}"),
    ("/v2/health/live", b""),
    ("/v2", b""),
    ("/v2/models/add/infer/", b"{}"),
    ("/v2/models/add//infer", b"{}"),
    ("/nope", b"x" * 300_000),
]


@pytest.mark.parametrize(("path", "body"), POSTS)
def test_post_passes_unchanged(via_gateway: Client, direct: Client, path: str, body: bytes) -> None:
    check_same(via_gateway.send("POST", path, body), direct.send("POST", path, body))


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "OPTIONS", "POST"])
@pytest.mark.parametrize("path", ["/v2", "/v2/health/ready", "/v2/models/add", "/nope"])
def test_other_methods(via_gateway: Client, direct: Client, method: str, path: str) -> None:
    check_same(via_gateway.send(method, path), direct.send(method, path))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/health/live", b'{"live":true}'),
        ("/v2/health/ready", b'{"ready":true}'),
        ("/v2/health/live?x=y", b'{"live":true}'),
    ],
)
def test_health_is_the_gateways_own(via_gateway: Client, path: str, body: bytes) -> None:
    for method, expected in (("GET", body), ("HEAD", b"")):
        response = via_gateway.send(method, path)
        assert (response.status, response.body) == (200, expected)
        assert response.headers["Content-Length"] == str(len(body))
        assert response.headers["Content-Type"] == "application/json"


@pytest.mark.parametrize("path", ["/v2", "/v2/models/add", "/v2/models/add/ready", "/nope"])
def test_head_passes_unchanged(
    via_gateway: Client, gateway: Gateway, triton: TritonServer, path: str
) -> None:
    with Client("127.0.0.1", triton.http_port) as direct:
        check_same(via_gateway.send("HEAD", path), direct.send("HEAD", path))
    # A body that ought not to be there must not be taken for the next answer.
    assert via_gateway.get("/v2/health/live").status == 200


@pytest.mark.parametrize("path", ["/v2/repository/index", "/nope"])
def test_chunked_requests(via_gateway: Client, direct: Client, path: str) -> None:
    response = via_gateway.send("POST", path, iter([b'{"ready"', b": true}"]))
    check_same(response, direct.send("POST", path, b'{"ready": true}'))


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


def _bare_deflate(data: bytes) -> bytes:
    pack = zlib.compressobj(wbits=-15)
    return pack.compress(data) + pack.flush()


@pytest.mark.parametrize(
    ("coding", "pack"),
    [
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("identity", bytes),
    ],
)
@pytest.mark.parametrize("body", [INFER, WANTED])
def test_encoded_requests(
    via_gateway: Client, direct: Client, coding: str, pack: Callable[[bytes], bytes], body: bytes
) -> None:
    headers = {"Content-Encoding": coding}
    response = via_gateway.infer("identity_fp32", pack(body), headers)
    check_same(response, direct.infer("identity_fp32", pack(body), headers))


def test_bare_deflate(via_gateway: Client, direct: Client) -> None:
    """Which the server alone takes for an empty tensor."""
    headers = {"Content-Encoding": "deflate"}
    response = via_gateway.infer("identity_fp32", _bare_deflate(INFER), headers)
    check_same(response, direct.infer("identity_fp32", INFER))
    alone = direct.infer("identity_fp32", _bare_deflate(INFER), headers)
    assert alone.fields["outputs"][0]["shape"] == [0]


@pytest.mark.parametrize("coding", ["br", "gzip, gzip"])
def test_other_codings(via_gateway: Client, direct: Client, coding: str) -> None:
    headers = {"Content-Encoding": coding}
    response = via_gateway.infer("identity_fp32", INFER, headers)
    like = direct.infer("identity_fp32", INFER, headers)
    assert (response.status, like.status) == (415, 501)
    assert response.headers["Accept-Encoding"] == like.headers["Accept-Encoding"]
    assert repr(coding) in response.error


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/models/stream/generate_stream", b'{"text_input": "hi"}'),
        ("/v2/models/add/trace/setting", b"{}"),
        ("/v2/repository/index", b'{"ready": true}'),
        ("/v2/repository/models/add/load", b"{}"),
        ("/v2/logging", b"{}"),
    ],
)
def test_encoded_requests_of_other_kinds(
    via_gateway: Client, direct: Client, path: str, body: bytes
) -> None:
    """Which the server alone does not understand."""
    headers = {"Content-Encoding": "gzip"}
    packed = gzip.compress(body)
    assert direct.send("POST", path, packed, headers).status in (400, 500)
    response = via_gateway.send("POST", path, packed, headers)
    check_same(response, direct.send("POST", path, body))
    assert response.status == 200


def test_encoded_binary_requests(via_gateway: Client, direct: Client) -> None:
    header = INFER.replace(b'"data": [1, 2]', b'"parameters": {"binary_data_size": 8}')
    body = gzip.compress(header + bytes(8))
    headers = {"Content-Encoding": "gzip", HEADER_LENGTH: str(len(header))}
    response = via_gateway.infer("identity_fp32", body, headers)
    assert response.status == 200
    check_same(response, direct.infer("identity_fp32", body, headers))


@pytest.mark.parametrize("accepted", ["gzip", "deflate", "identity", "br", "gzip;q=0", "*"])
def test_encoded_responses_pass(via_gateway: Client, direct: Client, accepted: str) -> None:
    """A response that the gateway need not read may be encoded, any other need not be."""
    headers = {"Accept-Encoding": accepted}
    response, like = (
        each.infer("identity_fp32", WANTED, headers) for each in (via_gateway, direct)
    )
    check_same(response, like)
    response = via_gateway.infer("identity_fp32", INFER, headers)
    assert response.status == 200
    assert response.headers.get("Content-Encoding", "identity") == "identity"
    assert response.fields["outputs"][0]["data"] == [1.0, 2.0]
    check_same(
        *(each.send("GET", "/v2/models/add", headers=headers) for each in (via_gateway, direct))
    )
    assert (
        "binary_tensor_data" in via_gateway.send("GET", "/v2", headers=headers).fields["extensions"]
    )


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


def test_all_events_come(gateway: Gateway, via_gateway: Client) -> None:
    response = via_gateway.send(
        "POST", "/v2/models/stream/generate_stream", b'{"text_input": "caf\xc3\xa9"}'
    )
    assert response.headers.get_content_type() == "text/event-stream"
    lines = [line for line in response.body.split(b"\n\n") if line]
    texts = [json.loads(line.removeprefix(b"data:"))["text_output"] for line in lines]
    assert texts == [f"café {number}" for number in range(5)]


def test_a_client_that_leaves_a_stream_does_no_harm(gateway: Gateway, via_gateway: Client) -> None:
    for _ in range(3):
        assert next(events(gateway, "hi")).startswith(b"HTTP/1.1 200 ")
    assert via_gateway.get("/v2/health/live").status == 200


def test_pipelined_requests(gateway: Gateway) -> None:
    """Sent without waiting for the responses, which come in the order of the requests."""
    head = (
        b"POST /v2/models/identity_fp32/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%s\r\n"
    )
    last = b"GET /v2/models/add/ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with socket.create_connection((gateway.host, gateway.port), 30) as sock:
        sock.sendall(head % (len(INFER), b"") + INFER + head % (1, b"") + b"x" + last)
        seen = b""
        while piece := sock.recv(65536):
            seen += piece
    assert seen.count(b"HTTP/1.1 ") == 3
    places = [seen.index(words) for words in (b"[1.0,2.0]", b"not valid JSON", b"text/plain")]
    assert places == sorted(places)
