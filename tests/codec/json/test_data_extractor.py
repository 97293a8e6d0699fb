from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.codec.json.array_scanner import WINDOW, ElementRun
from gateway.codec.json.data_extractor import ArrayStart, DataExtractor, Event
from gateway.errors import ErrorKind, GatewayError
from tests.codec import strategies


def cut_out(
    pieces: Sequence[bytes | memoryview], header_cap: int = 10_000
) -> tuple[list[Event], bytes]:
    cutter = DataExtractor(header_cap, 64)
    events: list[Event] = []
    for piece in pieces:
        events += cutter.feed(piece)
    events += cutter.feed(b"", last=True)
    return events, cutter.finish()


def refusal(body: bytes, header_cap: int = 10_000) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        cut_out([body], header_cap)
    for pieces in (strategies.bytewise(body), strategies.cut(body, 1)):
        with pytest.raises(GatewayError, match=f"^{_quoted(str(caught.value))}$"):
            cut_out(pieces, header_cap)
    return caught.value


def _quoted(text: str) -> str:
    return "".join("\\" + c if c.isascii() and not c.isalnum() else c for c in text)


def body(*inputs: str) -> bytes:
    return ('{"inputs":[' + ",".join(inputs) + "]}").encode()


def test_arrays_are_replaced_by_placeholders() -> None:
    text = body('{"name":"a","data":[1,2],"shape":[2]}', '{"data" : [["x"]] }')
    events, header = cut_out([text])
    assert header == b'{"inputs":[{"name":"a","data":[0],"shape":[2]},{"data" : [1] }]}'
    starts = [event for event in events if isinstance(event, ArrayStart)]
    assert [event.index for event in starts] == [0, 1]
    runs = [event.text for event in events if not isinstance(event, ArrayStart)]
    assert runs == [b"[1,2]", b'[["x"]]']


def _runs(events: list[Event]) -> list[bytes]:
    return [event.text for event in events if isinstance(event, ElementRun)]


