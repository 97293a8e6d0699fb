"""Requests in each form of clients; the values that come back: test_handler.py."""

import base64
import json
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admin.try_it.forms import FORMS
from gateway.admin.try_it.inputs import make_request
from gateway.errors import ErrorKind, GatewayError
from gateway.upstream.transport import UpstreamRequest
from tests.admin.try_it.trying import call
from tests.support.grpc.proto_file import message_class

SIZE = "Inference-Header-Content-Length"
NUMBERS = {"name": "x", "datatype": "FP32", "shape": [1, 2], "values": [1.5, -2]}
TEXTS = {"name": 't"', "datatype": "BYTES", "shape": [1, 1], "values": ["é"]}
NOT_TEXT = base64.b64encode(b"\1\0\0\0\xff").decode()
DATA = np.array([1.5, -2], "<f4").tobytes()

HTTP_FORMS = [form for form in FORMS if form != "grpc"]


def _write(
    form: str, *inputs: dict[str, Any], model: str = "m", version: str = ""
) -> UpstreamRequest:
    return FORMS[form](make_request(call(form, *inputs).inputs, []), model, version)


def _body(request: UpstreamRequest) -> bytes:
    assert isinstance(request.body, list | tuple)
    return b"".join(request.body)


def test_json() -> None:
    request = _write("json", NUMBERS, TEXTS)
    assert (request.method, request.target) == ("POST", "/v2/models/m/infer")
    assert dict(request.headers) == {"Content-Type": "application/json"}
    numbers, texts = json.loads(_body(request))["inputs"]
    assert (numbers["name"], numbers["data"], numbers["shape"]) == ("x", [1.5, -2], [1, 2])
    assert (texts["name"], texts["data"]) == ('t"', ["é"])


def test_binary() -> None:
    request = _write("binary", NUMBERS, TEXTS, version="7")
    assert request.target == "/v2/models/m/versions/7/infer"
    body, size = _body(request), int(request.headers[SIZE])
    numbers, texts = json.loads(body[:size])["inputs"]
    assert numbers["parameters"]["binary_data_size"] == 8
    assert body[size:] == DATA + b"\2\0\0\0" + "é".encode()
    assert texts["shape"] == [1, 1]


def test_raw() -> None:
    request = _write("raw", NUMBERS)
    assert (request.headers[SIZE], _body(request)) == ("0", DATA)
    assert _body(_write("raw", TEXTS)) == "é".encode()


def test_v1_has_rows_for_one_input_and_columns_for_several() -> None:
    request = _write("v1", NUMBERS)
    assert request.target == "/v1/models/m:predict"
    assert json.loads(_body(request)) == {"instances": [[1.5, -2]]}
    request = _write("v1", NUMBERS, TEXTS, version="2")
    assert request.target == "/v1/models/m/versions/2:predict"
    assert json.loads(_body(request)) == {"inputs": {"x": [[1.5, -2]], 't"': [["é"]]}}
    scalar = {"name": "x", "datatype": "INT8", "shape": [], "values": [3]}
    assert json.loads(_body(_write("v1", scalar, TEXTS)))["inputs"]["x"] == 3
    empty = {"name": "x", "datatype": "INT8", "shape": [2, 0], "fill": "ones"}
    assert json.loads(_body(_write("v1", empty))) == {"instances": [[], []]}


def test_grpc() -> None:
    request = _write("grpc", NUMBERS, TEXTS, version="3")
    assert request.is_grpc
    assert request.target == "/inference.GRPCInferenceService/ModelInfer"
    body = _body(request)
    assert int.from_bytes(body[1:5], "big") == len(body) - 5
    message = message_class("ModelInferRequest").FromString(body[5:])
    assert (message.model_name, message.model_version) == ("m", "3")
    assert [each.name for each in message.inputs] == ["x", 't"']
    assert message.raw_input_contents[0] == DATA


@pytest.mark.parametrize(
    ("form", "inputs", "words"),
    [
        ("raw", [NUMBERS, TEXTS], "a raw request has one input, not 2"),
        ("raw", [], "a raw request has one input, not 0"),
        ("raw", [{**TEXTS, "shape": [2], "values": ["a", "b"]}], "BYTES has one element"),
        ("json", [{**TEXTS, "bytes": NOT_TEXT}], "'t\"': element 0 is not UTF-8"),
        ("v1", [{**TEXTS, "bytes": NOT_TEXT}], "'t\"': element 0 is not UTF-8"),
    ],
)
def test_what_a_form_cannot_express_is_refused(
    form: str, inputs: list[dict[str, Any]], words: str
) -> None:
    for each in inputs:
        if "bytes" in each:
            del each["values"]
    with pytest.raises(GatewayError, match=words) as caught:
        _write(form, *inputs)
    assert caught.value.kind in (ErrorKind.BAD_REQUEST, ErrorKind.NOT_ACCEPTABLE) or form == "v1"


NAMES = ["a b", "a/b", "..", "é😀", "x\r\nX-Evil: 1", "?q#f", "%2F", "'; rm -rf /", "m" * 10_000]


@given(st.sampled_from(NAMES) | st.text(min_size=1), st.sampled_from(NAMES) | st.text())
def test_any_name_is_one_segment_of_the_path(model: str, version: str) -> None:
    for form in HTTP_FORMS:
        try:
            target = _write(form, NUMBERS, model=model, version=version).target
        except UnicodeEncodeError:
            assert not model.isprintable() or not version.isprintable()  # half of a surrogate pair
            continue
        assert target.isascii()
        assert target.isprintable()
        assert not set(target) & set(" ?#")
        _, _, _, name, *rest = target.split("/")
        if form == "v1" and not version:
            name, _, operation = name.rpartition(":")
            assert operation == "predict"
        elif version:
            keyword, found = rest[:2]
            assert (keyword, unquote(found.removesuffix(":predict"))) == ("versions", version)
        assert unquote(name) == model


def test_name_keeps_what_servers_do_not_decode() -> None:
    for form in ("json", "binary"):
        assert _write(form, NUMBERS, model="a:b+c").target == "/v2/models/a:b+c/infer"
    assert _write("v1", NUMBERS, model="a:b").target == "/v1/models/a:b:predict"
