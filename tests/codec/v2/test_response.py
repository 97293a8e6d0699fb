from __future__ import annotations

import json
import math
import random
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.json.array_scanner import WINDOW
from gateway.codec.policies import BytesEncoding, JsonPolicies, Nonfinite
from gateway.codec.v2.buffered_response import write_json_fast
from gateway.codec.v2.response import ResponseEncoder, json_converter
from gateway.codec.v2.response_reader import (
    InferResponseReader,
    read_binary_fast,
    read_without_data,
)
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.messages import ALL_BINARY, ALL_JSON, OutputEncoding
from tests.codec import reference, strategies
from tests.codec.reference import DATATYPES, DTYPES, RefusedError, pack_bytes
from tests.codec.strategies import Output, output, response_body
from tests.codec.v2.conversions import (
    BODY_CAP,
    HEADER_CAP,
    NAMES,
    POLICIES,
    Converted,
    Failed,
    RandomOffloader,
    as_json,
    convert_response,
    normal,
)


def plainly(
    body: bytes, header_size: int, policies: JsonPolicies, binary: frozenset[str] = frozenset()
) -> tuple[str, bytes] | int:
    """Return the JSON and the binary part, or the status of the error."""
    nonfinite, bytes_encoding = policies.nonfinite.value, policies.bytes_encoding.value
    try:
        fields, tail = reference.convert_response(
            body, header_size, nonfinite, bytes_encoding, binary, policies.as_base64
        )
    except RefusedError as error:
        return error.status
    return normal(json.dumps(fields)), tail


def status(failed: Any) -> Any:
    return failed.kind.value.status if isinstance(failed, Failed) else failed


# ----------------------------------------------------------------------- independence of splits


@strategies.LAW
@given(strategies.responses(), POLICIES, strategies.SEEDS)
def test_response_is_the_same_however_split(
    answer: tuple[bytes, int], policies: JsonPolicies, seed: int
) -> None:
    body, size = answer
    found = as_json([body], size, policies)
    assert as_json(strategies.bytewise(body), size, policies) == found
    for accept_rate, failure_rate in ((0, 0), (0.7, 0), (0.7, 0.3), (0.7, 1)):
        offloader = RandomOffloader(seed, accept_rate, failure_rate)
        assert as_json(strategies.cut(body, seed), size, policies, offloader) == found
    expected = plainly(body, size, policies)
    if isinstance(found, Failed):
        assert status(found) == expected
    else:
        assert (normal(found), b"") == expected


@strategies.LAW
@given(strategies.responses(), POLICIES, st.sets(NAMES), st.booleans(), strategies.SEEDS)
def test_mixed_response_is_the_same_however_split(
    answer: tuple[bytes, int], policies: JsonPolicies, binary: set[str], default: bool, seed: int
) -> None:
    body, size = answer
    policies = replace(policies, as_base64=policies.as_base64 - binary)
    others = {"y", "z", 'q"', "é"} - binary
    form = OutputEncoding(default, dict.fromkeys(others if default else binary, not default))
    found = convert_response([body], form, policies, header_size=size)
    for pieces in (strategies.cut(body, seed), strategies.bytewise(body)):
        assert convert_response(pieces, form, policies, header_size=size) == found
    expected = plainly(body, size, policies, frozenset(binary))
    if isinstance(found, Failed):
        assert status(found) == expected
    else:
        assert (normal(found.header), found.tensors) == expected


@strategies.LAW
@given(strategies.responses(), POLICIES, strategies.SEEDS, st.integers(-3, 3))
def test_broken_response_is_treated_the_same_however_split(
    answer: tuple[bytes, int], policies: JsonPolicies, seed: int, shift: int
) -> None:
    body, size = answer
    body, size = strategies.mutated(body, seed), max(0, size + shift * (seed % 2))
    found = as_json([body], size, policies)
    assert as_json(strategies.cut(body, seed), size, policies) == found
    assert as_json(strategies.bytewise(body), size, policies) == found
    form = OutputEncoding(False, {"y": True})
    mixed = convert_response([body], form, policies, header_size=size)
    assert convert_response(strategies.bytewise(body), form, policies, header_size=size) == mixed
    for outcome in (found, mixed):
        assert not isinstance(outcome, Failed) or status(outcome) in (406, 502)


