"""The memory that codecs report is what tracemalloc measures, wherever a body is cut off."""

from __future__ import annotations

import gc
import random
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import orjson
import pytest

from gateway.codec.policies import JsonPolicies
from gateway.codec.v1.request import PredictRequestReader
from gateway.codec.v1.response import predict_converter
from gateway.codec.v2.json_reader import JsonMessageReader
from gateway.codec.v2.request import InferRequestReader
from gateway.codec.v2.response import ResponseConverter, ResponseEncoder, json_converter
from gateway.protocol.messages import OutputEncoding
from gateway.protocol.v1 import V1Format, V1ResponseLayout
from tests.codec.reference_v1 import Declared
from tests.codec.strategies_v1 import model
from tests.support.scale import scaled

CAP = 1 << 24
PIECE = 8 * 1024
SLACK = 16 * 1024
"""Bytes that nobody counts: a codec's own objects, and the current window."""
MAX_UNREPORTED = 1.5
"""The most that memory may exceed the report: allocators round up, dicts grow."""
MAX_OVERREPORTED = 2.0
"""The most that the report may exceed memory: parsed JSON is estimated at 1 to 2 times its size."""


Codec = JsonMessageReader | PredictRequestReader | ResponseEncoder | ResponseConverter


def entry(
    name: str, datatype: str, shape: list[int], data: bytes | None, first: bool = False, **more: Any
) -> bytes:
    """Write a tensor with its data first or last, or without data."""
    fields = orjson.dumps({"name": name, "datatype": datatype, "shape": shape, **more})
    if data is None:
        return fields
    if first:
        return b'{"data":' + data + b"," + fields[1:]
    return fields[:-1] + b',"data":' + data + b"}"


def message(key: bytes, tensors: list[bytes], **more: Any) -> bytes:
    others = orjson.dumps(more)[1:-1]
    return (
        b'{"' + key + b'":[' + b",".join(tensors) + b"]" + (b"," + others if more else b"") + b"}"
    )


def floats(rng: random.Random, count: int) -> bytes:
    return orjson.dumps([rng.random() for _ in range(count)])


def strings(rng: random.Random, count: int, longest: int = 12) -> bytes:
    return orjson.dumps(["s" * rng.randrange(longest) for _ in range(count)])


def random_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(8 if depth else 5)
    if kind < 5:
        return (rng.randrange(10**9), "x" * rng.randrange(40), rng.random(), True, "")[kind]
    if kind < 7:
        return [random_value(rng, depth - 1) for _ in range(rng.randrange(6))]
    return {f"k{rng.randrange(99)}": random_value(rng, depth - 1) for _ in range(rng.randrange(7))}


def tensors(rng: random.Random) -> dict[str, bytes]:
    """Write tensors of every kind, each of some ten or hundred kilobytes."""
    return {
        "floats": entry("a", "FP32", [10_000], floats(rng, 10_000)),
        "floats before their datatype": entry("a", "FP32", [20_000], floats(rng, 20_000), True),
        "strings": entry("a", "BYTES", [10_000], strings(rng, 10_000)),
        "a long string": entry("a", "BYTES", [2], orjson.dumps(["l" * 100_000, "s"])),
        "an escaped string": entry("a", "BYTES", [1], b'["' + b"\\u0041" * 15_000 + b'"]'),
    }


def requests() -> dict[str, bytes]:
    rng = random.Random(7)
    bodies = {name: message(b"inputs", [tensor] * 2) for name, tensor in tensors(rng).items()}
    base64: Any = {"parameters": {"content_type": "base64"}}
    encoded = orjson.dumps(["QUJD" * 5] * 5000)
    return bodies | {
        "many floats": message(b"inputs", [entry("x", "FP32", [1], b"[1.5]")] * 400),
        "many strings": message(b"inputs", [entry("x", "BYTES", [1], b'["a"]')] * 400),
        "many before their datatype": message(
            b"inputs", [entry("x", "FP32", [1], b"[1]", True)] * 900
        ),
        "many binary": message(
            b"inputs", [entry("x", "INT8", [1], None, parameters={"binary_data_size": 1})] * 900
        ),
        "base64": message(b"inputs", [entry("x", "BYTES", [5000], encoded, **base64)]),
        "an id": message(b"inputs", [], id="a" * 150_000),
        "empty objects": message(b"inputs", [], parameters={"x": [{}] * 15_000}),
        "junk": message(
            b"inputs", [], parameters={"x": [random_value(rng, 4) for _ in range(5000)]}
        ),
    }


