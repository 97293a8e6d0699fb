"""What is refused of requests, in which words, and what they may cost."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.datatypes import DATATYPES
from tests.codec.grpc.infer_messages import read_request
from tests.support.checks.refused import refused
from tests.support.grpc.proto_file import ModelInferRequest
from tests.support.grpc.wire_bytes import field


def error_of(data: bytes, **caps: int) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        read_request(data, **caps)
    return caught.value


def tensor_message(datatype: str = "FP32", shape: tuple[int, ...] = (2,), **contents: Any) -> Any:
    message = ModelInferRequest()
    message.inputs.add(name="x", datatype=datatype, shape=shape, contents=contents or None)
    return message


def with_raw(message: Any, *raw: bytes) -> Any:
    message.raw_input_contents.extend(raw)
    return message


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            with_raw(tensor_message(fp32_contents=[1, 2]), bytes(8)),
            "input 'x' has contents beside raw_input_contents; send one of them",
        ),
        (
            with_raw(tensor_message(), bytes(8), bytes(8)),
            "the request has 2 raw_input_contents for 1 inputs; the last is input 'x'",
        ),
        (
            with_raw(ModelInferRequest(), b""),
            "the request has 1 raw_input_contents for 0 inputs",
        ),
        (
            with_raw(
                ModelInferRequest(
                    inputs=[{"name": name, "datatype": "FP32", "shape": [1]} for name in "xy"]
                ),
                bytes(4),
            ),
            "input 'y' has no raw_input_contents: there are 1 of them for 2 inputs",
        ),
        (
            with_raw(tensor_message(), bytes(7)),
            "input 'x': raw_input_contents has 7 bytes, but shape [2] of FP32 takes 8 bytes",
        ),
        (
            with_raw(tensor_message(shape=(2**31, 2**31, 2**31)), bytes(7)),
            "input 'x': raw_input_contents has 7 bytes, but shape [2147483648, 2147483648, "
            "2147483648] of FP32 takes 36893488147419103232 bytes",
        ),
        (
            with_raw(tensor_message("BYTES", (3,)), bytes(11)),
            "input 'x': raw_input_contents has 11 bytes, but shape [3] of BYTES takes 3 elements "
            "of 4 bytes or more",
        ),
        (
            with_raw(tensor_message(shape=(-1,)), bytes(4)),
            "input 'x': shape [-1] must hold integers of 0 or more only",
        ),
        (
            with_raw(tensor_message(shape=(1,) * 65), bytes(4)),
            "input 'x': shape has 65 dimensions; at most 64 are allowed",
        ),
        (tensor_message(datatype=""), "input 'x': datatype is missing"),
        (
            ModelInferRequest(inputs=[{"datatype": "FP8"}]),
            'inputs[0]: unknown datatype "FP8"; known are ' + ", ".join(DATATYPES),
        ),
        (
            tensor_message(),
            "input 'x': shape [2] takes 2 elements, fp32_contents has 0",
        ),
        (
            tensor_message(fp32_contents=[1, 2, 3]),
            "input 'x': shape [2] takes 2 elements, fp32_contents has 3",
        ),
        (
            tensor_message("FP16"),
            "input 'x': shape [2] takes 2 elements, and there are 0",
        ),
        (
            tensor_message("FP16", fp32_contents=[1, 2]),
            "input 'x' has elements in fp32_contents; those of FP16 belong into "
            "raw_input_contents only",
        ),
        (
            tensor_message("FP32", fp64_contents=[1, 2]),
            "input 'x' has elements in fp64_contents; those of FP32 belong into fp32_contents or "
            "raw_input_contents",
        ),
        (
            tensor_message("UINT8", uint_contents=[1, 256]),
            "input 'x': element 1 (256) does not fit UINT8",
        ),
        (
            tensor_message("INT8", int_contents=[-129, 1]),
            "input 'x': element 0 (-129) does not fit INT8",
        ),
    ],
)
def test_error_names_the_tensor(message: Any, text: str) -> None:
    with refused(ErrorKind.BAD_REQUEST, text):
        read_request(message.SerializeToString())


def test_tensor_has_contents_or_is_in_shared_memory() -> None:
    message = tensor_message(fp32_contents=[1, 2])
    message.inputs[0].parameters["shared_memory_region"].string_param = "r"
    assert error_of(message.SerializeToString()).message == (
        "input 'x' has contents and shared_memory_region; send one of them"
    )


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x0a\x05ab", "a value of 5 bytes is cut short: 2 are left at byte 1"),
        (b"\x0a\x01\xff", "a string that is not UTF-8 at byte 2"),
        (field(5, field(1, b"a\xff")), "a string that is not UTF-8 at byte 5"),
        (field(3, b"id") + field(5, field(1, b"\xff")) + field(7, b""), "not UTF-8 at byte 8"),
    ],
)
def test_error_of_invalid_protobuf_names_the_byte(data: bytes, text: str) -> None:
    error = error_of(data)
    assert error.kind is ErrorKind.BAD_REQUEST
    assert error.message.startswith("the request is not valid protobuf: ")
    assert error.message.endswith(text)
    with pytest.raises(DecodeError):
        ModelInferRequest.FromString(data)


def test_invalid_varint_in_contents_names_the_tensor() -> None:
    entry = field(1, b"x") + field(2, b"INT32") + field(3, 1)
    data = field(5, entry + field(5, field(2, b"\x80" * 10 + b"\x01")))
    assert error_of(data).message == ("input 'x': int_contents has a varint of more than 10 bytes")
    with pytest.raises(DecodeError):
        ModelInferRequest.FromString(data)


# ------------------------------------------------------------------------------------ limits

HEADER_ERROR = (
    "the request has more than 100 bytes beside the data of tensors "
    "(limits.max_inference_header_bytes)"
)


@pytest.mark.parametrize(
    "more",
    [
        field(1, b"x" * 200),
        field(3, b"x" * 200),
        field(4, field(1, b"x" * 200)),
        field(5, field(1, b"x" * 200)),
        field(5, field(3, b"\x01" * 200)),
        field(5, field(3, 1) * 100),
        field(6, field(1, b"x" * 200)),
        field(99, b"x" * 200),
        field(99, 1) * 50,
        field(4, b"") * 100,
        # Fields without elements.
        field(5, field(2, b"FP32") + field(5, field(6, b"") * 100)),
        field(5, field(2, b"FP32") + field(5, field(1, b"") * 100)),
        field(5, field(2, b"FP32") + field(5, field(99, 1) * 100)),
        field(5, field(2, b"FP32") + field(5, b"\x08\x01") * 100),
    ],
)
def test_bytes_beside_data_are_limited(more: bytes) -> None:
    with refused(ErrorKind.TOO_LARGE, HEADER_ERROR):
        read_request(more, header_cap=100)


def test_data_are_not_limited_as_header() -> None:
    for raw in (True, False):
        message = tensor_message(shape=(1000,))
        if raw:
            message.raw_input_contents.append(bytes(4000))
        else:
            message.inputs[0].contents.fp32_contents.extend([0] * 1000)
        read_request(message.SerializeToString(), header_cap=100)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (field(5, b"") * 3, "the request has more than 2 inputs (limits.max_tensors)"),
        (field(7, b"") * 3, "the request has more than 2 inputs (limits.max_tensors)"),
        (field(6, b"") * 3, "the request asks for more than 2 outputs (limits.max_tensors)"),
    ],
)
def test_number_of_tensors_is_limited(data: bytes, text: str) -> None:
    with refused(ErrorKind.BAD_REQUEST, text):
        read_request(data, tensor_cap=2)


COUNT = 25_000
"""Elements of a message: enough that its memory shows."""


def element_messages() -> list[bytes]:
    count = COUNT
    numbers = field(1, b"x") + field(2, b"INT32") + field(3, count)
    texts = field(1, b"x") + field(2, b"BYTES") + field(3, count)
    return [
        field(5, numbers + field(5, field(2, b"\x01" * count))),
        field(5, numbers + field(5, field(2, 1) * count)),
        field(5, numbers + field(5, field(2, b"\x01") * count)),
        field(5, texts + field(5, field(8, b"") * count)),
        field(5, numbers + field(5, field(2, b"\x01")) * count),
    ]


@pytest.mark.parametrize("data", element_messages())
def test_memory_is_a_small_multiple_of_the_message(data: bytes) -> None:
    tracemalloc.start()
    try:
        found = read_request(data, header_cap=1 << 24)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * len(data) + 1_000_000
    assert found.request.data_size == 4 * COUNT


def test_lie_about_the_shape_allocates_nothing() -> None:
    entry = field(1, b"x") + field(2, b"INT64") + field(3, 2**40)
    data = field(5, entry + field(5, field(3, b"\x01" * 1000)))
    tracemalloc.start()
    try:
        text = error_of(data).message
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert text == (
        "input 'x': shape [1099511627776] takes 1099511627776 elements, int64_contents has 1000"
    )
    assert peak < 100_000


def test_head_knows_about_what_memory_it_takes() -> None:
    message = tensor_message()
    for number in range(1000):
        message.parameters[f"{number}"].bool_param = True
    data = with_raw(message, bytes(8)).SerializeToString()
    read_request(data + field(4, b""))  # fills caches that are shared
    tracemalloc.start()
    try:
        found = read_request(data)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used / 2 < found.request.head.memory < 6 * used
