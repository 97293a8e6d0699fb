"""Requests that crash Triton, or make it close without a response, never reach it."""

import json
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.integration.support.client import HEADER_LENGTH, Client, Response
from tests.integration.support.tap import Tap
from tests.integration.triton.server import HOST, TritonServer

pytestmark = pytest.mark.triton

# What Triton dies of is some 200,000 deep, or 100,000 in the data of an input.
ARRAYS = b"[" * 300_000 + b"]" * 300_000
OBJECTS = b'{"a":' * 300_000 + b"1" + b"}" * 300_000
DEEP = {"arrays": b'{"x":' + ARRAYS + b"}", "objects": OBJECTS, "BOM": b"\xef\xbb\xbf" + OBJECTS}

PATHS = {
    "generate": "/v2/models/stream/generate",
    "generate_stream": "/v2/models/stream/generate_stream",
    "index": "/v2/repository/index",
    "index of a repository": "/v2/repository/r/index",
    "load": "/v2/repository/models/add/load",
    "unload": "/v2/repository/models/add/unload",
    "trace": "/v2/trace/setting",
    "trace of a model": "/v2/models/add/trace/setting",
    "logging": "/v2/logging",
    "system shared memory": "/v2/systemsharedmemory/region/r/register",
    "CUDA shared memory": "/v2/cudasharedmemory/region/r/register",
}
INFER = "/v2/models/identity_fp32/infer"


def check_refused(
    client: Client,
    tap: Tap,
    triton: TritonServer,
    send: Callable[[], Response],
    status: int = 400,
) -> str:
    """Check that the gateway refuses, that the server gets no body, and that it goes on."""
    tap.forget()
    response = send()
    assert response.status == status, response.body[:1000]
    assert b"}" not in tap.sent
    assert b"[" not in tap.sent
    assert client.get("/v2/models/identity_fp32/ready").status == 200
    assert triton.is_alive()
    return response.error


def _post(
    client: Client, path: str, body: bytes, headers: Mapping[str, str] | None = None
) -> Callable[[], Response]:
    return lambda: client.send("POST", path, body, headers)


@pytest.mark.parametrize("body", DEEP.values(), ids=DEEP)
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_json_nested_too_deep(
    path: str, body: bytes, tapped: Client, tap: Tap, triton: TritonServer
) -> None:
    error = check_refused(tapped, tap, triton, _post(tapped, path, body))
    assert "nested deeper than 64" in error


@pytest.mark.parametrize("body", DEEP.values(), ids=DEEP)
def test_an_infer_request_nested_too_deep(
    body: bytes, tapped: Client, tap: Tap, triton: TritonServer
) -> None:
    # What is not data is held, up to limits.max_inference_header_bytes.
    status = 413 if len(body) > 2**20 else 400
    check_refused(tapped, tap, triton, _post(tapped, INFER, body), status)


def test_data_nested_too_deep(tapped: Client, tap: Tap, triton: TritonServer) -> None:
    body = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1],"data":' + ARRAYS + b"}]}"
    check_refused(tapped, tap, triton, _post(tapped, INFER, body))


