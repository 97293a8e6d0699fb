"""The fast path for requests gives the same result as the streaming path."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.build_info import NATIVE
from gateway.codec.v2.request import read_buffered_binary, read_json_fast
from gateway.protocol.datatypes import DATATYPES
from tests.codec import strategies
from tests.codec.reference import FLOATS
from tests.codec.v2.conversions import DEPTH_CAP, Accepted, accepted, outcome


def fast_result(body: bytes) -> Accepted | None:
    request = read_json_fast(body, DEPTH_CAP)
    return None if request is None else accepted(request)


def streaming_result(body: bytes) -> Accepted | None:
    found = outcome([body])
    return found if isinstance(found, Accepted) and not found.missing_size else None


def fast_path_agrees(body: bytes) -> bool:
    """Tell whether the fast path agrees with the streaming path, or leaves the request to it."""
    found = fast_result(body)
    return found is None or found == streaming_result(body)


def entry(datatype: str, data: Any, shape: list[int] | None = None) -> dict[str, Any]:
    return {"name": "x", "datatype": datatype, "shape": shape or [len(data)], "data": data}


def request(*inputs: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **fields}).encode()


INTEGERS = {name: each.integers for name, each in DATATYPES.items() if each.integers}


@pytest.mark.parametrize(
    "body",
    [
        request(entry("FP32", [[1, 2], [3, 4]], [2, 2]), id="a"),
        request(entry("INT32", [1, 2]), entry("FP64", [0.5]) | {"name": "y"}),
        request(entry("BOOL", [[True], [False]], [2, 1])),
        request(entry("FP32", [1.0]), parameters={"binary_data_output": True}),
        request(entry("FP32", [1.0]), parameters={"id": "a"}),
        json.dumps({"inputs": [entry("FP32", [1.5, 2])]}, indent=2).encode(),
        *(request(entry(name, [each.least, each.most, 0])) for name, each in INTEGERS.items()),
        *(request(entry(datatype, [-1.5, 0.1, float("nan")])) for datatype in FLOATS),
        request(entry("FP32", [[], 1, [2]], [2])),
        request(entry("BYTES", ['a\n"\\é😀', "", "x" * 999]), id="7"),
        request(entry("BYTES", [["[", "]"], ['"data":["x"]', "\\"]], [2, 2])),
        request(entry("INT32", [5]), entry("BYTES", ["a", "b"]) | {"name": "y"}),
        b'{"inputs":[{"data":[1,2],"shape":[2],"datatype":"INT8","name":"x"}],"more":{"a":[1]}}',
    ],
)
def test_fast_path_converts_plain_requests(body: bytes) -> None:
    assert fast_result(body) is not None
    assert fast_path_agrees(body)


@pytest.mark.parametrize(
    "body",
    [
        request(entry("BYTES", ["YQ=="]) | {"parameters": {"content_type": "base64"}}),
        request(entry("BOOL", [1])),
        request(entry("FP32", [1e39])),
        request(entry("FP32", [None])),
        request(entry("FP32", [1], [2])),
        request(entry("UINT8", [256])),
        request(entry("NO32", [1])),
        request(entry("FP32", [1]), id=1),
        request(entry("FP32", [1]), outputs=[{"name": "y", "parameters": {"classification": 1}}]),
        request(entry("FP32", [1], [10**9])),
        request(
            {"name": "x", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}
        ),
        b'{"inputs":[{"name":"x","datatype":"INT8","shape":[1],"data":[1],"data":[2]}]}',
        b'{"inputs":[{"name":"x","datatype":"INT8","shape":[1],"data":[1],"d\\u0061ta":[2]}]}',
        b'{"inputs":[{"name":"x","datatype":"INT8","datatype":"FP32","shape":[1],"data":[1]}]}',
        b'{"inputs":[{"name":"x","datatype":"INT8","shape":[1],"data":[1]}],"data":[1]}',
        b'{"inputs":[{"name":"x","datatype":"INT8","shape":[1],"data":[01]}]}',
        b'{"inputs":[{"name":"x","datatype":"INT8","shape":[1],"data":[1]}]',
        request(entry("BYTES", ["a"], [2])),
        request(entry("BYTES", ["a", 1])),
        request(entry("BYTES", [[[[[[[[[[[[["a"]]]]]]]]]]]]], [1])),
        *(request(entry("BYTES", ["@"])).replace(b"@", bad) for bad in (b"\xff", b"\\ud800")),
        request(entry("BYTES", ["@"])).replace(b'"@"', b'"a" "b"'),
        request(entry("FP32", [1]), deep=[[[[[[[[[[[[[[1]]]]]]]]]]]]]]),
    ],
)
def test_fast_path_leaves_unusual_requests(body: bytes) -> None:
    assert fast_result(body) is None


@pytest.mark.parametrize("depth", [1, DEPTH_CAP, DEPTH_CAP + 1, 100, 2000])
def test_fast_path_respects_the_depth_cap(depth: int) -> None:
    nested = b"[" * depth + b"1" + b"]" * depth
    body = request(entry("FP32", [1])).replace(b'"data": [1]', b'"data": ' + nested)
    assert fast_result(body) == streaming_result(body)


@strategies.LAW
@given(strategies.request_bodies(), strategies.SEEDS)
def test_fast_path_agrees_with_the_streaming_path_on_any_request(body: bytes, seed: int) -> None:
    assert fast_path_agrees(body)
    assert fast_path_agrees(strategies.mutated(body, seed))


NAMES = st.sampled_from(("data", "id", "datatype", "inputs", "x", ""))


@given(
    st.lists(NAMES, min_size=1, max_size=3, unique=True),
    st.tuples(NAMES, NAMES, NAMES, NAMES),
    st.sampled_from(((",", ":"), (", ", ": "), (" ,\t", " :\n"))),
    st.booleans(),
)
def test_names_that_are_also_keys_take_the_fast_path(
    inputs: list[str], names: tuple[str, str, str, str], separators: tuple[str, str], is_first: bool
) -> None:
    request_id, output, key, value = names
    entries = []
    for name in inputs:
        fields = {"name": name, "parameters": {key: value}}
        rest = entry("FP32", [1.5, 2, 3])
        entries.append({**rest, **fields} if is_first else {**fields, **rest, "name": name})
    message: dict[str, Any] = {"id": request_id, "parameters": {"p": key}}
    message |= {"outputs": [{"name": output}], "inputs": entries}
    body = json.dumps(message, separators=separators).encode()
    assert fast_result(body) == streaming_result(body) is not None


@given(NAMES, st.sampled_from(("data", "id", "datatype", "x")), st.sampled_from((5, "a", [1], {})))
def test_keys_elsewhere_are_read_as_on_the_streaming_path(name: str, key: str, value: Any) -> None:
    tensor = entry("INT8", [1, 2]) | {"name": name}
    member = json.dumps({key: value})[1:-1].encode()
    body = request(tensor)
    for place in (b'"name"', b'"inputs"', b'"data"'):
        assert fast_path_agrees(body.replace(place, member + b"," + place, 1))
    assert fast_path_agrees(request(tensor | {"parameters": {key: value}}))
    assert fast_path_agrees(request(tensor, parameters={key: value}))
    assert fast_path_agrees(request(tensor, more=[{key: value}]))


@pytest.mark.parametrize("name", ["x", "data", "id", "datatype"])
def test_requests_with_other_numbers_and_ids_share_one_plan(name: str) -> None:
    tensor = {"name": name, "datatype": "FP32", "shape": [1]}
    heads = set()
    for number in range(100):
        read = read_json_fast(request(tensor | {"data": [number]}, id=f"{number}"), 12)
        assert read is not None
        assert read.id == str(number)
        if number > 1:  # a full cache takes it at its second use
            heads.add(id(read.head))
    assert len(heads) == 1


@pytest.mark.parametrize(
    "member", [b'"data":%d', b'"data":[%d,"a"]', b'"data":[%d', b'"d\\u0061ta":[%d]']
)
def test_request_without_a_plan_displaces_no_other(member: bytes) -> None:
    def head() -> object:
        read = read_json_fast(request(entry("FP32", [1, 2, 3])), DEPTH_CAP)
        assert read is not None
        return read.head

    before = [head() for _ in range(2)][1]  # a full cache takes it at its second use
    for number in range(5000):
        fields = member % number
        body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],%b}]}' % fields
        assert read_json_fast(body, DEPTH_CAP) is None
    assert head() is before


@pytest.mark.parametrize(("count", "is_taken"), [(200, True), (300, False)])
def test_fast_path_leaves_very_many_inputs(count: int, is_taken: bool) -> None:
    entry = b'{"name":"%d","datatype":"INT8","shape":[1],"data":[1]}'
    body = b'{"inputs":[' + b",".join(entry % number for number in range(count)) + b"]}"
    assert (read_json_fast(body, DEPTH_CAP) is not None) is is_taken


@pytest.mark.parametrize("datatype", ["UINT8", "BYTES"])
@pytest.mark.parametrize(("count", "is_taken"), [(128 * 1024, True), (128 * 1024 + 1, False)])
def test_fast_path_leaves_very_many_elements(datatype: str, count: int, is_taken: bool) -> None:
    data = [1 if datatype == "UINT8" else ""] * (count - 1)
    body = request(entry(datatype, data), entry("FP32", [1.5]) | {"name": "y"})
    assert (fast_result(body) is not None) is is_taken
    assert fast_path_agrees(body)


@pytest.mark.skipif(not NATIVE, reason="the C module is not compiled")
@pytest.mark.parametrize("last", ["1.0", "99999", "null"])
def test_large_body_with_a_wrong_element_never_becomes_python_objects(last: str) -> None:
    data = "12345," * 100_000 + last
    body = b'{"inputs":[{"name":"x","datatype":"INT16","shape":[100001],"data":[%b]}]}'
    body %= data.encode()
    tracemalloc.start()
    try:
        assert read_json_fast(body, DEPTH_CAP) is None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(body)


def test_each_request_of_strings_tells_their_size() -> None:
    for text in ("a", "abc", "a"):
        body = request(entry("BYTES", [text]))
        assert fast_result(body) == streaming_result(body) is not None


@pytest.mark.parametrize(("size", "is_read"), [(8, True), (7, False), (9, False)])
def test_binary_request_is_read_if_its_data_are_there(size: int, is_read: bool) -> None:
    sized = {"name": "x", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}
    header, data = request(sized), bytes(range(size))
    found = read_buffered_binary(header + data, len(header), 1 << 20, DEPTH_CAP, 100)
    assert (found is not None) == is_read
    assert found is None or b"".join(found.chunks) == data
