from __future__ import annotations

import json
import math
import sys
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.elements import diagnose
from gateway.codec.elements.decode import TensorDecoder
from gateway.codec.elements.diagnose import diagnose_run
from gateway.codec.json.array_scanner import ElementRun, StringPart
from gateway.errors import ErrorKind, GatewayError, ModelMismatchError, shorten
from gateway.protocol.datatypes import DATATYPES
from gateway.sizes import QUOTED_NAME
from tests.codec import reference, strategies
from tests.codec.reference import DTYPES, FLOATS, INTEGERS


def convert(datatype: str, text: str | bytes) -> bytes:
    tensor = TensorDecoder("input 'x'", DATATYPES[datatype])
    data = text.encode() if isinstance(text, str) else text
    tensor.feed(ElementRun(data, 0, 0, first=True))
    result = b"".join(tensor.chunks)
    assert tensor.size == len(result)
    return result


def values(datatype: str, text: str) -> list[Any]:
    data = np.frombuffer(convert(datatype, text), DTYPES[datatype])
    return list(data.astype(np.float64) if datatype in FLOATS else data)


def refusal(datatype: str, text: str) -> str:
    with pytest.raises(GatewayError) as caught:
        convert(datatype, text)
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    return caught.value.message


# ---------------------------------------------------------------------------------- integers


@pytest.mark.parametrize("datatype", INTEGERS)
def test_integers_up_to_their_limits_are_decoded(datatype: str) -> None:
    limits = np.iinfo(DTYPES[datatype])
    least, most = int(limits.min), int(limits.max)
    assert values(datatype, f"[{least},0,-0,1,{most}]") == [least, 0, 0, 1, most]
    for beyond in (least - 1, most + 1, 10**30, -(10**30)):
        message = refusal(datatype, f"[7,{beyond}]")
        assert message == f"input 'x': element 1 ({beyond}) does not fit {datatype}"


# ---------------------------------------------------------------------------------- floats


@pytest.mark.parametrize(
    "text", ["1e99999", "-1e400", "1" + "0" * 399, "7" * 400, "7" * 5000, "1e" + "9" * 5000]
)
def test_numbers_beyond_the_float_range_are_refused(text: str) -> None:
    shown = shorten(text, QUOTED_NAME)
    for datatype in FLOATS:
        for beside in ("1", "Infinity"):
            message = refusal(datatype, f"[{beside},{text}]")
            assert message == f"input 'x': element 1 ({shown}) does not fit {datatype}"


@pytest.mark.parametrize("datatype", FLOATS)
def test_minus_zero_keeps_its_sign_only_as_a_float(datatype: str) -> None:
    for beside in ("1", "NaN", "1e3,[],NaN", "[]"):
        integer, real, *_ = values(datatype, f"[-0,-0.0,{beside}]")
        assert (math.copysign(1, integer), math.copysign(1, real)) == (1, -1)


# ---------------------------------------------------------------------------------- booleans, text


@strategies.LAW
@given(st.lists(st.text() | st.just("a\0b")), st.booleans())
def test_strings_become_length_prefixed_utf8(texts: list[str], ascii_only: bool) -> None:
    text = json.dumps(texts, ensure_ascii=ascii_only)
    assert convert("BYTES", text) == reference.pack_bytes([t.encode() for t in texts])


# ---------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("datatype", ["INT8", "FP32", "BYTES", "BOOL"])
def test_run_without_an_element_beside_a_comma_is_refused(datatype: str) -> None:
    for text in (b"]", b" ]", b"", b"  "):
        tensor = TensorDecoder("input 'x'", DATATYPES[datatype])
        with pytest.raises(GatewayError, match="data is not a valid JSON array, near element 0"):
            tensor.feed(ElementRun(text, 1, 0 if b"]" in text else 1, first=False))


