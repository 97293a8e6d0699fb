from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from gateway.codec.policies import BytesEncoding, JsonPolicies
from gateway.codec.v2.binary_request import write_binary_header
from gateway.codec.v2.json_writer import JsonRequestWriter
from gateway.codec.v2.request import InferRequestReader, read_without_data
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.messages import InferRequest
from tests.codec import strategies
from tests.codec.reference import RefusedError, convert_request, pack_bytes, request_as_json
from tests.codec.v2.conversions import POLICIES, Failed, normal

Fields = dict[str, Any]


def read(text: bytes) -> InferRequest:
    request = read_without_data(text, 64)
    assert request is not None
    return request


# ---------------------------------------------------------------------------------- JSON


def written(
    request: InferRequest, data: Iterable[bytes | memoryview], policies: JsonPolicies | None = None
) -> bytes | Failed:
    writer = JsonRequestWriter(request, policies or JsonPolicies())
    try:
        return b"".join(map(writer.feed, data)) + writer.finish()
    except GatewayError as error:
        return Failed(error.kind, error.message)


@strategies.LAW
@given(strategies.request_bodies(), POLICIES, strategies.SEEDS)
def test_request_is_the_same_however_split(body: bytes, policies: JsonPolicies, seed: int) -> None:
    rng = random.Random(seed)
    try:
        plain = convert_request(body, 64)
    except RefusedError:
        return  # its shape does not match its data
    tensors = [rng.randbytes(t) if isinstance(t, int) else t for t in plain.tensors]
    codec = InferRequestReader(1 << 20, 64)
    codec.feed(body, last=True)
    request, data = codec.finish(), b"".join(tensors)
    text = written(request, [data], policies)
    assert written(request, strategies.cut(data, seed), policies) == text
    assert written(request, strategies.bytewise(data), policies) == text
    forms = {True: "base64", False: "utf8"}
    how = {i: forms[x.base64] for i, x in enumerate(request.head.inputs) if x.base64 is not None}
    by_policy = policies.nonfinite.value, policies.bytes_encoding.value
    try:
        expected = request_as_json(plain.header, tensors, *by_policy, how, plain.as_base64)
    except RefusedError:
        assert isinstance(text, Failed)
        assert text.kind is ErrorKind.BAD_REQUEST
    else:
        assert isinstance(text, bytes)
        assert _normal(json.loads(text)) == _normal(json.loads(normal(json.dumps(expected))))


def _normal(value: Any) -> Any:
    """Return fields without empty parameters or outputs, whose NaN equals itself."""
    if isinstance(value, dict):
        return {k: _normal(v) for k, v in value.items() if k not in ("parameters", "outputs") or v}
    if isinstance(value, list):
        return [_normal(each) for each in value]
    return "NaN" if value != value else value


IN_BASE64 = {"content_type": "base64"}
NOT_UTF8 = pack_bytes([b"a", b"\xff"])
TEXTS = pack_bytes([b"a", b"b"])
NAMES_ALTERNATIVES = Failed(
    ErrorKind.BAD_REQUEST,
    "input 'x': element 1 is not UTF-8 text, which JSON needs; set the policy bytes: base64",
)


