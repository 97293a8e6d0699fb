from __future__ import annotations

import base64
import json
import math
from typing import Any

import numpy as np
import pytest

from gateway.codec.elements.encode import make_tensor_encoder
from gateway.codec.policies import BytesEncoding, JsonPolicies, Nonfinite
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.datatypes import DATATYPES
from tests.codec import reference, strategies
from tests.codec.reference import DTYPES, FLOATS


def convert(
    datatype: str,
    pieces: list[bytes],
    nonfinite: Nonfinite = Nonfinite.LITERAL,
    bytes_encoding: BytesEncoding = BytesEncoding.UTF8,
) -> str:
    converter = make_tensor_encoder(
        "output 'y'", DATATYPES[datatype], JsonPolicies(nonfinite, bytes_encoding)
    )
    text = b"".join(converter.feed(piece) for piece in pieces)
    converter.finish()
    assert converter.count == len(json.loads(b"[" + text + b"]"))
    return text.decode()


def refusal(
    datatype: str,
    pieces: list[bytes],
    nonfinite: Nonfinite = Nonfinite.LITERAL,
    bytes_encoding: BytesEncoding = BytesEncoding.UTF8,
) -> tuple[ErrorKind, str]:
    with pytest.raises(GatewayError) as caught:
        convert(datatype, pieces, nonfinite, bytes_encoding)
    return caught.value.kind, caught.value.message


ENDS_INSIDE = (ErrorKind.BAD_RESPONSE, "output 'y' ends inside an element")


def packed(datatype: str, values: Any) -> bytes:
    return np.array(values, DTYPES[datatype]).tobytes()


# ---------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("data", [b"\2", b"\0\1\xff"])
def test_bytes_other_than_0_and_1_are_refused_as_booleans(data: bytes) -> None:
    kind, message = refusal("BOOL", [data])
    assert kind is ErrorKind.BAD_RESPONSE
    assert message == "output 'y' is BOOL, but holds bytes other than 0 and 1"


@pytest.mark.parametrize(
    ("nonfinite", "text"),
    [
        (Nonfinite.LITERAL, "1.0,NaN,Infinity,-Infinity,NaN,2.0"),
        (Nonfinite.NULL, "1.0,null,null,null,null,2.0"),
        (Nonfinite.STRING, '1.0,"NaN","Infinity","-Infinity","NaN",2.0'),
    ],
)
@pytest.mark.parametrize("datatype", FLOATS)
def test_nonfinite_policies_decide_how_nan_and_infinities_are_written(
    datatype: str, nonfinite: Nonfinite, text: str
) -> None:
    data = packed(datatype, [1, math.nan, math.inf, -math.inf, -math.nan, 2])
    assert convert(datatype, [data], nonfinite) == text
    assert convert(datatype, strategies.bytewise(data), nonfinite) == text


@pytest.mark.parametrize(
    ("datatype", "value", "shown"),
    [
        ("FP16", math.nan, "nan"),
        ("FP32", math.nan, "nan"),
        ("FP64", math.inf, "inf"),
        ("BF16", -math.inf, "-inf"),
    ],
)
def test_error_policy_names_the_nonfinite_element(datatype: str, value: float, shown: str) -> None:
    data = packed(datatype, [1, 2, 3, value, math.nan])
    for pieces in ([data], strategies.bytewise(data), strategies.cut(data, 3)):
        kind, message = refusal(datatype, pieces, Nonfinite.ERROR)
        assert kind is ErrorKind.NOT_ACCEPTABLE
        assert message == (
            f"output 'y': element 3 is {shown}, which JSON does not have (policy nonfinite: error);"
            " ask for this output in binary form, or set another policy"
        )


def test_truncated_number_is_a_bad_response() -> None:
    for datatype in (name for name, each in DATATYPES.items() if (each.size or 0) > 1):
        data = packed(datatype, [1, 1])[:-1]
        for pieces in ([data], strategies.bytewise(data)):
            assert refusal(datatype, pieces) == ENDS_INSIDE


# ---------------------------------------------------------------------------------- BYTES


@pytest.mark.parametrize(
    "element",
    [b"\xff", b"\xc3", b"\xe2\x82", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"a\x80"],
)
def test_element_that_is_not_utf8_is_named(element: bytes) -> None:
    data = reference.pack_bytes([b"a", "é".encode(), b"x" * 9 + element, b"b", element])
    for pieces in ([data], strategies.bytewise(data), strategies.cut(data, 3)):
        assert refusal("BYTES", pieces) == (
            ErrorKind.NOT_ACCEPTABLE,
            "output 'y': element 2 is not UTF-8 text, which JSON needs; ask for this output in "
            "binary form or with content_type base64, or set the policy bytes: base64",
        )
        decoded = json.loads(f"[{convert('BYTES', pieces, bytes_encoding=BytesEncoding.BASE64)}]")
        assert base64.b64decode(decoded[2]) == b"x" * 9 + element


@pytest.mark.parametrize("bytes_encoding", BytesEncoding)
@pytest.mark.parametrize(
    "data", [b"\1", b"\1\0\0", b"\1\0\0\0", b"\3\0\0\0ab", b"\0\0\0\0\1\0\0\0"]
)
def test_truncated_bytes_element_is_a_bad_response(
    data: bytes, bytes_encoding: BytesEncoding
) -> None:
    for pieces in ([data], strategies.bytewise(data)):
        assert refusal("BYTES", pieces, bytes_encoding=bytes_encoding) == ENDS_INSIDE


def test_large_element_is_not_buffered() -> None:
    converter = make_tensor_encoder("output 'y'", DATATYPES["BYTES"], JsonPolicies())
    text = bytes(converter.feed((3_000_000).to_bytes(4, "little")))
    for _ in range(300):
        piece = converter.feed(b"x" * 10_000)
        assert len(piece) >= 10_000
        text += piece
    converter.finish()
    assert text == b'"' + b"x" * 3_000_000 + b'"'
