"""Requests that crash Triton, or make it close without a response, never reach it.

Each path and each form of them is in tests/end_to_end/conversion/test_refused_requests.py.
"""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.integration.support.client import HEADER_LENGTH, Client
from tests.integration.support.tap import Tap
from tests.integration.triton.server import TritonServer

pytestmark = pytest.mark.triton

# What Triton dies of is some 200,000 deep, or 100,000 in the data of an input.
OBJECTS = b'{"a":' * 300_000 + b"1" + b"}" * 300_000
DATA = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1],"data":%b}]}'
INFER = "/v2/models/identity_fp32/infer"
DEEP = {
    "load with a BOM": ("/v2/repository/models/add/load", b"\xef\xbb\xbf" + OBJECTS, 400),
    # What is not data is held, up to limits.max_inference_header_bytes.
    "infer of objects": (INFER, OBJECTS, 413),
    "data without an end": (INFER, DATA % (b"[" * 300_000), 400),
}


def check_refused(
    tapped: Client,
    tap: Tap,
    triton: TritonServer,
    target: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    status: int = 400,
) -> str:
    """Check that the gateway refuses, that the server gets no body, and that it goes on."""
    tap.forget()
    response = tapped.send("GET" if body is None else "POST", target, body, headers)
    assert response.status == status, response.body[:1000]
    assert b"}" not in tap.sent
    assert b"[" not in tap.sent
    assert tapped.get("/v2/models/identity_fp32/ready").status == 200
    assert triton.is_alive()
    return response.error


@pytest.mark.parametrize(("target", "body", "status"), DEEP.values(), ids=DEEP)
def test_json_nested_too_deep_does_not_kill_triton(
    target: str, body: bytes, status: int, tapped: Client, tap: Tap, triton: TritonServer
) -> None:
    check_refused(tapped, tap, triton, target, body, status=status)


def _request(datatype: str, data: list[Any], outputs: list[dict[str, Any]]) -> dict[str, Any]:
    entry = {"name": "INPUT0", "datatype": datatype, "shape": [len(data)], "data": data}
    return {"inputs": [entry], "outputs": outputs}


def _classified(classes: int, **more: Any) -> dict[str, Any]:
    return {"name": "OUTPUT0", "parameters": {"classification": classes, **more}}


KILLERS = {
    "strings": ("identity_bytes", _request("BYTES", ["a", "b"], [_classified(1)])),
    "as binary": ("identity_bytes", _request("BYTES", ["1"], [_classified(2, binary_data=True)])),
    "no numbers": ("identity_fp32", _request("FP32", [], [_classified(2)])),
}


@pytest.mark.parametrize(("model", "fields"), KILLERS.values(), ids=KILLERS)
def test_classification_does_not_kill_triton(
    model: str, fields: dict[str, Any], tapped: Client, tap: Tap, triton: TritonServer
) -> None:
    body = json.dumps(fields).encode()
    assert "output 'OUTPUT0'" in check_refused(
        tapped, tap, triton, f"/v2/models/{model}/infer", body
    )


# Triton takes the first of two keys of one name. Each of these asks for classes in the first.
HIDDEN = [
    b'"outputs":[{"name":"OUTPUT0","parameters":{"cl\\u0061ssification":1,"classification":0,%b}}]',
    b'"outputs":[{"name":"OUTPUT0","parameters":{"classification":1,%b}}],'
    b'"outputs":[{"name":"OUTPUT0","parameters":{%b}}]',
    b'"outputs":[{"name":"OUTPUT0","parameters":{"classification":1,%b},"parameters":{%b}}]',
]


@pytest.mark.parametrize("outputs", HIDDEN)
def test_hidden_classification_does_not_kill_triton(
    outputs: bytes, tapped: Client, triton: TritonServer
) -> None:
    header = (
        b'{"inputs":[{"name":"INPUT0","datatype":"BYTES","shape":[1],'
        b'"parameters":{"binary_data_size":5}}],%b}'
    ) % (outputs.replace(b"%b", b'"binary_data":true'))
    sent = header + b"\x01\x00\x00\x00a"
    response = tapped.infer("identity_bytes", sent, {HEADER_LENGTH: str(len(header))})
    # What the server gets is what was looked at: the last of them.
    assert response.status == 200, response.body
    assert triton.is_alive()


WRONG_TYPES: dict[str, dict[str, Any]] = {
    "priority": {"parameters": {"priority": -1}},
    "sequence_start": {"parameters": {"sequence_start": 1}},
    "shared_memory_region": {
        "outputs": [{"name": "OUTPUT0", "parameters": {"shared_memory_region": 1}}]
    },
}


@pytest.mark.parametrize("parameter", WRONG_TYPES)
def test_parameter_that_triton_answers_with_500_is_refused(
    parameter: str, direct: Client, tapped: Client, tap: Tap, triton: TritonServer
) -> None:
    body = json.dumps({**_request("FP32", [1, 2], []), **WRONG_TYPES[parameter]}).encode()
    assert direct.send("POST", INFER, body).status == 500
    assert parameter in check_refused(tapped, tap, triton, INFER, body)


def test_classification_of_numbers_is_the_servers(tapped: Client, direct: Client) -> None:
    for binary in (False, True):
        outputs = [_classified(2, binary_data=binary)]
        body = json.dumps(_request("FP32", [1, 3, 2], outputs)).encode()
        response, like = (client.infer("identity_fp32", body) for client in (tapped, direct))
        assert (response.status, response.body) == (200, like.body)
        assert response.headers["Content-Type"] == like.headers["Content-Type"]
        assert b"3.000000:1" in response.body


LONGEST = 8_176


def _long(part: str, size: int) -> tuple[str, dict[str, str]]:
    target = "/v2/models/identity_fp32/stats"
    if part == "path":
        return "/v2/".ljust(size, "a"), {}
    if part == "query":
        return f"{target}?".ljust(size, "a"), {}
    return target, {"X": "a" * size}


@pytest.mark.parametrize("part", ["path", "query", "header"])
def test_head_that_triton_does_not_answer_is_refused(
    part: str, tapped: Client, tap: Tap, triton: TritonServer
) -> None:
    target, headers = _long(part, LONGEST)
    assert tapped.send("GET", target, None, headers).status == (404 if part == "path" else 200)
    target, headers = _long(part, LONGEST + 1)
    check_refused(tapped, tap, triton, target, headers=headers)
    assert tap.requests == ["GET /v2/models/identity_fp32/ready"]
