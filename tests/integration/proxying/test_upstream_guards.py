"""Requests that crash Triton, or make it close without a response, never reach it.

Each path and each form of them is in tests/end_to_end/conversion/test_refused_requests.py.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.integration.support.client import HEADER_LENGTH, Client
from tests.integration.support.gateway import running_gateway
from tests.integration.triton.models import named
from tests.integration.triton.server import TritonServer

pytestmark = pytest.mark.triton

# What Triton dies of is some 200,000 deep, or 100,000 in the data of an input.
OBJECTS = b'{"a":' * 300_000 + b"1" + b"}" * 300_000
INFER = "/v2/models/identity_fp32/infer"
DEEP = {
    "load with a BOM": ("/v2/repository/models/add/load", b"\xef\xbb\xbf" + OBJECTS, 400),
    # What is not data is held, up to limits.max_inference_header_bytes.
    "infer of objects": (INFER, OBJECTS, 413),
}


def check_refused(
    via_gateway: Client,
    triton: TritonServer,
    target: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    status: int = 400,
) -> str:
    """Check that the gateway refuses, that the server goes on."""
    response = via_gateway.send("GET" if body is None else "POST", target, body, headers)
    assert response.status == status, response.body[:1000]
    assert via_gateway.get("/v2/models/identity_fp32/ready").status == 200
    assert triton.is_alive()
    return response.error


@pytest.mark.parametrize(("target", "body", "status"), DEEP.values(), ids=DEEP)
def test_json_nested_too_deep_does_not_kill_triton(
    target: str, body: bytes, status: int, via_gateway: Client, triton: TritonServer
) -> None:
    check_refused(via_gateway, triton, target, body, status=status)


def _request(datatype: str, data: list[Any], outputs: list[dict[str, Any]]) -> dict[str, Any]:
    entry = {"name": "INPUT0", "datatype": datatype, "shape": [len(data)], "data": data}
    return {"inputs": [entry], "outputs": outputs}


def _classified(classes: int, **more: Any) -> dict[str, Any]:
    return {"name": "OUTPUT0", "parameters": {"classification": classes, **more}}


KILLERS = {
    "strings": ("identity_bytes", _request("BYTES", ["a", "b"], [_classified(1)])),
    "no numbers": ("identity_fp32", _request("FP32", [], [_classified(2)])),
}


@pytest.mark.parametrize(("model", "fields"), KILLERS.values(), ids=KILLERS)
def test_classification_does_not_kill_triton(
    model: str, fields: dict[str, Any], via_gateway: Client, triton: TritonServer
) -> None:
    body = json.dumps(fields).encode()
    assert "output 'OUTPUT0'" in check_refused(
        via_gateway, triton, f"/v2/models/{model}/infer", body
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
    outputs: bytes, via_gateway: Client, triton: TritonServer
) -> None:
    header = (
        b'{"inputs":[{"name":"INPUT0","datatype":"BYTES","shape":[1],'
        b'"parameters":{"binary_data_size":5}}],%b}'
    ) % (outputs.replace(b"%b", b'"binary_data":true'))
    sent = header + b"\x01\x00\x00\x00a"
    response = via_gateway.infer("identity_bytes", sent, {HEADER_LENGTH: str(len(header))})
    # What the server gets is what was looked at: the last of them.
    assert response.status == 200, response.body
    assert triton.is_alive()


def test_parameter_that_triton_answers_with_500_is_refused(
    direct: Client, via_gateway: Client, triton: TritonServer
) -> None:
    fields = {**_request("FP32", [1, 2], []), "parameters": {"priority": -1}}
    body = json.dumps(fields).encode()
    assert direct.send("POST", INFER, body).status == 500
    assert "priority" in check_refused(via_gateway, triton, INFER, body)


LONGEST = 8_176


def _long(part: str, size: int) -> tuple[str, dict[str, str]]:
    target = "/v2/models/identity_fp32/stats"
    if part == "path":
        return "/v2/".ljust(size, "a"), {}
    if part == "query":
        return f"{target}?".ljust(size, "a"), {}
    return target, {"X": "a" * size}


@pytest.fixture(scope="module")
def new_triton() -> Iterator[TritonServer]:
    """A new one: one that had served a whole test run closed for shorter targets, too."""
    with TritonServer(named("identity_fp32")) as server:
        yield server


@pytest.mark.parametrize("part", ["path", "query", "header"])
def test_head_that_triton_does_not_answer_is_refused(
    part: str, new_triton: TritonServer, tmp_path: Path
) -> None:
    with (
        running_gateway(tmp_path, new_triton.http_url) as gateway,
        Client(gateway.host, gateway.port) as client,
    ):
        target, headers = _long(part, LONGEST)
        assert client.send("GET", target, None, headers).status == (404 if part == "path" else 200)
        target, headers = _long(part, LONGEST + 1)
        check_refused(client, new_triton, target, headers=headers)
