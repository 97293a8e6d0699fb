"""JSON documents are split alike in C and in Python, and what is split off belongs to them."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.build_info import NATIVE
from gateway.codec import native
from gateway.codec.json.data_extractor import placeholder
from gateway.codec.native import plain

FORMS = [plain, native] if NATIVE else [plain]
in_each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)

MOST = 1000
WORDS = (
    *(
        '"data"',
        '"id"',
        '"x"',
        '"a b"',
        '"é"',
        '"\\n"',
        '"',
        ":",
        ":",
        ",",
        "{",
        "}",
        "[",
        "]",
        "\\",
    ),
    *("1", "-2.5", "[1,2]", "[[1],[2]]", '["a","b"]', '[["]"]]', " ", "\n", "\t", "\0", "\x7f"),
)
PIECES = st.sampled_from(WORDS)
TEXTS = st.one_of(
    st.lists(PIECES, max_size=12),
    # More that are nearly documents.
    st.lists(
        st.sampled_from(['"data":[1,2]', '"data" : ["a"]', '"id": "b"', '"id":""', ",", *WORDS])
    ),
).map(lambda words: "".join(words).encode())


@given(TEXTS, st.sampled_from([0, 20, MOST]))
def test_c_splits_documents_as_python_does(text: bytes, most: int) -> None:
    assert native.split_document(text, most) == plain.split_document(text, most)


def _whole(common: bytes, request_id: str | None, place: int, arrays: list[Any]) -> bytes:
    """Put a split document together."""
    text = b"".join((common[:place], (request_id or "").encode(), common[place:]))
    for number, (array, _) in enumerate(arrays):
        before, found, behind = text.partition(b'"data":' + orjson.dumps(placeholder(number)))
        assert found
        text = before + b'"data":' + array + behind
    return text


DATA = st.recursive(st.lists(st.integers() | st.floats(allow_nan=False)), st.lists, max_leaves=4)
STRINGS = st.recursive(
    st.lists(st.text('a\\"[],', max_size=4), min_size=1),
    lambda each: st.lists(each, min_size=1),
    max_leaves=4,
)


@in_each_form
@given(
    st.lists(DATA | STRINGS, max_size=3),
    st.none() | st.text("ab 7-/~", max_size=8),
    st.sampled_from([(",", ":"), (", ", ": "), (",\n", " :\t")]),
)
def test_document_is_split_from_its_data_and_id(
    form: ModuleType, data: list[list[Any]], request_id: str | None, separators: tuple[str, str]
) -> None:
    fields: dict[str, Any] = {} if request_id is None else {"id": request_id}
    text = json.dumps(
        {**fields, "inputs": [{"data": each} for each in data]}, separators=separators
    )
    common, found_id, place, arrays = form.split_document(text.encode(), MOST)
    assert found_id == request_id
    assert [json.loads(array) for array, _ in arrays] == data
    assert [is_nested for _, is_nested in arrays] == [
        any(isinstance(each, list) for each in array) for array in data
    ]
    filled = _whole(common, found_id, place, arrays)
    assert json.loads(filled) == json.loads(text)
    same = {**fields, **({"id": ""} if fields else {})}
    parsed = {**same, "inputs": [{"data": placeholder(n)} for n in range(len(data))]}
    assert json.loads(common) == parsed


@in_each_form
@pytest.mark.parametrize(
    "text",
    [
        b'{"inputs":[]}',
        b'{"name":"id"}',
        b'{"id":7}',
        '{"id":"\u00e9"}'.encode(),
        b'{"id":"a","x":{"id":"b"}}',
        b'{"id":"a',
    ],
)
def test_other_ids_stay_in_the_text(form: ModuleType, text: bytes) -> None:
    assert form.split_document(text, MOST) == (text, None, 0, [])


@in_each_form
@pytest.mark.parametrize(
    "text",
    [
        b'{"id":"a\\n"}',
        b'{"data":[1,2',
        b'{"data":["a"',
        b'{"data":[{}]}',
        b"[" + b",".join([b'{"data":[1]}'] * 257) + b"]",
        b" " * (MOST + 1),
    ],
    ids=["escape", "no end", "no end of strings", "objects", "too many arrays", "too much left"],
)
def test_unclear_document_is_not_split(form: ModuleType, text: bytes) -> None:
    assert form.split_document(text, MOST) is None


@in_each_form
def test_most_arrays_have_placeholders_of_their_own(form: ModuleType) -> None:
    text = b"[" + b",".join([b'{"data":[1]}'] * 256) + b"]"
    common, _, _, arrays = form.split_document(text, 4096)
    assert json.loads(common) == [{"data": placeholder(number)} for number in range(256)]
    assert arrays == [(b"[1]", False)] * 256


# ---------------------------------------------------------------------------------- predictions

PREDICTIONS = st.lists(
    st.sampled_from(
        (
            *(
                "{",
                '"instances"',
                '"inputs"',
                ":",
                "[",
                "]",
                "}",
                "1",
                ",",
                " ",
                "\n",
                '"',
                "[1,2]",
            ),
            *('{"instances":', '{ "inputs" : ', "[[1],[2]]", "]}", "] } "),
        )
    ),
    max_size=10,
).map(lambda words: "".join(words).encode())


@given(PREDICTIONS)
def test_c_splits_predictions_as_python_does(text: bytes) -> None:
    assert native.split_prediction(text) == plain.split_prediction(text)


@in_each_form
@given(DATA, st.booleans(), st.sampled_from([None, 1]))
def test_prediction_is_split_from_its_array(
    form: ModuleType, data: list[Any], is_rows: bool, indent: int | None
) -> None:
    text = json.dumps({"instances" if is_rows else "inputs": data}, indent=indent).encode()
    found_rows, array, is_nested = form.split_prediction(text)
    assert (found_rows, json.loads(array)) == (is_rows, data)
    assert is_nested == any(isinstance(each, list) for each in data)


@pytest.mark.skipif(not NATIVE, reason="the C module is not compiled")
@pytest.mark.parametrize("arguments", [(), ("", 1), (b"", "x"), (b"", 1, 2)])
def test_c_functions_refuse_other_arguments(arguments: tuple[Any, ...]) -> None:
    for function in (native.split_document, native.split_prediction):
        with pytest.raises(TypeError):
            function(*arguments)