def test_error_index_counts_earlier_runs() -> None:
    tensor = TensorDecoder("input 'x'", DATATYPES["UINT8"])
    tensor.feed(ElementRun(b"[1,2", 0, 1, first=True))
    with pytest.raises(GatewayError, match=r"^input 'x': element 3 \(256\) does not fit UINT8$"):
        tensor.feed(ElementRun(b"3,256]", 1, 0, first=False))


# ---------------------------------------------------------------------------------- long strings


def test_string_in_parts_becomes_one_element() -> None:
    tensor = TensorDecoder("input 'x'", DATATYPES["BYTES"])
    tensor.feed(ElementRun(b'["a"', 0, 1, first=True))
    tensor.feed(StringPart(b"one, "))
    tensor.feed(StringPart("zw\\u00f6lf, 😀".encode()))
    tensor.feed(ElementRun(b'"","b"', 1, 1, first=False))
    tensor.feed(StringPart(b""))
    tensor.feed(ElementRun(b'""]', 1, 0, first=False))
    assert tensor.count == 4
    assert b"".join(tensor.chunks) == reference.pack_bytes(
        [b"a", "one, zwölf, 😀".encode(), b"b", b""]
    )
    assert tensor.size == sum(map(len, tensor.chunks))


@pytest.mark.parametrize("datatype", reference.DTYPES)
def test_long_string_is_refused_for_numbers(datatype: str) -> None:
    tensor = TensorDecoder("input 'x'", DATATYPES[datatype])
    with pytest.raises(GatewayError) as caught:
        tensor.feed(StringPart(b"a" * 500))
    shown = '"' + "a" * (QUOTED_NAME - 1) + "..."
    wanted = DATATYPES[datatype].family.value
    assert caught.value.message == (
        f"input 'x': element 0 ({shown}) is not {wanted}, as {datatype} needs"
    )


# ---------------------------------------------------------------------------- cost

MANY = 2000


