from __future__ import annotations

import json

import pytest

from gateway.codec.v2.request import InferRequestReader
from gateway.errors import ErrorKind
from tests.codec import strategies
from tests.codec.v2.infer_requests import (
    DEPTH_CAP,
    HEADER_CAP,
    STRING_WINDOW,
    WINDOW,
    Accepted,
    Failed,
    X,
    check_law,
    outcome,
    request_body,
)

# -------------------------------------------------------------------------------- errors


ENDS_INSIDE = "the request ends at byte 62, inside the data of input 'x'"

OTHERS = [
    (
        request_body("INT32", "[1]", "[1]", '"datatype":"INT64"'),
        "input 'x' has more than one datatype",
    ),
    (
        request_body("INT32", "[1]", "[1]", '"parameters":{"binary_data_size":4}'),
        "input 'x' needs exactly one of data, binary_data_size and shared_memory_region; "
        "it has data and binary_data_size",
    ),
    (
        b'{"inputs":[{"name":"x","datatype":"INT8","shape":[1],"data":[1]}],"inputs":[]}',
        "the request has the key inputs more than once",
    ),
    (
        rb'{"inputs":[{"name":"x","datatype":"INT8","shape":[1],"\u0064ata":[1]}]}',
        X + 'data must be given once, under the key "data" written without escapes',
    ),
    # The value of the second data would look like a placeholder.
    *(
        (b'{"inputs":[{"name":"x","datatype":"INT8","shape":[1],%b}%b]}' % (members, behind), text)
        for behind in (b"", b',{"name":"y","datatype":"INT8","shape":[1],"data":[1]}')
        for members, text in (
            (rb'"data":[1],"\u0064ata":0', "input 'x' has more than one data"),
            (rb'"data":[1],"\u0064ata":[0]', "input 'x' has more than one data"),
            (rb'"\u0064ata":[0],"data":[1]', "input 'x' has more than one data"),
            (rb'"\u0064ata":0,"data":[1]', "input 'x' has more than one data"),
            (rb'"data":0,"data":[1]', X + "data must be an array, got a number"),
        )
    ),
    (
        b'{"inputs":[{"data":["x"],"name":"x","datatype":"INT8","shape":[1]}]}',
        X + 'element 0 ("x") is not an integer, as INT8 needs',
    ),
    (request_body("INT8", "[1]", "[1")[:-3], ENDS_INSIDE),
    (
        b'{"inputs":[{"name":"x","data":[1,{"a":2}],"datatype":"INT8"',
        X + 'data is not an array of plain values, at byte 33, near: {"a":2}],"datatype":"INT8"',
    ),
    (request_body("INT8", "[1]", "[1,]"), X + "data is not a valid JSON array, near element 0"),
    (request_body("INT8", "[2]", "[1]]"), X + "data has a closing bracket too many"),
]


@pytest.mark.parametrize(
    "note", ['{"data":1,"data":{"x":2}}', '{"data":1,"data":2}', '{"inputs":1,"inputs":[2]}']
)
def test_duplicate_keys_outside_of_tensors_pass(note: str) -> None:
    for body in (
        request_body("INT8", "[1]", "[1]", f'"note":{note}'),
        request_body("INT8", "[1]", "[1]")[:-1] + f',"note":{note}}}'.encode(),
    ):
        check_law(body, 1, 24)
        assert isinstance(outcome([body]), Accepted)


@pytest.mark.parametrize(("body", "message"), OTHERS)
def test_other_invalid_requests_are_refused(body: bytes, message: str) -> None:
    found = outcome([body])
    assert isinstance(found, Failed)
    assert found.kind.value.status == 400
    assert found.message.startswith(message)
    assert outcome(strategies.bytewise(body)) == found
    assert outcome(strategies.cut(body, 2), work=False) == found


FIRST_FAULT = '{"name":"a","shape":[1],"data":["x"],"datatype":"INT8"}'