REQUESTS = requests()


def measure(make: Callable[[], Codec], pieces: list[bytes], ends: bool) -> tuple[int, int]:
    """Return the bytes that a codec reports for some pieces, and the memory that it uses."""
    gc.collect()
    tracemalloc.start()
    try:
        codec = make()
        feed(codec, pieces, ends)
        gc.collect()
        return codec.buffered_bytes, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def feed(codec: Codec, pieces: list[bytes], ends: bool) -> None:
    if isinstance(codec, ResponseConverter):
        for piece in pieces:
            codec.text(piece)
        return
    for piece in pieces:
        codec.feed(piece)
        run_steps(codec)
    if ends:
        codec.feed(b"", last=True)
        run_steps(codec)


def run_steps(codec: JsonMessageReader | PredictRequestReader | ResponseEncoder) -> None:
    while codec.step():
        pass


def check_report(make: Callable[[], Codec], body: bytes) -> None:
    rng = random.Random(len(body))
    feed(make(), [body], ends=True)  # fills caches first
    for size in [*(rng.randrange(len(body)) for _ in range(scaled(3))), len(body)]:
        pieces = [body[start : min(start + PIECE, size)] for start in range(0, size, PIECE)]
        held, memory = measure(make, pieces, ends=size == len(body))
        assert memory <= held * MAX_UNREPORTED + SLACK, (size, held, memory)
        assert held <= memory * MAX_OVERREPORTED + SLACK, (size, held, memory)


@pytest.mark.parametrize("kind", REQUESTS)
def test_infer_request_reports_its_memory(kind: str) -> None:
    check_report(lambda: InferRequestReader(CAP, 64), REQUESTS[kind])


def test_endless_header_is_counted() -> None:
    codec = InferRequestReader(CAP, 64)
    codec.feed(b'{"id":"' + b"a" * 1_000_000)
    assert 1_000_000 < codec.buffered_bytes < 1_200_000


ANSWERS = {
    kind: text.replace(b'{"inputs"', b'{"outputs"', 1)
    for kind, text in REQUESTS.items()
    if kind not in ("many binary",)
}


BINARY_FORM, JSON_FORM = OutputEncoding(True, {}), OutputEncoding(False, {})
# What stays JSON is buffered as text, whatever it is.
STAYING = ("floats", "strings", "a long string", "many strings", "base64", "junk")


@pytest.mark.parametrize(
    ("kind", "form"),
    [*((kind, BINARY_FORM) for kind in ANSWERS), *((kind, JSON_FORM) for kind in STAYING)],
)
def test_binary_response_converter_reports_its_memory(kind: str, form: OutputEncoding) -> None:
    policies = JsonPolicies(as_base64=frozenset("x"))
    check_report(lambda: ResponseEncoder(None, form, policies, CAP, CAP), ANSWERS[kind])


@pytest.mark.parametrize("kind", ["floats", "strings", "many floats", "junk"])
def test_mixed_response_reports_its_memory(kind: str) -> None:
    header = ANSWERS[kind]
    behind = entry("b", "INT8", [75_000], None, parameters={"binary_data_size": 75_000})
    header = header.replace(b'"outputs":[', b'"outputs":[' + behind + b",", 1)
    if kind == "junk":
        header = header.replace(b",]", b"]", 1)
    for form in (BINARY_FORM, JSON_FORM):
        policies = JsonPolicies()
        check_report(
            lambda: ResponseEncoder(len(header), form, policies, CAP, CAP),  # noqa: B023
            header + bytes(75_000),
        )


