"""The fast path for responses gives the same result as the streaming path."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given

from gateway.codec.policies import JsonPolicies
from gateway.codec.v2.buffered_response import write_json_fast
from gateway.codec.v2.response import json_converter
from gateway.errors import GatewayError
from tests.codec import strategies
from tests.codec.reference import DTYPES
from tests.codec.strategies import output, response_body


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
    body, size = response_body([output("y", datatype, [2, 2], values(datatype))])
    written = write_json_fast(body, size)
    assert written is not None
    assert written == streaming_result(body, size)
    shown = [False, True, True, True] if datatype == "BOOL" else [0, 1, 2, 3]
    assert json.loads(written[0])["outputs"][0]["data"] == shown
    assert written[1] == 4


def test_fast_path_converts_several_outputs() -> None:
    outputs = [output(name, name, [4], values(name)) for name in DTYPES]
    body, size = response_body(outputs, {"id": "i", "parameters": {"a": [1]}})
    written = write_json_fast(body, size)
    assert written is not None
    assert written == streaming_result(body, size)


@pytest.mark.parametrize("header", [b'{"id":"7","outputs":[]}', b'{"outputs":[]}'])
def test_response_without_outputs_is_the_same_on_both_paths(header: bytes) -> None:
    assert fast_path_agrees(header, len(header))
    assert streaming_result(header, len(header)) == (header, 0)


def test_responses_have_their_own_ids() -> None:
    for response_id in ("a", "b", "", 'q"', "é"):
        body, size = response_body([output("y", "INT8", [1], b"\1")], {"id": response_id})
        written = write_json_fast(body, size)
        if written is not None:
            assert json.loads(written[0])["id"] == response_id
        assert fast_path_agrees(body, size)


def test_fast_path_leaves_invalid_booleans() -> None:
    body, size = response_body([output("y", "BOOL", [2], b"\1\2")])
    assert write_json_fast(body, size) is None


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_fast_path_leaves_values_under_a_policy(datatype: str, value: float) -> None:
    data = np.array([1, value]).astype(DTYPES[datatype]).tobytes()
    body, size = response_body([output("y", datatype, [2], data)])
    assert write_json_fast(body, size) is None


def test_fast_path_leaves_broken_responses() -> None:
    body, size = response_body([output("y", "FP32", [4], values("FP32"))])
    assert write_json_fast(body[:-1], size) is None
    assert write_json_fast(body + b"\0", size) is None
    assert write_json_fast(body, size - 1) is None
    assert write_json_fast(body, 0) is None
    assert write_json_fast(b"", 0) is None
    empty, size = response_body([output("y", "FP32", [0], b"")])
    assert write_json_fast(empty, size) is None


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


def test_plan_cache_does_not_leak_numbers_into_the_next_response() -> None:
    answers = [
        response_body([output("y", "INT32", [1], number.to_bytes(4, "little"))])
        for number in range(100)
    ]
    assert len({write_json_fast(*answer) for answer in answers}) == 100