@pytest.mark.parametrize(
    "behind",
    [
        '{"name":"b","datatype":"INT8","shape":[1],"data":["y"]}',
        '{"name":"b","datatype":"INT8","shape":[1],"data":' + "[" * 99 + "]" * 99 + "}",
        '{"name":"b","datatype":"INT8","shape":[1],"data":[1,' + "1" * 70_000 + "]}",
        '{"name":"b","data":[1],"data":[2]}',
        '{"name":"' + "b" * 3000 + '","data":[1]}',
        '{"name":"b" nonsense',
    ],
)
def test_first_of_two_errors_is_reported(behind: str) -> None:
    # The first waits for its datatype; the text behind it does not.
    body = ('{"inputs":[' + FIRST_FAULT + ',{"data":[]},' + behind + "]}").encode()
    found = outcome([body], header_cap=2000)
    assert isinstance(found, Failed)
    assert found.message == "input 'a': element 0 (\"x\") is not an integer, as INT8 needs"
    for work in (True, False):
        for pieces in (strategies.bytewise(body), strategies.cut(body, 3), [body]):
            assert outcome(pieces, work=work, header_cap=2000) == found


@pytest.mark.parametrize(
    ("datatype", "element", "window"), [("INT8", "1", WINDOW), ("BYTES", '""', STRING_WINDOW)]
)
def test_large_feed_is_converted_in_steps(datatype: str, element: str, window: int) -> None:
    body = request_body(datatype, "[200000]", "[" + ",".join([element] * 200_000) + "]")
    codec = InferRequestReader(HEADER_CAP, DEPTH_CAP)
    codec.feed(body)
    assert codec.buffered_data_bytes > len(body) - 200
    rounds = 0
    while codec.step():
        rounds += 1
    assert rounds >= len(body) // window
    assert codec.buffered_data_bytes == 200_000 * (4 if datatype == "BYTES" else 1)


def test_many_arrays_are_converted_in_steps() -> None:
    entry = '{"name":"x%d","datatype":"INT8","shape":[1],"data":[%d]}'
    body = '{"inputs":[' + ",".join(entry % (i, i % 100) for i in range(2000)) + "]}"
    codec = InferRequestReader(HEADER_CAP, DEPTH_CAP, tensor_cap=2000)
    codec.feed(body.encode(), last=True)
    rounds, before = 0, codec.buffered_data_bytes
    while codec.step():
        rounds += 1
        assert abs(codec.buffered_data_bytes - before) <= 64 * len("[00]")
        before = codec.buffered_data_bytes
    assert 2 * 2000 / 64 < rounds < 200
    tensors = codec.finish().tensors
    assert tensors == tuple([bytes([i % 100])] for i in range(2000))


# ----------------------------------------------------------------------------------------- caps


def test_the_header_cap_does_not_count_data() -> None:
    body = request_body("INT8", "[9000]", json.dumps([1] * 9000))
    least = len(body) - len(json.dumps([1] * 9000)) + len("[0]")
    assert isinstance(outcome([body], header_cap=least), Accepted)
    for pieces in ([body], strategies.bytewise(body)):
        assert outcome(pieces, header_cap=least - 1) == Failed(
            ErrorKind.TOO_LARGE,
            f"the JSON around the data is larger than {least - 1} bytes "
            "(limits.max_inference_header_bytes)",
        )


@pytest.mark.parametrize("depth_cap", [4, 5, 64, 200])
def test_depth_cap_applies(depth_cap: int) -> None:
    def body(data: int, header: int) -> bytes:
        array = "[" * data + "7" + "]" * data
        nest = "[" * (header - 3) + "]" * (header - 3)
        return request_body("INT8", "[1]", array, f'"z":{nest}')

    assert isinstance(outcome([body(depth_cap, depth_cap)], depth_cap=depth_cap), Accepted)
    assert outcome([body(depth_cap + 1, depth_cap)], depth_cap=depth_cap) == Failed(
        ErrorKind.BAD_REQUEST, X + f"data is nested deeper than {depth_cap}"
    )
    assert outcome([body(depth_cap, depth_cap + 1)], depth_cap=depth_cap) == Failed(
        ErrorKind.BAD_REQUEST, f"the request's JSON is nested deeper than {depth_cap}"
    )