def binary_response(outputs: int, rows: int, **more: Any) -> tuple[bytes, int]:
    size: Any = {"parameters": {"binary_data_size": 8 * rows}}
    entries = [entry(f"y{i}", "FP32", [rows, 2], None, **size) for i in range(outputs)]
    header = message(b"outputs", entries, **more)
    return header + bytes(8 * rows * outputs), len(header)


BINARY = {
    "one output": binary_response(1, 22_000),
    "many outputs": binary_response(900, 40),
    "a large header": binary_response(1, 9, parameters={"x": [{"a": [1]}] * 10_000}),
    "a long id": binary_response(1, 9, id="a" * 150_000),
}


@pytest.mark.parametrize("kind", BINARY)
def test_json_response_converter_reports_its_memory(kind: str) -> None:
    body, size = BINARY[kind]
    check_report(lambda: json_converter(size, JsonPolicies(), CAP, CAP), body)
    for form in V1Format:
        check_report(
            lambda: predict_converter(size, V1ResponseLayout(form), JsonPolicies(), CAP, CAP),  # noqa: B023
            body,
        )


TEXT_ROWS = entry("t", "BYTES", [5000], None, parameters={"binary_data_size": 5000 * 7})


def test_buffered_rows_report_their_memory() -> None:
    other = entry("u", "BYTES", [5000], None, parameters={"binary_data_size": 5000 * 7})
    header = message(b"outputs", [TEXT_ROWS, other])
    body = header + b"\3\0\0\0abc" * 10_000
    predicted = V1ResponseLayout(V1Format.ROWS)
    check_report(lambda: predict_converter(len(header), predicted, JsonPolicies(), CAP, CAP), body)


TEXT: Declared = {"t": ("BYTES", [-1])}
TWO: Declared = {"x": ("FP32", [-1]), "t": ("BYTES", [-1])}


def v1_requests() -> dict[str, tuple[Declared, bytes]]:
    rng = random.Random(7)
    rows = [{"x": rng.random(), "t": "s" * rng.randrange(9)} for _ in range(5000)]
    base64 = [{"b64": "QUJD"} for _ in range(8000)]
    fields: dict[str, tuple[Declared, Any]] = {
        "strings": (TEXT, {"instances": ["s" * rng.randrange(9) for _ in range(10_000)]}),
        "base64": (TEXT, {"instances": base64}),
        "a long string": (TEXT, {"inputs": ["l" * 120_000]}),
        "objects": (TWO, {"instances": rows}),
        "columns": (TWO, {"inputs": {"x": [0.5] * 10_000, "t": ["abc"] * 10_000}}),
    }
    return {name: (declared, orjson.dumps(value)) for name, (declared, value) in fields.items()}


V1_REQUESTS = v1_requests()


@pytest.mark.parametrize("kind", V1_REQUESTS)
def test_predict_request_reports_its_memory(kind: str) -> None:
    declared, body = V1_REQUESTS[kind]
    check_report(lambda: PredictRequestReader(model(declared), CAP, 64), body)


def count_calls(read: Callable[[], int]) -> int:
    """Count the calls that reading a property makes."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        read()
    finally:
        sys.setprofile(None)
    return calls


def test_reading_buffered_bytes_does_not_visit_each_tensor() -> None:
    def infer(count: int) -> int:
        codec = InferRequestReader(CAP, 64)
        codec.feed(message(b"inputs", [entry("x", "FP32", [1], b"[1.5]")] * count))
        run_steps(codec)
        return count_calls(lambda: codec.buffered_bytes)

    def predict(count: int) -> int:
        codec = PredictRequestReader(
            model({f"x{i}": ("FP32", [-1]) for i in range(count)}), CAP, 64
        )
        return count_calls(lambda: codec.buffered_bytes)

    def rows(count: int) -> int:
        body, size = binary_response(count, 40)
        codec = predict_converter(size, V1ResponseLayout(V1Format.ROWS), JsonPolicies(), CAP, CAP)
        codec.text(body)
        return count_calls(lambda: codec.buffered_bytes)

    for calls in (infer, predict, rows):
        assert calls(900) == calls(3)