@given(st.data())
def test_large_numbers_have_the_same_runs_however_they_arrive(data: st.DataObject) -> None:
    rows = data.draw(st.sampled_from(["-1.25e3, ", "7,", "[1,2],[3],"]))
    numbers = rows * (data.draw(st.integers(1, 3 * WINDOW + 100)) // len(rows)) + "[]"
    fault = data.draw(st.sampled_from(["", "", "x", '"', "{", "]"]))
    at = data.draw(st.integers(0, len(numbers)))
    first = '{"data":[%s],"name":"a"}' % (numbers[:at] + fault + numbers[at:])
    text = body(first, f'{{"data":[{numbers}]}}')
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    try:
        whole: object = cut_out([text])
    except GatewayError as error:
        with pytest.raises(GatewayError, match=f"^{_quoted(str(error))}$"):
            cut_out([memoryview(piece) for piece in pieces])
        return
    events, header = cut_out([memoryview(piece) for piece in pieces])
    assert isinstance(whole, tuple)
    assert (_runs(events), header) == (_runs(whole[0]), whole[1])


def test_whole_windows_of_numbers_are_not_copied() -> None:
    text = memoryview(body('{"data":[' + "1," * 2 * WINDOW + "1]}"))
    cutter = DataExtractor(10_000, 64)
    received = text[20 + WINDOW // 2 :]
    events = [*cutter.feed(text[: 20 + WINDOW // 2]), *cutter.feed(received)]
    runs = [event for event in events if isinstance(event, ElementRun)]
    in_place = [isinstance(run.buffer, memoryview) and run.buffer.obj is text.obj for run in runs]
    assert in_place == [False, True, True, True, True]  # the first one spans two reads


# Text that looks like the data of an input, but is not: it stays in the header.
LOOKALIKES = [
    {"note": '"data":[1,2]'},
    {"note": "data"},
    {"note": ["data", "data"]},
    {'"data"': [1, 2]},
    {'my"data': [1, 2]},
    {'\\"data': [1, 2]},
    {"data": "text"},
    {"data": {"data": 5}},
    {"data": None},
    {"datas": [1], "dat": [2]},
    {"x": [{"data": 1}, {"data": None}]},
    {"C:\\": '\\\\"', '\\\\"': "\\"},
]


@pytest.mark.parametrize("lookalike", LOOKALIKES)
def test_text_that_only_looks_like_data_stays_in_the_header(lookalike: Any) -> None:
    for place in ("before", "after", "in parameters", "only"):
        for spaces in (None, 1):
            check_lookalike(lookalike, spaces, place)


def check_lookalike(lookalike: Any, spaces: int | None, place: str) -> None:
    entry: dict[str, Any] = {"name": "a", "data": [7]}
    fields: dict[str, Any] = {"inputs": [entry]}
    if place == "before":
        fields = {"x": lookalike} | fields
    elif place == "after":
        fields = fields | {"x": lookalike}
    elif place == "in parameters":
        fields["inputs"] = [{"parameters": lookalike} | entry, {"parameters": lookalike}]
    else:
        fields = {"inputs": [{"parameters": lookalike}]}
    text = json.dumps(fields, indent=spaces).encode()
    if place != "only":
        entry["data"] = [0]
        if place == "in parameters":
            fields["inputs"][0]["data"] = [0]
    for pieces in ([text], strategies.bytewise(text), strategies.cut(text, 5)):
        events, header = cut_out(pieces)
        assert json.loads(header) == fields
        assert len(events) == (0 if place == "only" else 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (body('{"data":5}'), "inputs[0]: data must be an array, got a number"),
        (body('{"name":"x","data":{}}'), "input 'x': data must be an array, got an object"),
        (body('{"data":[1]}', "{}", '{"data":null}'), "inputs[2]: data must be an array, got null"),
        (body('{"data":[1],"data":[2]}'), "inputs[0] has more than one data"),
    ],
)
def test_second_data_of_an_input_is_refused(text: bytes, message: str) -> None:
    error = refusal(text)
    assert error.kind is ErrorKind.BAD_REQUEST
    assert error.message == message


MISPLACED = 'there is an array "data" outside the tensors of inputs, at byte '
INVALID = "the request is not valid JSON ("


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"data":[1]}', MISPLACED + '1, near: {"data":'),
        (b'[{"data":[1]}]', "the request must be a JSON object with inputs, got an array"),
        (b'{"inputs":[{"name":"a"}],"x":[{"data":[1]}]}', MISPLACED + "31, near: "),
        (
            b'{"inputs":[{"data":[55]}],"outputs":[{"data":[1]}]}',
            MISPLACED + '38, near: ":[…]}],"outputs":[{"data":',
        ),
        (b'{"inputs":{"data":[1]}}', "inputs must be an array of tensors, got an object"),
        (b'{"inputs":["a",{"data":[1]}]}', 'inputs[0] must be an object, got "a"'),
        (
            b'{"inputs":[{"a":1 "data":[1]}]}',
            INVALID + "unexpected character, expected ',' or '}' at byte 18), near: ",
        ),
        (b'nonsense "data" : [1]', INVALID + "invalid literal, expected 'null' at byte 0), near: "),
        (b'\xef\xbb\xbf{"inputs":[{"data":[1]}]}', INVALID + "UTF-8 byte order mark (BOM) is "),
        (b'{"inputs":[{"name":"\xff","data":[1]}]}', INVALID + "not UTF-8 at byte 20), near: "),
    ],
)
def test_data_array_outside_of_inputs_is_refused(text: bytes, message: str) -> None:
    error = refusal(text)
    assert error.kind is ErrorKind.BAD_REQUEST
    assert error.message.startswith(message)


@pytest.mark.parametrize("text", [b"", b"{", b'{"x":"data"', b'{"inputs":[{"data"', b'{"data" : '])
def test_truncated_header_is_left_to_the_json_library(text: bytes) -> None:
    for pieces in ([text], strategies.bytewise(text)):
        events, header = cut_out(pieces)
        assert events == []
        assert header.replace(b" ", b"") == text.replace(b" ", b"")


def test_header_cap_does_not_count_arrays() -> None:
    text = body('{"name":"a","data":[' + "1," * 5000 + "1]}", '{"data":[2]}')
    header = cut_out([text])[1]
    assert cut_out([text], len(header))[1] == header
    error = refusal(text, len(header) - 1)
    assert error.kind is ErrorKind.TOO_LARGE
    assert error.message == (
        f"the JSON around the data is larger than {len(header) - 1} bytes "
        "(limits.max_inference_header_bytes)"
    )


def test_large_string_as_data_is_refused_for_its_type() -> None:
    error = refusal(body('{"name":"a","data":"' + "QUJD" * 5000 + '"}'))
    assert error.message == "input 'a': data must be an array, got a string"


def test_many_data_keys_do_not_cost_a_parse_each() -> None:
    # With a parse for each key, this would take minutes.
    text = b'{"inputs":[{"data":[1]}],"x":[' + b'{"data":1},' * 16_000 + b"1]}"
    events, header = cut_out([text[i : i + 65536] for i in range(0, len(text), 65536)], 1 << 20)
    assert len(events) == 2
    assert len(header) == len(text)


def _outcome(pieces: list[bytes]) -> object:
    try:
        events, header = cut_out(pieces, header_cap=60)
        return [strategies.describe(event) for event in events], header
    except GatewayError as error:
        return error.kind, error.message


@example(opening='{"inputs":[{"a":', parts='"data"data":[1]', at=[24])
@given(
    parts=st.lists(
        st.sampled_from(['"data"', "data", '{"inputs":[', *'"\\: \n[1],{}']), max_size=16
    ).map("".join),
    opening=st.sampled_from(["", '{"inputs":[{"a":', '{"inputs":[{"data":[1],"b":']),
    at=st.lists(st.integers(0, 60), max_size=4).map(sorted),
)
def test_keys_are_found_however_the_text_is_split(opening: str, parts: str, at: list[int]) -> None:
    text = (opening + parts).encode()
    pieces = [text[i:j] for i, j in zip([0, *at], [*at, len(text)], strict=True)]
    assert _outcome(pieces) == _outcome([text])
    assert _outcome(strategies.bytewise(text)) == _outcome([text])
