"""Each datatype is one row of one table: every codec converts or refuses a new one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from gateway.codec.v2.buffered_response import write_json_fast
from gateway.codec.v2.request import read_json_fast
from gateway.codec.v2.response_reader import read_without_data
from gateway.errors import ErrorKind
from gateway.protocol.datatypes import (
    DATATYPES,
    Datatype,
    FloatFormat,
    float_datatype,
    integer_datatype,
)
from gateway.protocol.v1 import V1Format, V1ResponseLayout
from tests.codec.strategies import output, response_body
from tests.codec.v1 import predict_responses
from tests.codec.v2.conversions import Converted, Failed, as_json, convert_response, converted

NEW = [
    float_datatype("FLOAT16", "<f2", FloatFormat(10, -14, 65520.0)),
    integer_datatype("INTEGER8", "<i1"),
]
VALUES = [1, 2, 3]


@pytest.fixture(params=NEW, ids=lambda datatype: datatype.name)
def new(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Datatype]:
    datatype: Datatype = request.param
    monkeypatch.setitem(DATATYPES, datatype.name, datatype)
    yield datatype
    # Compiled functions do not tell their globals.
    for function, cached in (
        (read_json_fast, "_cached_parse"),
        (read_without_data, "_read_without_data"),
    ):
        getattr(sys.modules[function.__module__], cached).cache_clear()


def packed(datatype: Datatype, values: list[int] = VALUES) -> bytes:
    return np.array(values).astype(datatype.dtype).tobytes()


def json_request(name: str, data: str) -> bytes:
    entry = json.dumps({"name": "x", "datatype": name, "shape": [3]})[:-1]
    return f'{{"inputs":[{entry},"data":{data}}}]}}'.encode()


def test_json_of_a_new_datatype_is_converted(new: Datatype) -> None:
    body = json_request(new.name, "[1,[2,3]]")
    assert converted(body).tensors == [packed(new)]
    small = read_json_fast(body, 64)
    assert small is not None
    assert b"".join(small.chunks) == packed(new)


def test_responses_of_a_new_datatype_are_converted(new: Datatype) -> None:
    body, size = response_body([output("y", new.name, [3], packed(new))])
    text = as_json([body], size)
    assert isinstance(text, bytes)
    assert json.loads(text)["outputs"][0]["data"] == VALUES
    assert write_json_fast(body, size) == (text, len(VALUES))
    predicted = predict_responses.convert([body], size, V1ResponseLayout(V1Format.ROWS))
    assert json.loads(predicted) == {"predictions": VALUES}
    in_json = {"outputs": [{"name": "y", "datatype": new.name, "shape": [3], "data": VALUES}]}
    found = convert_response([json.dumps(in_json).encode()])
    assert isinstance(found, Converted)
    assert found.tensors == packed(new)
    in_json["outputs"][0]["data"] = [1, "a", 10**9]
    failed = convert_response([json.dumps(in_json).encode()])
    assert isinstance(failed, Failed)
    assert failed.kind is ErrorKind.BAD_RESPONSE