# ---------------------------------------------------------------------------------- JSON


def test_members_are_in_the_order_of_triton() -> None:
    header = (
        b'{"z":1,"outputs":[{"shape":[1],"more":[null],"parameters":'
        b'{"b":1,"binary_data_size":1,"a":"\xc3\xa9"},"datatype":"INT8","name":"y"},'
        b'{"name":"z","datatype":"BOOL","shape":[1],"data":[true]}],"parameters":{"p":1},'
        b'"model_version":null,"model_name":"m","id":"7","a":{}}'
    )
    text = as_json([header + b"\xff"], len(header))
    assert text == (
        b'{"id":"7","model_name":"m","parameters":{"p":1},"z":1,"model_version":null,"a":{},'
        b'"outputs":[{"name":"y","datatype":"INT8","shape":[1],"more":[null],'
        b'"parameters":{"b":1,"a":"\xc3\xa9"},"data":[-1]},'
        b'{"name":"z","datatype":"BOOL","shape":[1],"data":[true]}]}'
    )


def test_binary_tensor_replaces_json_data_of_the_same_output() -> None:
    sent = output("y", "INT8", [1], b"\7")
    body, size = response_body([strategies.Output("y", sent.shown | {"data": [1]}, sent.data)])
    text = as_json([body], size)
    assert isinstance(text, bytes)
    assert text.count(b'"data"') == 1
    assert json.loads(text)["outputs"][0]["data"] == [7]


def test_text_is_written_while_bytes_arrive() -> None:
    count = 100_000
    body, size = response_body(
        [output("y", "INT32", [count], np.arange(count, dtype="<i4").tobytes())]
    )
    codec = json_converter(size, JsonPolicies(), 1 << 24, 1 << 24)
    assert codec.text(body[: size - 1]) == b""
    text = codec.text(body[size - 1 : size + 2])
    assert text.endswith(b'"data":[')
    for start in range(size + 2, len(body), 4000):
        piece = codec.text(body[start : start + 4000])
        assert piece
        text += piece
    codec.finish()
    assert json.loads(text)["outputs"][0]["data"] == list(range(count))


# -------------------------------------------------------------------------------- broken responses

SHORT = "the server's response ends before all that its header says has come"
SURPLUS = "the server's response holds more bytes than its header says"
FULL = [
    output("y", "INT16", [2], b"abcd"),
    output("e", "INT8", [0], b""),
    output("z", "BYTES", [2], pack_bytes([b"a", b"bc"])),
]


def test_truncated_response_is_refused() -> None:
    body, size = response_body(FULL)
    short, form = Failed(ErrorKind.BAD_RESPONSE, SHORT), OutputEncoding(False, {"z": True})
    for missing in range(1, 16):
        for pieces in ([body[:-missing]], strategies.bytewise(body[:-missing])):
            assert as_json(pieces, size) == short
            assert convert_response(pieces, form, header_size=size) == short


@pytest.mark.parametrize("surplus", [b"x", b"x" * 100])
@pytest.mark.parametrize("outputs", [FULL, FULL[:2], []])
def test_surplus_bytes_are_refused(outputs: list[strategies.Output], surplus: bytes) -> None:
    body, size = response_body(outputs)
    for pieces in ([body + surplus], strategies.bytewise(body + surplus), [body, surplus]):
        failed = Failed(ErrorKind.BAD_RESPONSE, SURPLUS)
        assert as_json(pieces, size) == convert_response(pieces, header_size=size) == failed


@pytest.mark.parametrize("shape", [[1], [3], [], [0]])
def test_count_of_bytes_elements_that_does_not_match_the_shape_is_refused(shape: list[int]) -> None:
    body, size = response_body([output("y", "BYTES", shape, pack_bytes([b"a", b""]))])
    for pieces in ([body], strategies.bytewise(body)):
        assert as_json(pieces, size) == Failed(
            ErrorKind.BAD_RESPONSE,
            f"output 'y' of the server's response holds 2 elements, its shape {shape} takes "
            f"{math.prod(shape)}",
        )


# ---------------------------------------------------------------------------------- mixed responses

INT16 = output("y", "INT16", [2], b"\1\0\2\0", parameters={"a": 1})
FLOAT = output("z", "FP32", [1], struct.pack("<f", 0.1))


