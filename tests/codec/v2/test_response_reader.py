from __future__ import annotations

import base64
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.json import array_scanner
from gateway.codec.policies import BytesEncoding, JsonPolicies
from gateway.codec.v2.response import ResponseEncoder
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.messages import ALL_BINARY, OutputEncoding
from tests.codec import strategies
from tests.codec.reference import RefusedError, pack_bytes, response_in_binary
from tests.codec.v2.conversions import Converted, Failed, convert_response, normal

NAMES = ("a", "in put", 'q"', "é")
WINDOWS = (24, 64, array_scanner.WINDOW)


def response(*outputs: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"model_name": "m", "outputs": list(outputs), **fields}).encode()


def output(datatype: str, data: list[Any], name: str = "y", **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": [len(data)], "datatype": datatype, **more, "data": data}


def converted(body: bytes, form: OutputEncoding = ALL_BINARY) -> Converted:
    """Return what a response becomes, however it is split."""
    found = convert_response([body], form)
    assert convert_response(strategies.bytewise(body), form) == found
    assert convert_response(strategies.cut(body, 1), form, work=False) == found
    assert isinstance(found, Converted), found
    return found


def error_message(body: bytes, form: OutputEncoding = ALL_BINARY) -> str:
    found = convert_response([body], form)
    assert convert_response(strategies.bytewise(body), form) == found
    assert isinstance(found, Failed), found
    assert found.kind is ErrorKind.BAD_RESPONSE
    return found.message


# ----------------------------------------------------------------------- independence of splits


@st.composite
def responses(draw: st.DrawFn, faulty: bool = False) -> bytes:
    """Generate a JSON response; a faulty one may contain invalid elements."""
    rng = random.Random(draw(strategies.SEEDS))
    fields: dict[str, Any] = {"model_name": "m", "id": None}
    fields["outputs"] = draw(st.lists(strategies.inputs(faulty), max_size=3))
    for entry in fields["outputs"]:
        if not entry.get("parameters") and rng.random() < 0.3:
            entry["parameters"] = None
        floats = entry["datatype"].startswith(("FP", "BF"))
        if floats and entry.get("data") and rng.random() < 0.3:
            entry["data"][rng.randrange(len(entry["data"]))] = None
    return strategies.Writer(rng, rng.choice(["compact", "spaces", "wild"])).write(fields).encode()


def check_splits(body: bytes, form: OutputEncoding, seed: int, window: int) -> Converted | Failed:
    with strategies.windows_of(window):
        found = convert_response([body], form)
        assert convert_response([body], form, work=False) == found
        assert convert_response(strategies.cut(body, seed), form) == found
        assert convert_response(strategies.cut(body, seed + 1), form, work=False) == found
        assert convert_response(strategies.bytewise(body), form) == found
    assert isinstance(found, Converted) or found.kind is ErrorKind.BAD_RESPONSE
    return found


@strategies.LAW
@given(responses(), st.sets(st.sampled_from(NAMES)), strategies.SEEDS)
def test_response_is_the_same_however_split(body: bytes, binary: set[str], seed: int) -> None:
    for window in WINDOWS:
        check_response(body, binary, seed, window)


def check_response(body: bytes, binary: set[str], seed: int, window: int) -> None:
    form = OutputEncoding(False, dict.fromkeys(binary, True))
    found = check_splits(body, form, seed, window)
    try:
        fields, tail = response_in_binary(body, frozenset(binary))
    except RefusedError:
        assert isinstance(found, Failed)
        return
    if isinstance(found, Failed):
        assert "without a comma" in found.message
        assert window < array_scanner.WINDOW
        return
    shown, expected = normal(found.header), normal(json.dumps(fields))
    assert shown == expected
    assert found.tensors == tail


@strategies.LAW
@given(responses(), st.sets(st.sampled_from(NAMES)), strategies.SEEDS)
def test_broken_text_is_refused_however_split(body: bytes, binary: set[str], seed: int) -> None:
    body = strategies.mutated(body, seed)
    form = OutputEncoding(False, dict.fromkeys(binary, True))
    for window in WINDOWS:
        check_splits(body, form, seed, window)


# ---------------------------------------------------------------------------------- binary


# ---------------------------------------------------------------------------------- per output


def test_outputs_requested_as_json_keep_their_text() -> None:
    data = b"[ [1.50,1e2], [null , NaN] ]"
    body = (
        b'{"outputs":[{"name":"z","shape":[1],"datatype":"INT8","data":[7]},'
        b'{"name":"y","shape":[9],"datatype":"FP32","data":' + data + b',"more":{"a":1}},'
        b'{"name":"x","shape":[1],"datatype":"INT8","data":[8]}]}'
    )
    found = converted(body, OutputEncoding(True, {"y": False, "z": True, "x": True}))
    assert found.tensors == b"\7\x08"
    assert b'"more":{"a":1},"data":' + data + b"}" in found.header


@pytest.mark.parametrize("behind", [[], ["b"], ["", "c" * 70_000, ""]])
@pytest.mark.parametrize("before", [[], ["b"], ["b" * 40, ""]])
def test_long_strings_keep_their_text(before: list[str], behind: list[str]) -> None:
    text = [*before, 'é"\\\U0001f600\n' * 9_000, *behind]
    body = response(output("BYTES", text), output("INT8", [1], "z"))
    found = convert_response(strategies.cut(body, 3), OutputEncoding(False, {"z": True}))
    assert isinstance(found, Converted)
    assert found.outputs[0]["data"] == text
    assert found.tensors == b"\1"


# ---------------------------------------------------------------------------------- base64

IN_BASE64 = {"content_type": "base64", "a": 1}


def test_base64_is_decoded() -> None:
    elements = [b"", b"\xff", b"ab", bytes(range(256)) * 300, b"abc"]
    data = [base64.b64encode(each).decode() for each in elements]
    told = output("BYTES", ["YQ=="], "z", parameters={"content_type": "np"})
    found = converted(response(output("BYTES", data, parameters=IN_BASE64), told))
    assert found.tensors == pack_bytes([*elements, b"YQ=="])
    size = len(found.tensors) - 8
    assert found.outputs[0]["parameters"] == {"a": 1, "binary_data_size": size}
    assert found.outputs[1]["parameters"] == {"content_type": "np", "binary_data_size": 8}


def as_json_in_base64(body: bytes, policies: JsonPolicies) -> Any:
    """Return the outputs of a response requested as JSON, however it is split."""
    found = []
    for pieces in ([body], strategies.bytewise(body), strategies.cut(body, 1)):
        codec = ResponseEncoder(None, OutputEncoding(False, {}), policies, 1 << 20, 1 << 24)
        with strategies.windows_of(64):  # to have long strings
            for piece in pieces:
                codec.feed(piece)
                assert codec.buffered_bytes <= 2 * len(body) + 16_000
            codec.feed(b"", last=True)
            header, tensors = codec.finish()
        assert tensors == []
        found.append(json.loads(header)["outputs"])
    assert found == [found[0]] * 3
    return found[0]


@pytest.mark.parametrize("parameters", [None, {"content_type": "str", "a": 1}])
@pytest.mark.parametrize("behind", [False, True], ids=["before the data", "behind the data"])
@pytest.mark.parametrize("texts", [[], ["abcd"], ["", 'é"', "x" * 301, "", "abc"]])
def test_strings_requested_as_base64_are_encoded(
    texts: list[str], behind: bool, parameters: dict[str, Any] | None
) -> None:
    more: dict[str, Any] = {"parameters": parameters}
    entry = output("BYTES", texts) | more if behind else output("BYTES", texts, **more)
    body = response(entry, output("BYTES", texts, "z"), output("INT8", [1], "n"))
    y, z, n = as_json_in_base64(body, JsonPolicies(as_base64=frozenset("yn")))
    assert list(map(base64.b64decode, y["data"])) == [text.encode() for text in texts]
    assert y["parameters"] == {**(parameters or {}), "content_type": "base64"}
    assert (z, n) == (output("BYTES", texts, "z"), output("INT8", [1], "n"))
    _, z, _ = as_json_in_base64(body, JsonPolicies(bytes_encoding=BytesEncoding.BASE64))
    assert list(map(base64.b64decode, z["data"])) == [text.encode() for text in texts]


@pytest.mark.parametrize("behind", [False, True], ids=["before the data", "behind the data"])
def test_output_that_is_base64_already_is_not_encoded_again(behind: bool) -> None:
    more: dict[str, Any] = {"parameters": IN_BASE64}
    entry = output("BYTES", ["YQ=="]) | more if behind else output("BYTES", ["YQ=="], **more)
    assert as_json_in_base64(response(entry), JsonPolicies(as_base64=frozenset("y"))) == [entry]


def test_base64_beyond_the_spool_cap_is_refused() -> None:
    policies = JsonPolicies(as_base64=frozenset("y"))
    codec = ResponseEncoder(None, OutputEncoding(False, {}), policies, 1000, 999)
    with pytest.raises(
        GatewayError, match=r"becomes base64 .* \(limits.max_buffered_body_bytes\); ask for all"
    ):
        codec.feed(response(output("BYTES", ["abcd"] * 999)), last=True)


# ---------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (response(output("INT8", [1, None])), "element 1 (null) is not an integer, as INT8 needs"),
        (b"", "the server's response is not valid JSON"),
        (b"{}", "the server's response has no outputs"),
        (
            response({**output("FP32", []), "data": "x"}),
            "output 'y': data must be an array, got a string",
        ),
        (response(output("FP32", [1]))[:-5], "the server's response ends at byte"),
        (
            b'{"a":{"data":[1]}}',
            'there is an array "data" outside the tensors of outputs, at byte 6, near: ',
        ),
        (
            b'{"outputs":[{"name":"y","shape":[1],"datatype":"INT8","data":[1]}],"outputs":[]}',
            "the server's response has the key outputs more than once",
        ),
        (
            b'{"outputs":[{"name":"y","shape":[1],"datatype":"INT8","data":[1],"datatype":"BOOL"}]}',
            "output 'y' has more than one datatype",
        ),
        (response(output("BYTES", []), x=[[]]).replace(b"[[]]", b"[" * 201 + b"]" * 201), "deeper"),
        (response(output("FP32", [None, "x"])), 'element 1 ("x") is not a number, as FP32 needs'),
    ],
)
def test_invalid_responses_are_refused(body: bytes, message: str) -> None:
    assert message in error_message(body)


def test_response_beyond_the_spool_cap_is_refused() -> None:
    body = response(output("INT8", [1] * 1000))
    found = convert_response(strategies.cut(body, 1), body_cap=999)
    assert found == Failed(
        ErrorKind.BAD_RESPONSE,
        "a response that becomes binary must be buffered, and exceeds 999 bytes "
        "(limits.max_buffered_body_bytes); ask for all outputs as JSON",
    )
    assert isinstance(convert_response([body], body_cap=3000), Converted)


def test_header_beyond_the_cap_is_refused() -> None:
    found = convert_response([response(output("INT8", [1]), more="x" * 200)], header_cap=200)
    assert found == Failed(
        ErrorKind.BAD_RESPONSE,
        "the JSON around the data is larger than 200 bytes (limits.max_inference_header_bytes)",
    )
