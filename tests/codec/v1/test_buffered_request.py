"""The fast path for V1 requests gives the same result as the streaming path."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given

from gateway.codec.v1.buffered_request import read_prediction_fast
from gateway.errors import GatewayError
from tests.codec import strategies
from tests.codec.reference_v1 import Declared, PlainPredict
from tests.codec.strategies_v1 import model, predict_requests
from tests.codec.v1.predict_requests import TEXT, TWO, X, as_plain, convert


def fast_result(body: bytes, declared: Declared, depth_cap: int = 64) -> PlainPredict | None:
    request = read_prediction_fast(body, model(declared), depth_cap, "7")
    return None if request is None else as_plain(request, declared)


def streaming_result(body: bytes, declared: Declared) -> PlainPredict | None:
    try:
        return as_plain(convert([body], declared), declared)
    except GatewayError:
        return None


def fast_path_agrees(body: bytes, declared: Declared) -> bool:
    """Tell whether the fast path agrees with the streaming path, or leaves the request to it."""
    found = fast_result(body, declared)
    return found is None or found == streaming_result(body, declared)


@pytest.mark.parametrize("form", ["instances", "inputs"])
@pytest.mark.parametrize(
    ("declared", "data"),
    [
        (X, [1, -0.5, 1e-3]),
        (X, [0.1] * 1000),
        ({"x": ("INT64", [-1, 2])}, [[1, 2], [3, -4]]),
        ({"x": ("UINT8", [-1, 1, 2])}, [[[1, 255]]]),
        ({"x": ("FP64", [2])}, [[0.25, 1]]),
        ({"x": ("BF16", [-1])}, [float("inf"), 257, float("nan")]),
        ({"x": ("BOOL", [-1, 1])}, [[True], [False]]),
    ],
)
def test_fast_path_reads_numbers(declared: Declared, data: Any, form: str) -> None:
    for indent in (None, 1):
        body = json.dumps({form: data}, indent=indent).encode()
        assert fast_path_agrees(body, declared)
        if form == "instances":
            assert fast_result(body, declared) is not None


@pytest.mark.parametrize(
    ("declared", "body"),
    [
        (X, b""),
        (X, b'{"instances":[]}'),
        (X, b'{"instances":[[1],2]}'),
        (X, b'{"instances":' + b"[" * 999 + b"1" + b"]" * 999 + b"}"),
        (X, b'{"instances":[1,true]}'),
        (X, b'{"instances":[1,]}'),
        (X, b'{"instances":[1]'),
        (X, b'{"instances":[1],"inputs":[1]}'),
        (X, b'{"parameters":{},"instances":[1]}'),
        ({"x": ("UINT8", [-1])}, b'{"instances":[256]}'),
        ({"x": ("BOOL", [-1])}, b'{"instances":[1]}'),
        (TEXT, b'{"instances":["a"]}'),
        (TWO, b'{"instances":[1]}'),
    ],
)
def test_fast_path_leaves_unusual_requests(declared: Declared, body: bytes) -> None:
    assert fast_result(body, declared) is None


def test_fast_path_respects_the_depth_cap() -> None:
    body, declared = b'{"instances":[[[1]]]}', {"x": ("FP32", [-1, 1, 1])}
    assert fast_result(body, declared, 4) is not None
    assert fast_result(body, declared, 3) is None


@strategies.LAW
@given(predict_requests(), strategies.SEEDS)
def test_fast_path_agrees_with_the_streaming_path_on_any_request(
    made: tuple[bytes, Declared], seed: int
) -> None:
    body, declared = made
    assert fast_path_agrees(body, declared)
    assert fast_path_agrees(strategies.mutated(body, seed), declared)