def test_the_spool_cap_counts_text_and_binary() -> None:
    body, size = response_body([INT16, FLOAT])
    form = OutputEncoding(False, {"z": True})
    held = len("1,2") + len(FLOAT.data)
    for pieces in ([body], strategies.bytewise(body)):
        fits = convert_response(pieces, form, header_size=size, body_cap=held)
        assert isinstance(fits, Converted)
        failed = convert_response(pieces, form, header_size=size, body_cap=held - 1)
        assert failed == Failed(
            ErrorKind.BAD_RESPONSE,
            f"a response of JSON and binary outputs must be buffered, and exceeds {held - 1} bytes "
            "(limits.max_buffered_body_bytes); ask for all outputs in one form",
        )


def test_policies_apply_to_json_outputs_only() -> None:
    nan = struct.pack("<f", math.nan)
    body, size = response_body([output("y", "FP32", [1], nan), output("z", "FP32", [1], nan)])
    policies = JsonPolicies(Nonfinite.ERROR)
    found = convert_response([body], ALL_BINARY, policies, header_size=size)
    assert isinstance(found, Converted)
    form = OutputEncoding(True, {"z": False})
    failed = convert_response([body], form, policies, header_size=size)
    assert isinstance(failed, Failed)
    assert failed.message.startswith("output 'z': element 0 is nan")


# ---------------------------------------------------------------------------------- the reader


def test_reader_yields_pieces_of_each_output() -> None:
    body, size = response_body(FULL)
    reader = InferResponseReader(size, HEADER_CAP, BODY_CAP)

    def pieces_of(data: bytes) -> list[tuple[int, bytes, bool]]:
        reader.feed(data)
        return [(piece.index, bytes(piece.data), piece.last) for piece in reader.pieces()]

    assert pieces_of(body[: size - 1]) == []
    assert reader.response is None
    assert pieces_of(body[size - 1 : size + 6]) == [
        (0, b"abcd", True),
        (1, b"", True),
        (2, b"\1\0", False),
    ]
    assert reader.response is not None
    assert [o.binary_size for o in reader.response.head.outputs] == [4, 0, 11]
    assert pieces_of(body[size + 6 :]) == [(2, body[size + 6 :], True)]
    reader.finish()


BOTH = pytest.mark.parametrize("form", [ALL_BINARY, ALL_JSON], ids=["all binary", "all JSON"])
BINARY = output("z", "INT64", [1], (2**53 + 1).to_bytes(8, "little"))


@pytest.mark.parametrize("form", [ALL_BINARY, ALL_JSON, OutputEncoding(True, {"e": False})])
@pytest.mark.parametrize("datatype", DATATYPES)
def test_output_without_elements_needs_no_data(datatype: str, form: OutputEncoding) -> None:
    silent = Output("e", {"name": "e", "datatype": datatype, "shape": [0]}, b"")

    def check(header: bytes) -> None:
        entry = json.loads(header)["outputs"][0]
        size = entry.get("parameters", {}).get("binary_data_size")
        assert (entry.get("data"), size) == ((None, 0) if form.wants_binary("e") else ([], None))

    body, size = response_body([silent, BINARY])
    found = convert_response([body], form, header_size=size)
    assert isinstance(found, Converted)
    check(found.header)
    body, size = response_body([silent])
    alone = convert_response([body], form)
    assert isinstance(alone, Converted)
    check(alone.header)
    if form is ALL_JSON:
        codec = json_converter(size, JsonPolicies(as_base64=frozenset("e")), 1 << 24, 1 << 24)
        check(codec.text(body))


@BOTH
@pytest.mark.parametrize("more", [{"shape": [5]}, {"parameters": {"shared_memory_region": "r"}}])
def test_output_in_shared_memory_is_passed_through(
    more: dict[str, object], form: OutputEncoding
) -> None:
    entry = {"name": "s", "datatype": "FP32", "shape": [0], **more}
    header = json.dumps({"outputs": [entry]}).encode()
    for size in (None, len(header)):
        found = convert_response([header], form, header_size=size)
        assert isinstance(found, Converted)
        assert found.outputs == [entry]


