"""Responses of the generate extension have the members and the order of Triton's."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest

from gateway.codec.generate.response import (
    write_event,
    write_generate_error,
    write_generate_response,
)
from gateway.codec.policies import BytesEncoding, JsonPolicies, Nonfinite
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.messages import InferResponse, InferResponseHead, OutputTensor
from gateway.sizes import ENCODE_CHUNK
from tests.codec.grpc.infer_messages import raw_data

Outputs = dict[str, tuple[str, list[int], Any]]


def write(
    outputs: Outputs,
    request_id: str | None = None,
    parameters: dict[str, Any] | None = None,
    policies: JsonPolicies | None = None,
) -> bytes:
    data = [raw_data(datatype, values) for datatype, _, values in outputs.values()]
    tensors = tuple(
        OutputTensor(name, DATATYPES[datatype], tuple(shape), len(raw))
        for (name, (datatype, shape, _)), raw in zip(outputs.items(), data, strict=True)
    )
    head = InferResponseHead(tensors, "m", "1", parameters or {})
    return b"".join(
        write_generate_response(
            InferResponse(head, request_id),
            [[each] for each in data],
            policies or JsonPolicies(),
            {"hidden": True},
        )
    )


def test_members_are_in_the_order_of_their_names() -> None:
    outputs: Outputs = {
        "text_output": ("BYTES", [1], [b"hi"]),
        "Z": ("INT32", [2], [1, 2]),
        "a": ("BOOL", [1], [True]),
        "é": ("FP32", [1], [0.5]),
    }
    assert (
        write(outputs, "7", {"p": 5, "hidden": False})
        == (
            '{"Z":[1,2],"a":true,"id":"7","model_name":"m","model_version":"1","p":5,'
            '"text_output":"hi","é":0.5}'
        ).encode()
    )


@pytest.mark.parametrize(
    ("shape", "text"),
    [([], b"5"), ([1], b"5"), ([1, 1], b"5"), ([2], b"[5,5]"), ([0], b"[]"), ([1, 0], b"[]")],
)
def test_single_element_has_no_brackets(shape: list[int], text: bytes) -> None:
    values = [5] * int(np.prod(shape, dtype=int))
    assert write({"X": ("INT8", shape, values)}).startswith(b'{"X":' + text + b",")


def test_first_of_several_with_a_name_counts() -> None:
    outputs: Outputs = {"model_name": ("INT8", [1], [5]), "p": ("INT8", [1], [6])}
    assert json.loads(write(outputs, None, {"p": "x", "id": "y"})) == {
        "id": "y",
        "model_name": "m",
        "model_version": "1",
        "p": "x",
    }


def test_output_in_shared_memory_is_left_out() -> None:
    tensors = (
        OutputTensor("A", DATATYPES["INT8"], (1,), None),
        OutputTensor("B", DATATYPES["INT8"], (1,), 1),
    )
    response = InferResponse(InferResponseHead(tensors))
    assert list(write_generate_response(response, [[b"\5"]], JsonPolicies(), {})) == [
        b'{"B":',
        b"5",
        b"}",
    ]


def test_policies_apply() -> None:
    nan: Outputs = {"X": ("FP32", [1], [float("nan")])}
    assert b'"X":NaN' in write(nan)
    assert b'"X":null' in write(nan, policies=JsonPolicies(Nonfinite.NULL))
    blob: Outputs = {"X": ("BYTES", [1], [b"\xff"])}
    with pytest.raises(GatewayError) as failure:
        write(blob)
    assert failure.value.kind is ErrorKind.NOT_ACCEPTABLE
    base64 = JsonPolicies(bytes_encoding=BytesEncoding.BASE64)
    assert b'"X":"/w=="' in write(blob, policies=base64)
    assert b'"X":"/w=="' in write(blob, policies=JsonPolicies(as_base64=frozenset("X")))


@pytest.mark.parametrize("data", [b"", b"\1\0\0\0ab", struct.pack("<II", 0, 0)])
def test_data_that_do_not_fit_the_shape_are_an_error(data: bytes) -> None:
    tensor = OutputTensor("X", DATATYPES["BYTES"], (1,), len(data))
    response = InferResponse(InferResponseHead((tensor,)))
    with pytest.raises(GatewayError) as failure:
        list(write_generate_response(response, [[data]], JsonPolicies(), {}))
    assert failure.value.kind is ErrorKind.BAD_RESPONSE


def test_large_output_is_written_in_pieces() -> None:
    values = list(range(100_000))
    tensor = OutputTensor("X", DATATYPES["INT32"], (len(values),), 4 * len(values))
    response = InferResponse(InferResponseHead((tensor,)))
    data = raw_data("INT32", values)
    pieces = list(write_generate_response(response, [[data]], JsonPolicies(), {}))
    assert json.loads(b"".join(pieces)) == {"X": values}
    assert max(map(len, pieces)) < 3 * ENCODE_CHUNK


def test_events_hold_json_in_one_line() -> None:
    assert write_event((b"{", b"}")) == b"data: {}\n\n"
    error = write_generate_error('größer\n"\u2028')
    assert json.loads(error) == {"error": 'größer\n"\u2028'}
    assert b"\n" not in error