@pytest.mark.parametrize(
    ("data", "told", "encoding", "base64", "shown"),
    [
        (NOT_UTF8, {}, BytesEncoding.UTF8, None, NAMES_ALTERNATIVES),
        # The policy decides for inputs that came in binary form, and keeps other parameters.
        (NOT_UTF8, {"a": 1}, BytesEncoding.BASE64, None, (["YQ==", "/w=="], {"a": 1} | IN_BASE64)),
        # The client's own encoding in JSON goes before it.
        (NOT_UTF8, {}, BytesEncoding.UTF8, True, (["YQ==", "/w=="], IN_BASE64)),
        # Another content type is for the server to read.
        (TEXTS, IN_BASE64, BytesEncoding.BASE64, None, (["a", "b"], IN_BASE64)),
    ],
)
def test_bytes_have_the_encoding_of_the_client_or_of_the_policy(
    data: bytes,
    told: Fields,
    encoding: BytesEncoding,
    base64: bool | None,
    shown: tuple[list[Any], Fields] | Failed,
) -> None:
    parameters = {**told, "binary_data_size": len(data)}
    entry = {"name": "x", "datatype": "BYTES", "shape": [2], "parameters": parameters}
    outputs = [{"name": "y", "parameters": IN_BASE64}]
    request = read(json.dumps({"inputs": [entry], "outputs": outputs}).encode())
    head = replace(request.head, inputs=(replace(request.head.inputs[0], base64=base64),))
    request = InferRequest(head, request.id, request.tensors, request.text)
    for pieces in ([data], strategies.bytewise(data)):
        text = written(request, pieces, JsonPolicies(bytes_encoding=encoding))
        if isinstance(text, Failed):
            assert text == shown
        else:
            assert json.loads(text)["outputs"] == outputs
            (found,) = json.loads(text)["inputs"]
            assert (found["data"], found["parameters"]) == shown


# ---------------------------------------------------------------------------------- binary


INPUT = {"name": "x", "shape": [2], "datatype": "INT8", "parameters": {"binary_data_size": 2}}
ON, OFF = {"binary_data": True}, {"binary_data": False}
CLASSES, SHARED = {"classification": 3}, {"shared_memory_region": "r"}
DEFAULT_ON = {"binary_data_output": True}


def outputs(*parameters: Fields) -> list[Fields]:
    return [{"name": f"out{i}", "parameters": each} for i, each in enumerate(parameters)]


@pytest.mark.parametrize(
    ("before", "unlisted", "after"),
    [
        ({}, (), {"parameters": DEFAULT_ON}),
        ({"outputs": outputs(CLASSES)}, (), {"outputs": outputs(CLASSES | ON)}),
        ({"outputs": outputs(SHARED, OFF)}, (), {"outputs": outputs(SHARED, ON)}),
        # The gateway encodes base64 itself.
        ({"outputs": outputs(IN_BASE64, OFF | IN_BASE64)}, (), {"outputs": outputs(ON, ON)}),
        # Where a server needs it, outputs are listed, unless the client lists some.
        ({}, ("out0", "out1"), {"outputs": outputs(ON, ON), "parameters": DEFAULT_ON}),
        ({"outputs": []}, ("out0",), {"outputs": outputs(ON), "parameters": DEFAULT_ON}),
        ({"outputs": outputs(ON)}, ("A",), {"outputs": outputs(ON)}),
        # Other members with the name id stay.
        ({"parameters": {"id": "a"}}, (), {"parameters": {"id": "a"} | DEFAULT_ON}),
        (
            {"x": {"y": "id", "id": "a"}, "id": "b"},
            (),
            {"x": {"y": "id", "id": "a"}, "id": "b", "parameters": DEFAULT_ON},
        ),
    ],
)
def test_every_output_is_requested_in_binary(
    before: Fields, unlisted: tuple[str, ...], after: Fields
) -> None:
    text = json.dumps({**before, "inputs": [INPUT]}).encode()
    assert json.loads(write_binary_header(read(text), unlisted)) == {"inputs": [INPUT], **after}


@pytest.mark.parametrize("form", [{}, {"parameters": DEFAULT_ON}])
def test_each_request_has_its_own_id(form: Fields) -> None:
    for request_id in ("", "a", "b", "\u00e9", 'a"b', None):
        fields = {"inputs": [INPUT], **form}
        if request_id is not None:
            fields["id"] = request_id
        request = read_without_data(json.dumps(fields, ensure_ascii=False).encode(), 64)
        if request is not None:
            assert request.id == request_id
            assert json.loads(write_binary_header(request)).get("id") == request_id