def calls(datatype: str, text: str) -> int:
    """Count the calls of a conversion, those of C functions and generators included."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    data = text.encode()
    convert(datatype, data)  # imports what it needs
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        convert(datatype, data)
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize(
    ("datatype", "text"),
    [
        ("FP32", f"[{'1,' * MANY}{10**30}]"),
        ("FP32", f"[{'1,' * MANY}{10**30},NaN]"),
        ("BOOL", f"[{'true,' * MANY}false]"),
        ("BOOL", f"[{'[true],' * MANY}[false]]"),
    ],
)
def test_decoding_makes_no_python_call_per_number(datatype: str, text: str) -> None:
    assert calls(datatype, text) < MANY / 2


def test_arrays_of_different_depth_are_flattened_in_one_pass() -> None:
    deepest = "[" * 60 + '"a"' + "]" * 60
    assert calls("BYTES", "[" + '"a",' * MANY + deepest + "]") < 3.5 * MANY


@pytest.mark.parametrize(
    ("datatype", "good", "bad", "error"),
    [
        ("INT8", "1", "300", "element 20000 (300) "),
        ("FP32", "1", "true", "element 20000 (true) "),
        ("FP32", "[1]", "1e99", "element 20000 (1e99) "),
        ("FP32", "NaN", "null", "element 20000 (null) "),
        ("BOOL", "true", "1", "element 20000 (1) "),
        ("BYTES", '","', "1", "element 20000 (1) "),
        ("BYTES", r'"\\\""', r'"\x"', r'element 20000 ("\x") '),
        ("FP32", "1", "", "data is not a valid JSON array, near element "),
        ("FP32", "[1]", "1]", "data is not a valid JSON array, near element "),
    ],
)
def test_fault_is_searched_in_a_small_part_of_the_run(
    datatype: str, good: str, bad: str, error: str
) -> None:
    text = "[" + f"{good}," * 20_000 + f"{bad}," + f"{good}," * 100 + good + "]"
    with mock.patch.object(diagnose, "ElementRun", wraps=ElementRun) as looked_at:
        message = refusal(datatype, text)
    assert message.startswith(f"input 'x': {error}")
    if error.endswith("near element "):
        assert abs(int(message.rpartition(" ")[2]) - 20_000) < 1000
    assert looked_at.call_count < 2000


def test_fault_is_not_searched_behind_the_end_of_the_array() -> None:
    message = refusal("FP32", "[1]" + ",[1]" * 20_000)
    words, _, element = message.rpartition(" ")
    assert words == "input 'x': data is not a valid JSON array, near element"
    assert int(element) < 1000


LONG = "7" * 60_000


def error_message(datatype: str, text: str | bytes, first_index: int = 0) -> str:
    data = text.encode() if isinstance(text, str) else text
    run = ElementRun(data, 0, 0, first=True)
    decode = TensorDecoder("input 'x'", DATATYPES[datatype]).try_decode
    error = diagnose_run("input 'x'", DATATYPES[datatype], run, first_index, decode)
    assert error.kind is ErrorKind.BAD_REQUEST
    is_of_model = "does not fit" in error.message or "needs" in error.message
    assert isinstance(error, ModelMismatchError) is is_of_model  # the model may have changed
    return error.message


@pytest.mark.parametrize(
    ("datatype", "text", "message"),
    [
        ("UINT8", "[0,300]", "element 1 (300) does not fit UINT8"),
        ("INT32", "[1,[2,[1.0]]]", "element 2 (1.0) is not an integer, as INT32 needs"),
        ("INT8", "[NaN]", "element 0 (NaN) is not an integer, as INT8 needs"),
        ("INT8", "[true]", "element 0 (true) is not an integer, as INT8 needs"),
        ("BOOL", "[true, 1]", "element 1 (1) is not true or false, as BOOL needs"),
        ("FP32", "[1,null]", "element 1 (null) is not a number, as FP32 needs"),
        ("FP32", "[{}]", "element 0 is an object, FP32 needs a number"),
        ("FP32", "[1e40]", "element 0 (1e40) does not fit FP32"),
        # The middle of the largest float and infinity: only the digits tell.
        ("FP32", f"[{2**128 - 2**103}]", f"element 0 ({2**128 - 2**103}) does not fit FP32"),
        ("INT8", f"[1,{LONG}]", f"element 1 ({LONG[:QUOTED_NAME]}...) does not fit INT8"),
        ("BYTES", '["a",5]', "element 1 (5) is not a string, as BYTES needs"),
        ("BYTES", r'["\ud83d"]', r'element 0 ("\ud83d") holds half of a surrogate pair'),
        ("BYTES", r'["a","\x"]', r'element 1 ("\x") is not a JSON value'),
        ("BYTES", '["a","b', 'element 1 ("b) is not a JSON value'),
        ("FP32", "[1,nan]", "element 1 (nan) is not a JSON value"),
        ("FP32", b"[1,\xff]", "element 1 (\\xff) is not a JSON value"),
        ("BYTES", b'["a","\xc3\xff"]', 'element 1 ("\\xc3\\xff") is not UTF-8'),
        ("FP32", "[[1],[2}", "data lacks a closing bracket, behind element 1"),
        ("FP32", "[1,2]]}", "data has a closing bracket too many, behind element 1"),
        ("FP32", "[1,2] x}", "data ends and is followed by x}, behind element 1"),
        ("FP32", "[]5", "data ends and is followed by 5, behind element 0"),
    ],
)
def test_first_invalid_element_is_named(datatype: str, text: str | bytes, message: str) -> None:
    assert error_message(datatype, text) == f"input 'x': {message}"


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("[1,]", 0),
        ("[1,,2]", 1),
        ("[1,2][3]", 2),
        ("[1,[2] 3]", 1),
        ("", 0),
        (" " * 100_000 + ",", 0),
    ],
)
def test_invalid_structure_is_located_by_element(text: str, near: int) -> None:
    message = f"input 'x': data is not a valid JSON array, near element {near}"
    assert error_message("INT32", text) == message
    assert error_message("INT32", text, 1000).endswith(f"near element {1000 + near}")
