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
