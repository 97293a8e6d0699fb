"""Tensors that an operator describes, in each form of clients; each error names what is wrong."""

from __future__ import annotations

import base64
import json
import re
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.admin.try_it.requests import FORMS, MAX_DATA, Call, make_request
from gateway.codec.elements.bytes_elements import pack_elements, split_elements
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.datatypes import DATATYPES, Family
from gateway.protocol.messages import InferRequest
from gateway.protocol.tensors import MAX_TENSORS
from gateway.upstream.transport import UpstreamRequest
from tests.admin.try_it.trying import VALUES, call
from tests.codec.reference import DTYPES
from tests.support.grpc.proto_file import message_class

each_datatype = pytest.mark.parametrize("datatype", DATATYPES)


def _tensor(**fields: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "FP32", "shape": [2]} | fields


def _request(inputs: Any, outputs: Any = ()) -> InferRequest:
    """Make a request of a call, which comes as JSON."""
    text = json.dumps({"form": "json", "model": "m", "inputs": inputs, "outputs": [*outputs]})
    call = Call.model_validate_json(text, strict=True)
    return make_request(call.inputs, call.outputs)


def _data(*inputs: object) -> list[bytes]:
    request = _request(inputs)
    return [b"".join(each) for each in request.tensors if not isinstance(each, int)]


def _packed(datatype: str, values: list[Any]) -> bytes:
    if datatype == "BYTES":
        return pack_elements([each.encode() for each in values])
    return np.array(values, DTYPES[datatype]).tobytes()


@each_datatype
def test_values_and_bytes_become_the_same_tensor(datatype: str) -> None:
    values = VALUES[datatype]
    expected = _packed(datatype, values)
    encoded = base64.b64encode(expected).decode()
    sources = (
        {"shape": [2], "values": values},
        {"shape": [1, 2], "values": [values]},
        {"shape": [1, 2], "values": values},
        {"shape": [2], "bytes": encoded},
    )
    for source in sources:
        tensor = _tensor(datatype=datatype, **source)
        request = _request([tensor], ["y"])
        (described,) = request.head.inputs
        assert (described.name, described.datatype.name) == ("x", datatype)
        assert list(described.shape) == source["shape"]
        assert described.binary_size == len(expected)
        assert [each.name for each in request.head.outputs] == ["y"]
        assert _data(tensor) == [expected]


@each_datatype
@pytest.mark.parametrize("shape", [[], [0], [3, 0], [2, 150]], ids=str)
def test_fill_makes_as_many_elements_as_the_shape_has(datatype: str, shape: list[int]) -> None:
    count = int(np.prod(shape))
    kind = DATATYPES[datatype]
    zeros, ones, some = _data(
        *(
            _tensor(name=fill, datatype=datatype, shape=shape, fill=fill)
            for fill in ("zeros", "ones", "random")
        )
    )
    if kind.dtype is None:
        assert split_elements(zeros, 0)[0] == [b"0"] * count
        assert split_elements(ones, 0)[0] == [b"1"] * count
        assert len(split_elements(some, 0)[0]) == count
        return
    dtype = DTYPES[datatype]
    assert (zeros, ones) == (np.zeros(count, dtype).tobytes(), np.ones(count, dtype).tobytes())
    numbers = np.frombuffer(some, dtype)
    assert len(numbers) == count
    assert np.isfinite(numbers.astype(np.float64)).all()
    if count > 1:
        assert len(set(numbers.tolist())) > 1
    if kind.family is Family.INTEGER:
        assert not count or 0 <= int(numbers.min()) <= int(numbers.max()) < 100


def test_sources_can_be_mixed() -> None:
    assert _data(
        _tensor(name="a", values=[1, 2]),
        _tensor(name="b", fill="ones"),
        _tensor(name="c", values=[3, 4]),
        _tensor(name="d", bytes=base64.b64encode(bytes(8)).decode()),
    ) == [_packed("FP32", each) for each in ([1, 2], [1, 1], [3, 4], [0, 0])]