def broken(data: str, shape: int = 2, datatype: str = "FP32") -> bytes:
    head = f'"name":"y","shape":[{shape}],"datatype":"{datatype}"'
    return f'{{"outputs":[{{{head},"data":{data}}},{json.dumps(BINARY.shown)}]}}'.encode()


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (broken("[, 1.0]"), "output 'y': data is not a valid JSON array, near element 0"),
        (broken("[1]"), "output 'y': shape [2] takes 2 elements, data has 1"),
        (broken("[1, 2]", 2, "FP7"), "output 'y' of the server's response: unknown datatype"),
        (broken("[1, 2]")[:-3], "the server's response is not valid JSON"),
        (b"", "the server's response is not valid JSON"),
    ],
)
def test_invalid_json_outputs_are_refused(header: bytes, message: str) -> None:
    body = header + BINARY.data
    for pieces in ([body], strategies.bytewise(body)):
        found = convert_response(pieces, header_size=len(header))
        assert isinstance(found, Failed)
        assert found.kind is ErrorKind.BAD_RESPONSE
        assert found.message.startswith(message)


@pytest.mark.parametrize(
    "data",
    [
        *("[, 1.0]", "[1.0, ]", "[1.0, , 2]", "[1 2]", "[1,NaNs]"),
        *("[" + "1," * count + "]" for count in range(9, 24)),  # at the end of a window
    ],
)
def test_json_outputs_must_be_valid_json(data: str) -> None:
    header, form = broken(data), OutputEncoding(False, {"z": True})
    with strategies.windows_of(24):
        assert convert_response([header + BINARY.data], form, header_size=len(header)) == Failed(
            ErrorKind.BAD_RESPONSE,
            "output 'y' of the server's response has data that are no JSON array",
        )


@BOTH
def test_missing_binary_tensors_are_refused(form: OutputEncoding) -> None:
    header, _ = response_body([Output("z", BINARY.shown, b"")])
    found = convert_response([header], form)
    assert isinstance(found, Failed)
    assert found.kind is ErrorKind.BAD_RESPONSE
    assert "has 8 bytes, which do not follow its JSON" in found.message


def test_large_json_output_is_converted_in_steps() -> None:
    """Even if the datatype follows the data, so that all of it is queued."""
    numbers = list(range(100_000))
    entry = {"data": numbers, "name": "y", "shape": [len(numbers)], "datatype": "INT32"}
    body, size = response_body([Output("y", entry, b""), BINARY])
    codec = ResponseEncoder(size, ALL_BINARY, JsonPolicies(), 1 << 20, 1 << 20)
    codec.feed(body)
    steps = 0
    while codec.step():
        steps += 1
    assert steps > size / WINDOW - 1
    assert b"".join(codec.finish()[1]) == np.array(numbers, "<i4").tobytes() + BINARY.data


def streaming_result(body: bytes, header_size: int) -> tuple[bytes, int] | None:
    codec = json_converter(header_size, JsonPolicies(), 1 << 24, 1 << 24)
    try:
        text = codec.text(body)
        codec.finish()
    except GatewayError:
        return None
    return text, codec.element_count


def fast_path_agrees(body: bytes, header_size: int) -> bool:
    """Tell whether the fast path agrees with the streaming path, or leaves the response to it."""
    found = write_json_fast(body, header_size)
    return found is None or found == streaming_result(body, header_size)


def values(datatype: str, count: int = 4) -> bytes:
    return np.arange(count).astype(DTYPES[datatype]).tobytes()


@pytest.mark.parametrize("datatype", DTYPES)
def test_fast_path_converts_numbers(datatype: str) -> None:
    region = {"parameters": {"shared_memory_region": "r"}}
    shared = Output("s", {"name": "s", "datatype": datatype, "shape": [9], **region}, b"")
    body, size = response_body([shared, output("y", datatype, [2, 2], values(datatype))])
    written = write_json_fast(body, size)
    assert written is not None
    assert written == streaming_result(body, size)
    shown = [False, True, True, True] if datatype == "BOOL" else [0, 1, 2, 3]
    passed, converted = json.loads(written[0])["outputs"]
    assert (passed, converted["data"]) == (shared.shown, shown)
    assert written[1] == 4


def test_headers_that_differ_in_their_id_are_parsed_once() -> None:
    texts = [b'{"id":"%d","outputs":[]}' % number for number in range(9)]
    read = [read_without_data(text) for text in texts]
    # A full cache takes it at its second use.
    assert len({id(each.head) for each in read[2:] if each is not None}) == 1


