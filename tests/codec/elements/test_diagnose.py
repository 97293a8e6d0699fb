from __future__ import annotations

import pytest

from gateway.codec.elements.diagnose import diagnose_run
from gateway.codec.json.array_scanner import ElementRun
from gateway.errors import ErrorKind
from gateway.protocol.datatypes import DATATYPES
from gateway.sizes import QUOTED_NAME

LONG = "7" * 60_000


def error_message(datatype: str, text: str | bytes, first_index: int = 0, depth: int = 0) -> str:
    data = text.encode() if isinstance(text, str) else text
    run = ElementRun(data, depth, 0, first=True)
    error = diagnose_run("input 'x'", DATATYPES[datatype], run, first_index)
    assert error.kind is ErrorKind.BAD_REQUEST
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
    assert (
        error_message("INT32", text)
        == f"input 'x': data is not a valid JSON array, near element {near}"
    )
    assert error_message("INT32", text, 1000).endswith(f"near element {1000 + near}")


def test_index_counts_elements_of_earlier_runs() -> None:
    assert (
        error_message("INT8", "1,[2,x]", 500, 1) == "input 'x': element 502 (x) is not a JSON value"
    )
