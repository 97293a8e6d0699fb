"""Tensors that an operator describes; each error names what is wrong."""

import base64
import json
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from pydantic import ValidationError

from gateway.admin.try_it.inputs import MAX_DATA, Call, make_request
from gateway.codec.elements.bytes_elements import pack_elements, split_elements
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.datatypes import DATATYPES, Family
from gateway.protocol.messages import InferRequest
from gateway.protocol.tensors import MAX_TENSORS
from tests.admin.try_it.trying import VALUES
from tests.codec.reference import DTYPES

each_datatype = pytest.mark.parametrize("datatype", DATATYPES)


def _tensor(**fields: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "FP32", "shape": [2]} | fields


def _request(inputs: Any, outputs: Any = ()) -> InferRequest:
    """Make a request of a call, which comes as JSON."""
    text = json.dumps({"form": "json", "model": "m", "inputs": inputs, "outputs": [*outputs]})
    call = Call.model_validate_json(text, strict=True)
    return make_request(call.inputs, call.outputs)


def _data(*inputs: object) -> list[bytes]:
    request = _request(inputs)
    return [b"".join(each) for each in request.tensors if not isinstance(each, int)]


def _packed(datatype: str, values: list[Any]) -> bytes:
    if datatype == "BYTES":
        return pack_elements([each.encode() for each in values])
    return np.array(values, DTYPES[datatype]).tobytes()


def test_table_has_all_datatypes() -> None:
    assert VALUES.keys() == DATATYPES.keys()


@each_datatype
def test_values_and_bytes_become_the_same_tensor(datatype: str) -> None:
    values = VALUES[datatype]
    expected = _packed(datatype, values)
    encoded = base64.b64encode(expected).decode()
    sources = (
        {"shape": [2], "values": values},
        {"shape": [1, 2], "values": [values]},
        {"shape": [1, 2], "values": values},
        {"shape": [2], "bytes": encoded},
    )
    for source in sources:
        tensor = _tensor(datatype=datatype, **source)
        request = _request([tensor], ["y"])
        (described,) = request.head.inputs
        assert (described.name, described.datatype.name) == ("x", datatype)
        assert list(described.shape) == source["shape"]
        assert described.binary_size == len(expected)
        assert [each.name for each in request.head.outputs] == ["y"]
        assert _data(tensor) == [expected]


@each_datatype
@pytest.mark.parametrize("shape", [[], [0], [3, 0], [2, 150]], ids=str)
def test_fill_makes_as_many_elements_as_the_shape_has(datatype: str, shape: list[int]) -> None:
    count = int(np.prod(shape))
    kind = DATATYPES[datatype]
    zeros, ones, some = _data(
        *(
            _tensor(name=fill, datatype=datatype, shape=shape, fill=fill)
            for fill in ("zeros", "ones", "random")
        )
    )
    if kind.dtype is None:
        assert split_elements(zeros, 0)[0] == [b"0"] * count
        assert split_elements(ones, 0)[0] == [b"1"] * count
        assert len(split_elements(some, 0)[0]) == count
        return
    dtype = DTYPES[datatype]
    assert (zeros, ones) == (np.zeros(count, dtype).tobytes(), np.ones(count, dtype).tobytes())
    numbers = np.frombuffer(some, dtype)
    assert len(numbers) == count
    assert np.isfinite(numbers.astype(np.float64)).all()
    if count > 1:
        assert len(set(numbers.tolist())) > 1
    if kind.family is Family.INTEGER:
        assert not count or 0 <= int(numbers.min()) <= int(numbers.max()) < 100


def test_sources_can_be_mixed() -> None:
    assert _data(
        _tensor(name="a", values=[1, 2]),
        _tensor(name="b", fill="ones"),
        _tensor(name="c", values=[3, 4]),
        _tensor(name="d", bytes=base64.b64encode(bytes(8)).decode()),
    ) == [_packed("FP32", each) for each in ([1, 2], [1, 1], [3, 4], [0, 0])]