def test_responses_have_their_own_ids() -> None:
    for response_id in ("a", "b", "", 'q"', "é"):
        body, size = response_body([output("y", "INT8", [1], b"\1")], {"id": response_id})
        written = write_json_fast(body, size)
        if written is not None:
            assert json.loads(written[0])["id"] == response_id
        assert fast_path_agrees(body, size)


def test_fast_path_leaves_broken_responses() -> None:
    body, size = response_body([output("y", "FP32", [4], values("FP32"))])
    assert write_json_fast(body[:-1], size) is None
    assert write_json_fast(body + b"\0", size) is None
    assert write_json_fast(body, size - 1) is None
    assert write_json_fast(body, 0) is None
    assert write_json_fast(b"", 0) is None
    for data in (b"", np.array([np.nan], "<f4").tobytes()):
        unusual, size = response_body([output("y", "FP32", [len(data) // 4], data)])
        assert write_json_fast(unusual, size) is None


@strategies.LAW
@given(strategies.responses(), strategies.SEEDS)
def test_fast_path_agrees_with_the_streaming_path_on_any_response(
    answer: tuple[bytes, int], seed: int
) -> None:
    body, size = answer
    assert fast_path_agrees(body, size)
    rng = random.Random(seed)
    assert fast_path_agrees(
        strategies.mutated(body, seed), max(0, size + rng.choice([0, 0, -1, 1]))
    )


def read_whole(body: bytes, size: int) -> tuple[Any, ...] | None:
    reader = InferResponseReader(size, len(body), len(body))
    try:
        reader.feed(body, last=True)
        while reader.step():
            pass
        tensors: dict[int, bytes] = {}
        for piece in reader.pieces():
            tensors[piece.index] = tensors.get(piece.index, b"") + bytes(piece.data)
        reader.finish()
    except GatewayError:
        return None
    response = reader.response
    assert response is not None
    return response.head, response.id, [data for _, data in sorted(tensors.items())]


@strategies.LAW
@given(strategies.responses(), strategies.SEEDS)
def test_binary_response_read_at_once_agrees_with_the_reader(
    answer: tuple[bytes, int], seed: int
) -> None:
    body, size = answer
    changed = strategies.mutated(body, seed), max(0, size + random.Random(seed).choice([0, -1, 1]))
    for text, header_size in (answer, changed):
        found = read_binary_fast(text, header_size)
        if found is not None:
            response, tensors = found
            read = response.head, response.id, list(map(bytes, tensors))
            assert read == read_whole(text, header_size)


def test_binary_response_is_read_at_once_only_if_it_is_whole() -> None:
    data = values("FP32")
    body, size = response_body([output("y", "FP32", [4], data), output("n", "INT8", [0], b"")])
    found = read_binary_fast(body, size)
    assert found is not None
    assert list(map(bytes, found[1])) == [data, b""]
    assert read_binary_fast(body[:-1], size) is None
    assert read_binary_fast(body + b"\0", size) is None
    assert read_binary_fast(b"", 0) is None


IN_BASE64 = {"parameters": {"content_type": "base64"}}


@pytest.mark.parametrize(
    "policies",
    [JsonPolicies(as_base64=frozenset("yzn")), JsonPolicies(bytes_encoding=BytesEncoding.BASE64)],
)
def test_json_strings_of_the_server_become_base64(policies: JsonPolicies) -> None:
    text = {"name": "y", "datatype": "BYTES", "shape": [2, 1], "data": [["abcd"], ["\xe9"]]}
    told = {"name": "z", "datatype": "BYTES", "shape": [1], "data": ["YQ=="]} | IN_BASE64
    sent = [strategies.Output(str(each["name"]), each, b"") for each in (text, told)]
    body, size = response_body([*sent, output("n", "INT8", [1], b"\7")])
    written = as_json([body], size, policies)
    assert isinstance(written, bytes)
    y, z, n = json.loads(written)["outputs"]
    assert y == {**text, "data": ["YWJjZA==", "w6k="]} | IN_BASE64
    assert z == told
    assert "parameters" not in n
    # The fast path leaves such a response to the streaming path.
    assert write_json_fast(body, size) is None