def _nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "^inputs: "),
        ([_tensor(fill="ones")] * (MAX_TENSORS + 1), "^inputs: .* 1024"),
        ([_tensor()], r"^inputs\.0: .*expected one of fill, values, bytes"),
        ([_tensor(fill="ones", values=[])], r"^inputs\.0: .*expected one of"),
        ([_tensor(fill="twos")], r"^inputs\.0\.fill: .*'random', 'zeros' or 'ones'"),
        ([_tensor(fill="ones", shape=[-1])], r"^inputs\.0\.shape\.0"),
        ([_tensor(fill="ones", shape=[True])], r"^inputs\.0\.shape\.0"),
        ([_tensor(fill="ones", datatype="FP8")], r"^inputs\.0\.datatype: .*expected one of BOOL"),
        ([_tensor(bytes=[1])], r"^inputs\.0\.bytes: .*expected base64"),
        ([_tensor(values=_nested(300))], "recursion limit"),
    ],
    ids=range(10),
)
def test_description_that_is_wrong_is_named(inputs: object, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        _request(inputs)
    first = caught.value.errors()[0]
    assert re.search(words, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([_tensor(fill="ones", shape=[1] * 100)], "x.*dimensions"),
        ([_tensor(bytes="AAAA")], "x.*3"),
        ([_tensor(datatype="BYTES", bytes="AwAAAGFi")], "'x': bytes: expected 2 elements"),
        ([_tensor(datatype="BYTES", bytes="/////w==", shape=[1])], "'x': bytes: expected 1 elem"),
        ([_tensor(datatype="BYTES", bytes="AQAAAGE=")], "'x': bytes: expected 2 elements"),
        ([_tensor(values=[1, "a"])], "x"),
        ([_tensor(datatype="INT64", values=[1, 2**70])], "x"),
        ([_tensor(values=_nested(100))], "deep|nest|depth|x"),
        ([_tensor(fill="ones", shape=[2**40, 2**40])], "all tensors together may have 8 MiB"),
        ([_tensor(fill="ones", datatype="BYTES", shape=[200_000])], "all tensors together"),
        (
            [_tensor(name=n, fill="ones", shape=[MAX_DATA // 8 + 1]) for n in "ab"],
            "inputs: all tensors together may have 8 MiB",
        ),
        (
            [_tensor(datatype="FP64", values=[0] * (MAX_DATA // 8 + 1), shape=[MAX_DATA // 8 + 1])],
            "inputs: all tensors together may have 8 MiB",
        ),
    ],
    ids=range(12),
)
def test_error_names_what_is_wrong(inputs: object, words: str) -> None:
    with pytest.raises(GatewayError) as caught:
        _request(inputs)
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    assert re.search(words, str(caught.value)), str(caught.value)
    assert len(str(caught.value)) < 1000


def test_tensors_may_have_all_that_is_allowed() -> None:
    shape = [MAX_DATA // 4]
    assert [len(each) for each in _data(_tensor(fill="ones", shape=shape))] == [MAX_DATA]


def test_request_may_end_with_a_window_of_its_reader() -> None:
    text = json.dumps({"inputs": [_tensor(name="", data=[1, 2])]})
    name = "x" * (128 * 1024 - len(text))
    request = _request([_tensor(name=name, values=[1, 2])])
    assert request.head.inputs[0].name == name


def test_bf16_is_rounded_as_for_clients() -> None:
    (data,) = _data(_tensor(datatype="BF16", values=[0.1, 3.14159]))
    assert data == np.array([0.1, 3.14159], ml_dtypes.bfloat16).tobytes()


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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**64 - 1) | st.text(max_size=5) | st.just(1e300),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
TENSOR = st.fixed_dictionaries(
    {"name": st.just("INPUT0") | JSON, "datatype": st.just("FP32") | JSON},
    optional={
        "shape": st.just([1]) | JSON,
        "values": st.just([1]) | JSON,
        "fill": st.just("ones") | JSON,
        "bytes": st.just("AAAAAA==") | JSON,
    },
)
DOCUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "model": st.just("identity_fp32") | JSON,
        "form": st.sampled_from(list(FORMS)) | JSON,
        "version": JSON,
        "inputs": st.lists(TENSOR, max_size=2) | JSON,
        "outputs": st.just(["OUTPUT0"]) | JSON,
        "headers": st.dictionaries(st.sampled_from(["X-A", "Accept", "é"]), JSON) | JSON,
    },
)


@given(DOCUMENTS | JSON)
def test_any_document_is_a_call_or_an_error_of_the_operator(document: Any) -> None:
    """The handler responds with 400 to both kinds of errors."""
    with suppress(ValidationError, GatewayError):
        wanted = Call.model_validate_json(json.dumps(document), strict=True)
        request = make_request(wanted.inputs, wanted.outputs)
        FORMS[wanted.form](request, wanted.model, wanted.version)