def _nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "^inputs: "),
        ([1], r"^inputs\.0: "),
        ([_tensor(fill="ones")] * (MAX_TENSORS + 1), "^inputs: .* 1024"),
        ([_tensor()], r"^inputs\.0: .*expected one of fill, values, bytes"),
        ([_tensor(fill="ones", values=[])], r"^inputs\.0: .*expected one of"),
        ([_tensor(fill="ones"), {}], r"^inputs\.1\."),
        ([_tensor(fill="twos")], r"^inputs\.0\.fill: .*'random', 'zeros' or 'ones'"),
        ([_tensor(fill="ones", shape="2")], r"^inputs\.0\.shape"),
        ([_tensor(fill="ones", shape=[-1])], r"^inputs\.0\.shape\.0"),
        ([_tensor(fill="ones", shape=[True])], r"^inputs\.0\.shape\.0"),
        ([_tensor(fill="ones", datatype="FP8")], r"^inputs\.0\.datatype: .*expected one of BOOL"),
        ([_tensor(bytes="?")], r"^inputs\.0\.bytes"),
        ([_tensor(bytes=[1])], r"^inputs\.0\.bytes: .*expected base64"),
        ([_tensor(name=1, values=[1, 2])], r"^inputs\.0\.name"),
        ([_tensor(values=_nested(300))], "recursion limit"),
    ],
    ids=range(15),
)
def test_description_that_is_wrong_is_named(inputs: object, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        _request(inputs)
    first = caught.value.errors()[0]
    assert re.search(words, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([_tensor(fill="ones", shape=[1] * 100)], "x.*dimensions"),
        ([_tensor(bytes="AAAA")], "x.*3"),
        ([_tensor(datatype="BYTES", bytes="/////w==", shape=[1])], "'x': bytes: expected 1 elem"),
        ([_tensor(values=[1])], "x"),
        ([_tensor(values=[1, "a"])], "x"),
        ([_tensor(datatype="INT64", values=[1, 2**70])], "x"),
        ([_tensor(values=5)], "x"),
        ([_tensor(values=_nested(100))], "deep|nest|depth|x"),
        ([_tensor(datatype="INT8", values=[1, 128])], "x"),
        ([_tensor(datatype="BYTES", bytes="AQAAAGE=")], "input 'x': bytes: expected 2 elements"),
        ([_tensor(fill="ones", shape=[2**40, 2**40])], "all tensors together may have 8 MiB"),
        ([_tensor(fill="ones", datatype="BYTES", shape=[200_000])], "all tensors together"),
        (
            [_tensor(name=n, fill="ones", shape=[MAX_DATA // 8 + 1]) for n in "ab"],
            "inputs: all tensors together may have 8 MiB",
        ),
        (
            [_tensor(datatype="FP64", values=[0] * (MAX_DATA // 8 + 1), shape=[MAX_DATA // 8 + 1])],
            "inputs: all tensors together may have 8 MiB",
        ),
    ],
    ids=range(14),
)
def test_error_names_what_is_wrong(inputs: object, words: str) -> None:
    with pytest.raises(GatewayError) as caught:
        _request(inputs)
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    assert re.search(words, str(caught.value)), str(caught.value)
    assert len(str(caught.value)) < 1000


def test_tensors_may_have_all_that_is_allowed() -> None:
    shape = [MAX_DATA // 4]
    assert [len(each) for each in _data(_tensor(fill="ones", shape=shape))] == [MAX_DATA]


def test_request_may_end_with_a_window_of_its_reader() -> None:
    text = json.dumps({"inputs": [_tensor(name="", data=[1, 2])]})
    name = "x" * (128 * 1024 - len(text))
    request = _request([_tensor(name=name, values=[1, 2])])
    assert request.head.inputs[0].name == name


def test_bf16_is_rounded_as_for_clients() -> None:
    (data,) = _data(_tensor(datatype="BF16", values=[0.1, 3.14159]))
    assert data == np.array([0.1, 3.14159], ml_dtypes.bfloat16).tobytes()
