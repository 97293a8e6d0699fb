from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

from gateway.codec.v1 import nested_reader as v1_values
from gateway.codec.v1 import request as v1_request
from gateway.codec.v1.request import PredictRequestReader
from gateway.errors import ErrorKind, GatewayError
from tests.codec.reference import pack_bytes
from tests.codec.reference_v1 import Declared, convert_predict
from tests.codec.strategies_v1 import model
from tests.codec.v1.predict_requests import TEXT, TWO, X, as_plain, convert

LARGE: dict[str, Callable[[], tuple[dict[str, Any], Declared]]] = {
    "numbers": lambda: (
        {"instances": np.arange(15_000).reshape(50, 3, 100).tolist()},
        {"x": ("INT32", [-1, 3, 100])},
    ),
    "small objects": lambda: (
        {"instances": [{"a": [i / 7, i], "b": i} for i in range(9_000)]},
        TWO,
    ),
    "large objects": lambda: (
        {"instances": [{"a": [i / 7 for i in range(20_000)], "b": n} for n in range(3)]},
        TWO,
    ),
    "objects with NaN": lambda: (
        {"instances": [{"x": float("nan") if i % 7 else i / 3} for i in range(9000)]},
        X,
    ),
    "long strings": lambda: ({"instances": ["é\\" * 50_000, "", "b" * 99_999]}, TEXT),
    "long strings in objects": lambda: (
        {"instances": [{"t": "é\\" * 50_000}, {"t": ""}, {"t": '"' * 99_999}]},
        TEXT,
    ),
    "long base64": lambda: (
        {
            "instances": [
                {"b64": base64.b64encode(bytes(range(250)) * n).decode()} for n in (900, 1)
            ]
        },
        TEXT,
    ),
    "many in base64": lambda: (
        {"inputs": {"t": [{"b64": "aGVsbG8="}] * 9000}},
        TEXT,
    ),
    "much beside it": lambda: (
        {**{f"k{i}": list(range(99)) for i in range(60)}, "other": ["]" * 90_000], "inputs": [1]},
        X,
    ),
}


@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
def test_values_larger_than_a_window_are_converted(
    make: Callable[[], tuple[dict[str, Any], Declared]],
) -> None:
    fields, declared = make()
    body = json.dumps(fields).encode()
    expected = convert_predict(body, declared)
    for pieces in (
        [body],
        [body[i : i + 4999] for i in range(0, len(body), 4999)],
    ):
        request = convert(pieces, declared, header_cap=200_000)
        np.testing.assert_equal(as_plain(request, declared), expected)


@pytest.mark.parametrize("value", ["b", {"b64": "Yg=="}])
def test_many_small_elements_become_few_chunks(value: Any) -> None:
    # The first element has all others read one by one.
    body = json.dumps({"inputs": [{"b64": "YQ=="}, *[value] * 9000]}).encode()
    request, _ = convert([body], TEXT)
    assert b"".join(request.chunks) == pack_bytes([b"a", *[b"b"] * 9000])
    assert len(request.chunks) < 1100


def test_conversion_pauses_between_time_slices() -> None:
    """No step is larger than a window, however much text is available at once."""
    fields, declared = LARGE["small objects"]()
    body = json.dumps(fields).encode()
    codec = PredictRequestReader(model(declared), 1000, 64)
    codec.feed(body, last=True)
    shares = 1
    while codec.step():
        shares += 1
    assert shares >= len(body) / v1_request._ROWS_WINDOW
    assert 0 < codec.buffered_bytes - 9_000 * (8 + 8) < 20_000


def test_more_members_than_the_cap_are_refused() -> None:
    def body(count: int) -> bytes:
        return json.dumps({"instances": [1], **{f"k{i}": i for i in range(count - 1)}}).encode()

    assert convert([body(64)], X)
    with pytest.raises(GatewayError) as caught:
        convert([body(65)], X)
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    assert caught.value.message == "the request has more than 64 members"


@pytest.mark.parametrize(
    "element", ['"{"', '{"b64":"QQ"}', '"a",{"b64":"QQ"}', '["a"],[{"b64":""}]']
)
def test_elements_are_converted_together(element: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = mock.Mock(wraps=v1_values._read_element)
    monkeypatch.setattr(v1_values, "_read_element", read)
    count = 9000
    body = '{"inputs":[' + ",".join([element] * count) + "]}"
    shape = [-1, -1] if element.startswith("[") else [-1]
    request = convert([body.encode()], {"t": ("BYTES", shape)})
    assert as_plain(request, {"t": ("BYTES", shape)})
    assert read.call_count < 9


@pytest.mark.parametrize("fault", ['{"x":"a"}', '{"y":1}', "1", '{"x":[[1]]}'])
def test_few_instances_before_an_invalid_one_are_read_one_by_one(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = mock.Mock(wraps=v1_values.read_members)
    monkeypatch.setattr(v1_request, "read_members", read)
    for before in (1, 7, 8, 9, 1000, 3000):
        read.reset_mock()
        body = '{"instances":[' + '{"x":1},' * before + fault + "," + '{"x":1},' * 999
        with pytest.raises(GatewayError) as caught:
            convert([body.encode()], X, depth_cap=1)
        number = f"[{before}]" if "x" not in fault else f"element {before}"
        assert number in caught.value.message or "deeper than 1" in caught.value.message
        assert read.call_count < 20


def test_too_deep_instances_are_refused_beside_shallow_ones() -> None:
    row, deep = '{"x":[1]},', '{"x":[[1]]},'
    body = '{"instances":[' + row * 20 + deep + row * 20 + '{"x":"a"}]}'
    with pytest.raises(GatewayError, match="nested deeper than 1"):
        convert([body.encode()], {"x": ("FP32", [-1, -1])}, depth_cap=1)
