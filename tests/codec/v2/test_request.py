from __future__ import annotations

import base64
import itertools
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.codec.v2.binary_request import write_binary_header
from gateway.codec.v2.request import InferRequestReader, read_without_data
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.messages import ALL_BINARY, OutputEncoding
from tests.codec import strategies
from tests.codec.reference import pack_bytes
from tests.codec.v2.conversions import (
    DEPTH_CAP,
    HEADER_CAP,
    STRING_WINDOW,
    WINDOW,
    Accepted,
    Failed,
    RandomOffloader,
    X,
    check_large,
    check_law,
    chunks,
    converted,
    outcome,
    request_body,
)
from tests.support.scale import scaled

# Small windows too, so that every place is at the edge of one.
WINDOWS = (24, 32, 64, WINDOW)


# ----------------------------------------------------------------------- independence of splits


@settings(strategies.LAW, max_examples=scaled(250))
@given(
    st.booleans().flatmap(lambda faulty: strategies.request_bodies(faulty=faulty)),
    st.booleans(),
    strategies.SEEDS,
)
def test_request_or_its_error_is_the_same_however_split(
    body: bytes, is_broken: bool, seed: int
) -> None:
    for window in WINDOWS:
        check_law(strategies.mutated(body, seed) if is_broken else body, seed, window)


@strategies.LAW
@given(body=strategies.request_bodies(faulty=True), seed=strategies.SEEDS)
def test_caps_apply_however_split(body: bytes, seed: int) -> None:
    for header_cap, depth_cap in ((60, 64), (200, 64), (HEADER_CAP, 4)):
        split = [[body], strategies.cut(body, seed), strategies.bytewise(body)]
        found, *others = [
            outcome(pieces, header_cap=header_cap, depth_cap=depth_cap) for pieces in split
        ]
        assert others == [found, found]
        assert isinstance(found, Accepted) or found.kind.value.status in (400, 413)


# ------------------------------------------------------------------------------------ the table


DEEP = 10_000

NOT_JSON = "the request is not valid JSON"

INSIDE_DATA = "the request ends at byte 62, inside the data of input 'x'"

NOT_AN_ARRAY = X + "data must be an array, got "

TOO_DEEP = X + f"data is nested deeper than {DEPTH_CAP}"