def _request(
    datatype: str, data: list[Any], outputs: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    entry = {"name": "INPUT0", "datatype": datatype, "shape": [len(data)], "data": data}
    return {"inputs": [entry], "outputs": outputs, **more}


def _classified(classes: int, name: str = "OUTPUT0", **more: Any) -> dict[str, Any]:
    return {"name": name, "parameters": {"classification": classes, **more}}


KILLERS = {
    "strings": ("identity_bytes", _request("BYTES", ["a", "b"], [_classified(1)])),
    "no strings": ("identity_bytes", _request("BYTES", [], [_classified(1)])),
    "as binary": ("identity_bytes", _request("BYTES", ["1"], [_classified(2, binary_data=True)])),
    "listed twice": (
        "identity_bytes",
        _request("BYTES", ["a"], [_classified(1), {"name": "OUTPUT0"}]),
    ),
    "a batch": (
        "batched_bytes",
        {
            "inputs": [{"name": "INPUT0", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}],
            "outputs": [_classified(2**63 - 1)],
        },
    ),
    "no numbers": ("identity_fp32", _request("FP32", [], [_classified(2)])),
}


@pytest.mark.parametrize(("model", "fields"), KILLERS.values(), ids=KILLERS)
def test_classification(
    model: str, fields: dict[str, Any], tapped: Client, tap: Tap, triton: TritonServer
) -> None:
    send = _post(tapped, f"/v2/models/{model}/infer", json.dumps(fields).encode())
    error = check_refused(tapped, tap, triton, send)
    assert "output 'OUTPUT0'" in error


# Triton takes the first of two keys of one name. Each of these asks for classes in the first.
HIDDEN = [
    b'"outputs":[{"name":"OUTPUT0","parameters":{"classification":1,"classification":0,%b}}]',
    b'"outputs":[{"name":"OUTPUT0","parameters":{"cl\\u0061ssification":1,"classification":0,%b}}]',
    b'"outputs":[{"name":"OUTPUT0","parameters":{"classification":1,%b}}],'
    b'"outputs":[{"name":"OUTPUT0","parameters":{%b}}]',
    b'"outputs":[{"name":"OUTPUT0","parameters":{"classification":1,%b},"parameters":{%b}}]',
]


@pytest.mark.parametrize("outputs", HIDDEN)
@pytest.mark.parametrize("binary", [b'"binary_data":true', b'"binary_data":false'])
def test_classification_that_is_hidden(
    outputs: bytes, binary: bytes, tapped: Client, triton: TritonServer
) -> None:
    element = b"\x01\x00\x00\x00a"
    header = (
        b'{"inputs":[{"name":"INPUT0","datatype":"BYTES","shape":[1],'
        b'"parameters":{"binary_data_size":5}}],%b}'
    ) % (outputs.replace(b"%b", binary))
    response = tapped.infer("identity_bytes", header + element, {HEADER_LENGTH: str(len(header))})
    # What the server gets is what was looked at: the last of them.
    assert response.status == 200, response.body
    assert triton.is_alive()
    assert (
        b"a" in response.body[response.header_length :]
        if response.header_length
        else response.fields
    )


@pytest.mark.parametrize(
    ("fields", "culprit"),
    [
        ({"parameters": {"priority": -1}}, "priority"),
        ({"parameters": {"timeout": "1"}}, "timeout"),
        ({"parameters": {"sequence_id": [1]}}, "sequence_id"),
        ({"parameters": {"sequence_start": 1}}, "sequence_start"),
        ({"parameters": {"sequence_end": None}}, "sequence_end"),
        ({"outputs": [{"name": "OUTPUT0", "parameters": {"classification": "1"}}]}, "'OUTPUT0'"),
        (
            {"outputs": [{"name": "OUTPUT0", "parameters": {"shared_memory_region": 1}}]},
            "shared_memory_region",
        ),
    ],
)
def test_parameters_that_triton_answers_with_500(
    fields: dict[str, Any], culprit: str, tapped: Client, tap: Tap, triton: TritonServer
) -> None:
    body = json.dumps({**_request("FP32", [1, 2], []), **fields}).encode()
    error = check_refused(tapped, tap, triton, _post(tapped, INFER, body))
    assert culprit in error


def test_classification_of_numbers_is_the_servers(tapped: Client, direct: Client) -> None:
    body = json.dumps(_request("FP32", [1, 3, 2], [_classified(2)])).encode()
    responses = [client.infer("identity_fp32", body) for client in (tapped, direct)]
    assert [response.status for response in responses] == [200, 200]
    data = [response.fields["outputs"][0]["data"] for response in responses]
    assert data[0] == data[1] == ["3.000000:1", "2.000000:2"]


LONGEST = 8_176


@pytest.mark.parametrize("more", [0, 1, 4000])
@pytest.mark.parametrize("part", ["path", "query", "header"])
def test_heads_that_it_does_not_answer(
    part: str, more: int, tapped: Client, tap: Tap, triton: TritonServer
) -> None:
    target, headers = "/v2/models/identity_fp32/stats", {}
    if part == "path":
        target = "/v2/".ljust(LONGEST + more, "a")
    elif part == "query":
        target = f"{target}?".ljust(LONGEST + more, "a")
    else:
        headers["X"] = "a" * (LONGEST + more)
    if more:
        check_refused(tapped, tap, triton, lambda: tapped.send("GET", target, None, headers))
        assert tap.requests == ["GET /v2/models/identity_fp32/ready"]
    else:
        response = tapped.send("GET", target, None, headers)
        assert response.status == (404 if part == "path" else 200)


def test_a_long_target_in_segments(triton: TritonServer) -> None:
    # As a network cuts it: 6 segments of 1,448 bytes, and each end costs Triton a byte of room.
    head = f"GET {'/v2/'.ljust(LONGEST, 'a')} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
    with socket.create_connection((HOST, triton.http_port), timeout=10) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(head), 1448):
            sock.sendall(head[start : start + 1448])
            time.sleep(0.02)
        assert sock.recv(64).startswith(b"HTTP/1.1 404 ")
