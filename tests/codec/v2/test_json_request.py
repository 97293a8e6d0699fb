from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from gateway.codec.policies import BytesEncoding, JsonPolicies
from gateway.codec.v2.json_writer import JsonRequestWriter
from gateway.codec.v2.request import InferRequestReader
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.messages import InferRequest
from tests.codec import strategies
from tests.codec.reference import RefusedError, convert_request, pack_bytes, request_as_json
from tests.codec.v2.infer_requests import Failed
from tests.codec.v2.infer_responses import POLICIES, rewritten

BASE64 = JsonPolicies(bytes_encoding=BytesEncoding.BASE64)


def entry(datatype: str, shape: list[int], data: bytes, **more: Any) -> dict[str, Any]:
    size = {"binary_data_size": len(data)}
    parameters = {**more.pop("parameters", {}), **size}
    return {"name": "x", "datatype": datatype, "shape": shape, "parameters": parameters, **more}


def message(*tensors: tuple[dict[str, Any], bytes], **fields: Any) -> tuple[bytes, int]:
    """Return a binary request, and the size of its header."""
    header = json.dumps({"inputs": [shown for shown, _ in tensors], **fields}).encode()
    return header + b"".join(data for _, data in tensors), len(header)


def one(datatype: str, shape: list[int], data: bytes, **more: Any) -> tuple[bytes, int]:
    return message((entry(datatype, shape, data, **more), data))


def read(
    header: bytes, base64: Mapping[int, bool], as_base64: frozenset[str] = frozenset()
) -> InferRequest:
    """Read a header; ``base64`` tells by input how the client wrote it in JSON."""
    reader = InferRequestReader(1 << 20, 64)
    reader.feed(header, last=True)
    request = reader.finish()
    inputs = tuple(
        replace(tensor, base64=base64.get(index))
        for index, tensor in enumerate(request.head.inputs)
    )
    encoding = replace(request.head.output_encoding, as_base64=as_base64)
    head = replace(request.head, inputs=inputs, output_encoding=encoding)
    return InferRequest(head, request.id, request.tensors, request.text)


def written(
    pieces: list[bytes],
    header_size: int,
    policies: JsonPolicies | None = None,
    base64: Mapping[int, bool] | None = None,
    as_base64: frozenset[str] = frozenset(),
) -> bytes | Failed:
    request = read(b"".join(pieces)[:header_size], base64 or {}, as_base64)
    return written_from(request, without_start(pieces, header_size), policies)


def without_start(pieces: list[bytes], size: int) -> Iterator[bytes]:
    for piece in pieces:
        yield piece[size:]
        size = max(0, size - len(piece))


def written_from(
    request: InferRequest, data: Iterable[bytes | memoryview], policies: JsonPolicies | None = None
) -> bytes | Failed:
    writer = JsonRequestWriter(request, policies or JsonPolicies())
    try:
        text = b"".join([writer.feed(piece) for piece in (b"", *data)])
        writer.finish()
    except GatewayError as error:
        return Failed(error.kind, error.message)
    return text


def fields_of(text: bytes | Failed) -> Any:
    assert isinstance(text, bytes), text
    return json.loads(text)


# ----------------------------------------------------------------------- independence of splits


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
    text = written_from(request, [data], policies)
    assert written_from(request, strategies.cut(data, seed), policies) == text
    assert written_from(request, strategies.bytewise(data), policies) == text
    forms = {True: "base64", False: "utf8"}
    how = {i: forms[x.base64] for i, x in enumerate(request.head.inputs) if x.base64 is not None}
    by_policy = policies.nonfinite.value, policies.bytes_encoding.value
    try:
        expected = request_as_json(plain.header, tensors, *by_policy, how, plain.as_base64)
    except RefusedError:
        assert isinstance(text, Failed)
        assert text.kind is ErrorKind.BAD_REQUEST
    else:
        assert _normal(fields_of(text)) == _normal(json.loads(rewritten(json.dumps(expected))))


def _normal(value: Any) -> Any:
    """Return fields without empty parameters or outputs, whose NaN equals itself."""
    if isinstance(value, dict):
        return {k: _normal(v) for k, v in value.items() if k not in ("parameters", "outputs") or v}
    if isinstance(value, list):
        return [_normal(each) for each in value]
    return "NaN" if value != value else value


# ---------------------------------------------------------------------------- round trips


# ---------------------------------------------------------------------------------- the header


# ---------------------------------------------------------------------------------- BYTES

NOT_UTF8 = pack_bytes([b"a", b"\xff"])
TEXTS = pack_bytes([b"a", b"b"])
IN_BASE64 = {"content_type": "base64"}


def test_error_for_bytes_that_are_not_utf8_names_alternatives() -> None:
    body, header_size = one("BYTES", [2], NOT_UTF8)
    for pieces in ([body], strategies.bytewise(body)):
        assert written(pieces, header_size) == Failed(
            ErrorKind.BAD_REQUEST,
            "input 'x': element 1 is not UTF-8 text, which JSON needs; set the policy "
            "bytes: base64",
        )


@pytest.mark.parametrize(
    ("datatype", "data", "told", "policies", "base64", "shown"),
    [
        # The policy decides for inputs that came in binary form, and keeps other parameters.
        ("BYTES", NOT_UTF8, {"a": 1}, BASE64, None, (["YQ==", "/w=="], {"a": 1} | IN_BASE64)),
        # The client's own encoding in JSON goes before it.
        ("BYTES", NOT_UTF8, {}, None, True, (["YQ==", "/w=="], IN_BASE64)),
        # Another content type is for the server to read.
        ("BYTES", TEXTS, IN_BASE64, BASE64, None, (["a", "b"], IN_BASE64)),
    ],
)
def test_bytes_have_the_encoding_of_the_client_or_of_the_policy(
    datatype: str,
    data: bytes,
    told: dict[str, Any],
    policies: JsonPolicies | None,
    base64: bool | None,
    shown: tuple[list[Any], dict[str, Any] | None],
) -> None:
    body, header_size = one(datatype, [2], data, parameters=told)
    how = {} if base64 is None else {0: base64}
    for pieces in ([body], strategies.bytewise(body)):
        (found,) = fields_of(written(pieces, header_size, policies, how))["inputs"]
        assert (found["data"], found.get("parameters")) == shown


# ---------------------------------------------------------------------------------- policies


# ---------------------------------------------------------------------------- errors