# What is refused, each with 400.
REFUSED = [
    # tests/codec/elements/test_decode.py has the other errors of elements.
    (request_body("UINT8", "[2]", "[0,300]"), X + "element 1 (300) does not fit UINT8"),
    (request_body("FP32", "[1]", "[null]"), X + "element 0 (null) is not a number, as FP32 needs"),
    (request_body("INT32", "[2,2]", "[1,2,3]"), X + "shape [2, 2] takes 4 elements, data has 3"),
    (
        b'{"note":"'
        + b"long " * 40
        + b'","x":{"data":1},'
        + request_body("INT32", "[1]", "null")[1:],
        NOT_AN_ARRAY + "null",
    ),
    (request_body("INT32", "[1]", "[" * DEEP + "]" * DEEP), TOO_DEEP),
    (
        request_body("INT32", "[1]", "[1]", '"y":' + "[" * DEEP + "]" * DEEP),
        "the request is JSON nested deeper than 1024",
    ),
    (
        request_body("INT32", "[1]", "[1]", '"y":' + "[" * 100 + "]" * 100),
        f"the request's JSON is nested deeper than {DEPTH_CAP}",
    ),
    (b'{"id":null,' + request_body("INT32", "[1]", "[1]")[1:], "id must be a string, got null"),
    (b" \n", NOT_JSON + " ("),
    (b'{"x":[' * DEEP, "the request is JSON nested deeper than 1024"),
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
    (request_body("INT8", "[1]", "[1")[:-3], INSIDE_DATA),
    (
        b'{"inputs":[{"name":"x","data":[1,{"a":2}],"datatype":"INT8"',
        X + 'data is not an array of plain values, at byte 33, near: {"a":2}],"datatype":"INT8"',
    ),
    (request_body("INT8", "[1]", "[1,]"), X + "data is not a valid JSON array, near element 0"),
    (request_body("INT8", "[2]", "[1]]"), X + "data has a closing bracket too many"),
    (
        rb'{"inputs":[{"name":"x","datatype":"INT8","shape":[1],"\u0064ata":0}]}',
        X + "data must be an array, got 0",
    ),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_invalid_requests_are_refused(body: bytes, message: str) -> None:
    found = outcome([body])
    assert isinstance(found, Failed)
    assert found.kind.value.status == 400
    assert found.message.startswith(message)
    assert len(found.message) < 300
    if len(body) < 1000:
        assert outcome(strategies.bytewise(body)) == found
    assert outcome(strategies.cut(body, 1)) == found
    assert outcome(strategies.cut(body, 2), work=False) == found


@pytest.mark.parametrize("start", ["{", "{ ", "{\n  ", "\n {\n\t "])
def test_many_tiny_values_beside_the_data_are_accepted(start: str) -> None:
    """orjson alone fails on them if the text before them looks indented."""
    many = "[" + "1," * 5000 + "1]"
    body = start + f'"parameters":{{"x":{many}}},' + request_body("INT8", "[1]", "[7]")[1:].decode()
    for pieces in ([body.encode()], strategies.cut(body.encode(), 1)):
        found = outcome(pieces, header_cap=1 << 20)
        assert isinstance(found, Accepted)
        assert json.loads(found.header)["parameters"]["x"] == [1] * 5001
    broken = body[:-1] + "x"
    assert outcome([broken.encode()], header_cap=1 << 20) == Failed(
        ErrorKind.BAD_REQUEST,
        "the request is not valid JSON (unexpected character, expected ',' or '}' "
        f"at byte {len(body) - 1}), near: " + 'pe":[1],"data":[…]}]x',
    )


V1_AT_V2 = (
    "inputs is missing; the request has instances, as in the V1 protocol: "
    "send such a request to /v1/models/MODEL:predict"
)


@pytest.mark.parametrize(
    "instances", ["[[1,2],[3,4]]", "[" + "1," * 100_000 + "1]", '[{"data":1}]']
)
@pytest.mark.parametrize("space", ["", " \n"])
def test_v1_request_is_pointed_to_the_v1_path(instances: str, space: str) -> None:
    body = f'{space}{{{space}"instances"{space}:{instances},"parameters":{{}}}}'.encode()
    for pieces in ([body], strategies.cut(body, 1), strategies.cut(body, 2)):
        assert outcome(pieces) == Failed(ErrorKind.BAD_REQUEST, V1_AT_V2)


@pytest.mark.parametrize("tensor", [bytes(8), b"\0\0\x80\xbf" * 2, b"\xff" * 200_000])
@pytest.mark.parametrize("data", [b"", b',{"name":"y","shape":[1],"datatype":"INT8","data":[17]}'])
def test_error_for_missing_header_length_names_its_value(tensor: bytes, data: bytes) -> None:
    entry = b'{"name":"x","shape":[2],"datatype":"FP32","parameters":{"binary_data_size":8}}'
    header = b'{"inputs":[' + entry + data + b"]}"
    body = header + tensor
    message = (
        f"bytes follow the request's JSON of {len(header)} bytes: a request with binary tensors "
        f"needs the header Inference-Header-Content-Length: {len(header)}"
    )
    for pieces in ([body], strategies.cut(body, 1), strategies.cut(body, 2)):
        assert outcome(pieces) == Failed(ErrorKind.BAD_REQUEST, message)


def test_classification_and_shared_memory_are_passed_through() -> None:
    body = (
        b'{"inputs":[{"name":"x","shape":[2],"datatype":"INT8",'
        b'"parameters":{"shared_memory_region":"r","shared_memory_byte_size":2}}],'
        b'"outputs":[{"name":"y","parameters":{"classification":3,"binary_data":true}},'
        b'{"name":"z","parameters":{"shared_memory_region":"s"}}]}'
    )
    found = converted(body)
    encoding = OutputEncoding(False, {"y": True, "z": False})
    assert found == Accepted(found.header, [], encoding, 0, 0)
    assert found.fields == json.loads(body)


@pytest.mark.parametrize(
    "outputs",
    [
        b'"outputs":[{"name":"y","parameters":{"classification":1,"classification":0,%b}}]',
        b'"outputs":[{"name":"y","parameters":{"cl\\u0061ssification":1,"classification":0,%b}}]',
        b'"outputs":[{"name":"y","parameters":{"classification":1}}],'
        b'"outputs":[{"name":"y","parameters":{%b}}]',
    ],
)
def test_a_server_sees_no_classification_that_the_gateway_does_not(outputs: bytes) -> None:
    # Triton takes the first of two equal keys, the gateway the last.
    body = b'{"inputs":[{"name":"x","shape":[2],"datatype":"INT8","parameters":{%b}}],%b}' % (
        b'"binary_data_size":2',
        outputs % b'"binary_data":true',
    )
    codec = InferRequestReader(1000, 64)
    codec.feed(body, last=True)
    request = codec.finish()
    assert request.head.features.is_plain
    header = write_binary_header(request)
    assert b'"classification":1' not in header
    assert b"\\u0061" not in header


def test_request_without_changes_is_passed_byte_for_byte() -> None:
    body = (
        b'{ "inputs" : [{"name":"x", "shape":[2], "datatype":"INT8",\n'
        b'"parameters": {"binary_data_size": 2}}], "parameters": {"binary_data_output": true},'
        b' "x": 123456789012345678901234567890 }'
    )
    for pieces in ([body], strategies.bytewise(body)):
        assert outcome(pieces) == Accepted(body, [2], ALL_BINARY, 2, 2)


_BINARY_INPUT = b'{"name":"x","shape":[2],"datatype":"INT8","parameters":{"binary_data_size":2}}'


def _cached(text: bytes, depth_cap: int = DEPTH_CAP) -> object:
    """Read a header by the cache; return all of it, or its error."""
    try:
        request = read_without_data(text, depth_cap)
    except GatewayError as error:
        return Failed(error.kind, error.message)
    assert request is not None
    return request.head, request.id, request.tensors, request.text


def _uncached(text: bytes, depth_cap: int = DEPTH_CAP) -> object:
    codec = InferRequestReader(HEADER_CAP, depth_cap)
    try:
        codec.feed(text, last=True)
        request = codec.finish()
    except GatewayError as error:
        return Failed(error.kind, error.message)
    return request.head, request.id, request.tensors, request.text


@pytest.mark.parametrize(
    "text",
    [
        b'{"inputs":[@]}',
        b'{"id":"7","inputs":[@],"parameters":{"binary_data_output":true}}',
        b'{"inputs":[@],"outputs":[{"name":"y","parameters":{"classification":1}}]}',
        b'{"inputs":[@]',
        b"",
        b'{"inputs":[@],"x":[[[[[[[[[[[[[]]]]]]]]]]]]]}',
    ],
)
def test_cached_header_is_read_like_any_other(text: bytes) -> None:
    text = text.replace(b"@", _BINARY_INPUT)
    for depth_cap in (DEPTH_CAP, DEPTH_CAP, 2):
        assert _cached(text, depth_cap) == _uncached(text, depth_cap)


@pytest.mark.parametrize("name", ["x", "data", "id"])
def test_header_of_a_tensor_with_the_name_of_a_key_is_cached(name: str) -> None:
    tensor = json.loads(_BINARY_INPUT) | {"name": name}
    texts = [json.dumps({"id": f"{number}", "inputs": [tensor]}).encode() for number in range(9)]
    read = [read_without_data(text, DEPTH_CAP) for text in texts][2:]
    assert len({id(each.head) for each in read if each is not None}) == 1
    for text in texts:
        assert _cached(text) == _uncached(text)


@pytest.mark.parametrize("key", [b'"data"', b'"data" \n', b'"\\u0064ata"', b'"d\\u0061ta"'])
def test_header_that_may_contain_data_is_not_cached(key: bytes) -> None:
    text = b'{"inputs":[{"name":"x","shape":[1],"datatype":"INT8",%b:[1]}]}' % key
    assert read_without_data(text, DEPTH_CAP) is None


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
    assert codec.buffered_bytes > len(body) - 200
    rounds = 0
    while codec.step():
        rounds += 1
    assert rounds >= len(body) // window
    assert codec.buffered_data_bytes == 200_000 * (4 if datatype == "BYTES" else 1)


def test_numbers_of_unknown_datatype_do_not_pin_what_they_were_received_in() -> None:
    received = bytearray(b'{"inputs":[{"name":"a","data":[1')
    reader = InferRequestReader(HEADER_CAP, DEPTH_CAP)
    reader.feed(bytes(received))
    received[:] = b",1" * 400_000
    reader.feed(memoryview(received))
    while reader.step():
        pass
    received.clear()  # raises if there is a view
    reader.feed(b'],"shape":[400001],"datatype":"UINT8"}]}')
    reader.feed(b"", last=True)
    while reader.step():
        pass
    assert b"".join(reader.finish().chunks) == bytes([1]) * 400_001


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


# ---------------------------------------------------------------------------------- data


UNITS = ["a", "é", "€", "😀", "\\n", "\\u00e9", "\\ud83d\\ude00", '\\"', "\\\\", "]", "\\u005b,"]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("before", [0, 5])
def test_long_strings_are_converted(unit: str, before: int) -> None:
    count = 205_000 // len(unit.encode())
    first, second = "x" * before + unit * count, unit * (count // 3) + "x"
    body = request_body("BYTES", "[4]", f'["a","{first}",["","{second}"]]')
    check_large(body)


@pytest.mark.parametrize("length", [*range(STRING_WINDOW - 14, STRING_WINDOW + 3), WINDOW])
def test_strings_as_long_as_a_window_are_converted(length: int) -> None:
    check_large(request_body("BYTES", "[2]", '["' + "a" * length + '" , "b"]'))
    check_large(request_body("BYTES", "[1]", '["' + "a" * length + '"]'), (65536,))


def test_half_a_surrogate_pair_in_a_long_string_is_refused() -> None:
    message = X + "element 1 is not a valid JSON string (no low surrogate in string)"
    for end in ("", "x", "x" * WINDOW):
        body = request_body("BYTES", "[2]", '["a","' + "é" * WINDOW + "\\ud83d" + end + '"]')
        for pieces in ([body], chunks(body, 999)):
            assert outcome(pieces) == Failed(ErrorKind.BAD_REQUEST, message)


def test_many_numbers_are_converted() -> None:
    rng = np.random.default_rng(0)
    integers = rng.integers(-(2**31), 2**31, 90_000).astype("<i4")
    body = request_body("INT32", "[300,300]", json.dumps(integers.reshape(300, 300).tolist()))
    assert check_large(body).tensors == [integers.tobytes()]
    floats = rng.standard_normal(90_000)
    floats[::251] = np.nan
    body = request_body("FP32", "[90000]", json.dumps(floats.tolist(), separators=(",", ":")))
    assert converted(body).tensors == [floats.astype("<f4").tobytes()]
    assert outcome(chunks(body, 65536)) == converted(body)


def test_large_strings_in_small_reads_are_converted() -> None:
    rng = random.Random(0)
    texts = ["".join(rng.choices('a é😀"\\\n[],', k=rng.choice([0, 5, 900]))) for _ in range(300)]
    texts[7] = "".join(rng.choices('a é😀"\\\n', k=90_000))
    body = request_body("BYTES", "[300]", json.dumps(texts))
    found = check_large(body, (65536, 4099))
    assert found.tensors == [pack_bytes([text.encode() for text in texts])]
    body = request_body("BYTES", "[300]", json.dumps(texts, ensure_ascii=False))
    assert check_large(body).tensors == found.tensors


NOT_BASE64 = X + "element 1 is not base64, as its content_type says: "

ORDERS = [
    form.format(*letters)
    for letters in itertools.permutations("dpc")  # name and shape matter less
    for form in ("ns{}{}{}", "{}{}s{}n")
]

FOR_BYTES = X + "the content_type base64 is for BYTES only, not for "


def keyed(order: str, **values: str) -> bytes:
    """Write a request of one input with its keys in this order, by their first letters."""
    given = {
        "name": '"x"',
        "datatype": '"BYTES"',
        "shape": "[2]",
        "parameters": '{"a":1,"content_type":"base64"}',
        "content": '["/9j/4A==",""]',  # the data
        **values,
    }
    keys = {key[0]: f'"{"data" if key == "content" else key}":{given[key]}' for key in given}
    return ('{"inputs":[{' + ",".join(keys[letter] for letter in order) + "}]}").encode()


@pytest.mark.parametrize("order", ORDERS)
def test_base64_is_decoded_wherever_the_content_type_stands(order: str) -> None:
    found = converted(keyed(order))
    assert found.tensors == [pack_bytes([b"\xff\xd8\xff\xe0", b""])]
    (entry,) = found.fields["inputs"]
    # The content type of the JSON data does not apply to the bytes.
    assert entry["parameters"] == {"a": 1, "binary_data_size": 12}
    assert outcome(strategies.bytewise(keyed(order)), work=False) == found


@pytest.mark.parametrize("order", ORDERS)
def test_base64_is_for_bytes_only(order: str) -> None:
    seen_first = order.index("c") > max(order.index("d"), order.index("p"))
    for data in ("[1,2]", '["AAAA","AAAA"]'):
        body = keyed(order, datatype='"INT32"', content=data)
        found = outcome([body])
        assert isinstance(found, Failed)
        if "A" not in data or seen_first:
            assert found == Failed(ErrorKind.BAD_REQUEST, FOR_BYTES + "INT32")
        assert outcome(strategies.bytewise(body)) == found


def test_invalid_base64_is_refused() -> None:
    body = keyed("ndspc", content='["YQ==","YW-j"]')
    found = outcome([body])
    assert found == Failed(
        ErrorKind.BAD_REQUEST, NOT_BASE64 + "character 2 ('-') is not in the base64 alphabet"
    )
    assert outcome(strategies.bytewise(body), work=False) == found
    assert outcome([keyed("cpnds", content='["YQ==","YW-j"]')]) == found


def test_wrong_element_type_is_reported_before_invalid_base64() -> None:
    body = keyed("ndspc", content='["-",7]')
    assert outcome([body]) == Failed(
        ErrorKind.BAD_REQUEST, X + "element 1 (7) is not a string, as BYTES needs"
    )


@pytest.mark.parametrize("size", [0, 1, 2, 3, 49_149, 49_152, 49_153, 300_001])
def test_large_base64_elements_are_decoded(size: int) -> None:
    elements = [b"a", random.Random(size).randbytes(size), b"", bytes(40_000), b"bc"]
    texts = json.dumps([base64.b64encode(element).decode() for element in elements])
    body = keyed("ndspc", shape="[5]", content=texts)
    found = check_large(body)
    assert found.tensors == [pack_bytes(elements)]


def test_base64_is_decoded_in_steps() -> None:
    elements = [random.Random(0).randbytes(1_000_000), *[b"abc"] * 50_000]
    texts = json.dumps([base64.b64encode(element).decode() for element in elements])
    codec = InferRequestReader(HEADER_CAP, DEPTH_CAP)
    codec.feed(keyed("ndspc", shape="[50001]", content=texts))
    codec.feed(b"", last=True)
    rounds, held, most = 0, codec.buffered_data_bytes, codec.buffered_data_bytes
    while codec.step():
        rounds += 1
        assert codec.buffered_data_bytes <= held + 8
        held = codec.buffered_data_bytes
    assert rounds > len(texts) / WINDOW
    (tensor,) = codec.finish().tensors
    assert not isinstance(tensor, int)
    assert b"".join(tensor) == pack_bytes(elements)
    assert codec.buffered_data_bytes == sum(map(len, tensor)) < most * 0.9


# ---------------------------------------------------------------------------------- offloading


def test_first_error_is_reported_even_if_found_last() -> None:
    numbers = [b"%d" % (number % 100) for number in range(1000)]
    numbers[100], numbers[700] = b"1000", b"true"
    entry = b'{"name":"x","datatype":"UINT8","shape":[1000],"data":[' + b",".join(numbers) + b"]}"
    body = b'{"inputs":[' + entry + b"]}"
    with strategies.windows_of(64):
        for seed in range(50):
            offloader = RandomOffloader(seed)
            found = outcome([body], offloader=offloader)
            assert isinstance(found, Failed)
            assert "element 100" in found.message
            assert offloader.count


def test_offloaded_results_are_collected_as_soon_as_possible() -> None:
    body = b'{"inputs":[{"name":"x","datatype":"INT32","shape":[9],"data":['
    offloader = RandomOffloader(0, accept_rate=1, failure_rate=0)
    codec = InferRequestReader(HEADER_CAP, DEPTH_CAP, offloader)
    with strategies.windows_of(64):
        codec.feed(body)
        for _ in range(100):
            codec.feed(b"1234567,1234567,1234567,1234567,1234567,1234567,1234567,1234567,")
            codec.step()
            while codec.future is not None:
                offloader.run_until(codec.future)
                codec.step()
    assert offloader.count > 90
