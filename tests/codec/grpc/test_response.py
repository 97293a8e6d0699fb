from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.codec.grpc.response import write_infer_response
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.messages import InferResponse, InferResponseHead, OutputTensor
from gateway.protocol.response_header import MAX_OUTPUTS
from tests.codec.grpc.infer_messages import (
    Drawn,
    broken,
    check_broken_response,
    check_response,
    raw_data,
    read_response,
    responses,
    rewritten,
    serialized,
)
from tests.support.checks.refused import refused
from tests.support.grpc import wire_bytes
from tests.support.grpc.proto_file import ModelInferResponse
from tests.support.grpc.wire_bytes import field
from tests.support.scale import scaled

LAW = settings(max_examples=scaled(300))


def written(found: Any, raw: bool) -> Any:
    chunks = write_infer_response(found.response, found.tensors, raw)
    return ModelInferResponse.FromString(b"".join(chunks))


@LAW
@given(responses(), st.booleans(), st.integers(0, 2**32))
def test_response_is_read_and_written_as_the_runtime_does(
    drawn: Drawn, raw: bool, seed: int
) -> None:
    message = drawn.in_form(raw)
    data = serialized(message)
    for form in (data, rewritten(data, seed)):
        found = read_response(form)
        check_response(found, message)
        assert written(found, raw=True) == drawn.raw
        assert written(found, raw=False) == (drawn.typed or drawn.raw)


@LAW
@given(broken(responses()))
def test_broken_response_is_refused_if_the_runtime_refuses_it(data: bytes) -> None:
    check_broken_response(data)


@LAW
@given(responses(), st.lists(wire_bytes.messages(), min_size=2, max_size=2))
def test_unknown_fields_are_kept_where_they_were(drawn: Drawn, unknown: list[bytes]) -> None:
    message = drawn.raw
    message.MergeFromString(unknown[0])
    for tensor in message.outputs:
        tensor.MergeFromString(unknown[1])
    again = written(read_response(serialized(message)), raw=True)
    assert again.SerializeToString(deterministic=True) == message.SerializeToString(
        deterministic=True
    )


def test_head_of_raw_responses_is_read_once_whatever_their_id() -> None:
    message = ModelInferResponse(model_name="m", id="1", raw_output_contents=[bytes(4)])
    message.outputs.add(name="y", datatype="FP32", shape=[1])
    one = read_response(serialized(message))
    message.id = "2"
    other = read_response(serialized(message))
    assert one.response.head is other.response.head
    assert (one.response.id, other.response.id) == ("1", "2")


def error_of(data: bytes, **caps: int) -> str:
    with pytest.raises(GatewayError) as caught:
        read_response(data, **caps)
    assert caught.value.kind is ErrorKind.BAD_RESPONSE
    return caught.value.message


def output_message(datatype: str, *shape: int, **contents: Any) -> Any:
    message = ModelInferResponse()
    message.outputs.add(name="y", datatype=datatype, shape=shape, contents=contents or None)
    return message


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            output_message("FP32", 2, fp32_contents=[1]),
            "output 'y' of the server's response: shape [2] takes 2 elements, fp32_contents has 1",
        ),
        (
            output_message("BF16", 1, bytes_contents=[b"ab"]),
            "output 'y' of the server's response has elements in bytes_contents; those of BF16 "
            "belong into raw_output_contents only",
        ),
        (
            output_message("FP33", 1),
            "output 'y' of the server's response: unknown datatype \"FP33\"; known are "
            + ", ".join(DATATYPES),
        ),
        (
            ModelInferResponse(raw_output_contents=[b""]),
            "the server's response has 1 raw_output_contents for 0 outputs",
        ),
    ],
)
def test_error_names_the_output(message: Any, text: str) -> None:
    assert error_of(serialized(message)) == text


def test_error_of_invalid_protobuf_names_the_byte() -> None:
    data = field(3, b"id") + field(5, field(1, b"\xff")) + field(6, b"")
    assert error_of(data) == (
        "the server's response is not valid protobuf: a string that is not UTF-8 at byte 8"
    )
    with pytest.raises(DecodeError):
        ModelInferResponse.FromString(data)


def test_size_is_limited() -> None:
    assert error_of(field(1, b"m" * 200), header_cap=100) == (
        "the server's response has more than 100 bytes beside the data of tensors "
        "(limits.max_inference_header_bytes)"
    )
    assert error_of(field(6, b"") * (MAX_OUTPUTS + 1)) == (
        f"the server's response has more than {MAX_OUTPUTS} outputs"
    )
    assert error_of(field(5, b"") * (MAX_OUTPUTS + 1)) == (
        f"the server's response has more than {MAX_OUTPUTS} outputs"
    )


def test_half_floats_make_the_whole_response_raw() -> None:
    half = OutputTensor("h", DATATYPES["FP16"], (1,), 2)
    whole = OutputTensor("f", DATATYPES["FP32"], (1,), 4)
    response = InferResponse(InferResponseHead((half, whole), "m", "1"), "id")
    data = [[raw_data("FP16", [1])], [raw_data("FP32", [2])]]
    message = ModelInferResponse.FromString(b"".join(write_infer_response(response, data, False)))
    assert [*message.raw_output_contents] == [data[0][0], data[1][0]]
    assert (message.model_name, message.model_version, message.id) == ("m", "1", "id")


def test_parameter_that_protobuf_cannot_carry_is_refused() -> None:
    tensor = OutputTensor("y", DATATYPES["FP32"], (0,), 0, {"p": {}})
    text = "must be true, false, a string or a number to be sent over gRPC, got an object"
    with refused(ErrorKind.BAD_RESPONSE, f"output 'y': parameter 'p' {text}"):
        write_infer_response(InferResponse(InferResponseHead((tensor,))), [[]])
