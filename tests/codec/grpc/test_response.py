from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from gateway.codec.grpc.infer import (
    read_stream_response,
    write_infer_response,
    write_stream_error,
    write_stream_response,
)
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
            output_message("FP33", 1),
            "output 'y' of the server's response: unknown datatype \"FP33\"; known are "
            + ", ".join(DATATYPES),
        ),
    ],
)
def test_error_names_the_output(message: Any, text: str) -> None:
    assert error_of(serialized(message)) == text


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


CAP = 1 << 20


def response(**members: object) -> service_pb2.ModelInferResponse:
    message = service_pb2.ModelInferResponse(model_name="m", model_version="1", **members)
    message.outputs.add(name="OUT", datatype="INT8", shape=[2])
    message.raw_output_contents.append(b"\1\2")
    return message


def test_response_is_read() -> None:
    data = service_pb2.ModelStreamInferResponse(infer_response=response(id="7")).SerializeToString()
    found = read_stream_response(data, CAP)
    assert found.error is None
    assert found.response is not None
    assert found.response.response.id == "7"
    assert [list(map(bytes, each)) for each in found.response.tensors] == [[b"\1\2"]]


@given(st.text(min_size=1))
def test_error_is_read(text: str) -> None:
    message = service_pb2.ModelStreamInferResponse(error_message=text)
    assert read_stream_response(message.SerializeToString(), CAP) == (text, None, False)
    message.infer_response.SetInParent()
    assert read_stream_response(message.SerializeToString(), CAP) == (text, None, False)
    message.infer_response.model_name = "m"
    assert read_stream_response(message.SerializeToString(), CAP) == (text, None, True)


def test_response_without_the_message_around_it_is_read() -> None:
    found = read_stream_response(response(id="7").SerializeToString(), CAP)
    assert found.response is not None
    assert found.response.response.head.model == "m"
    assert [each.name for each in found.response.response.head.outputs] == ["OUT"]


@pytest.mark.parametrize("data", [b"", b"\x12\x00", b"\x0a\x00"])
def test_empty_message_is_a_response_without_outputs(data: bytes) -> None:
    found = read_stream_response(data, CAP)
    assert found.error is None
    assert found.response is not None
    assert found.response.response.head.outputs == ()


def test_response_is_written_as_the_last_of_its_request() -> None:
    data = response(id="7").SerializeToString()
    written = b"".join(write_stream_response([data[:5], memoryview(data)[5:]]))
    message = service_pb2.ModelStreamInferResponse.FromString(written)
    assert message.error_message == ""
    assert message.infer_response.parameters["triton_final_response"].bool_param
    message.infer_response.ClearField("parameters")
    assert message.infer_response == response(id="7")


@given(st.text(), st.text(), st.none() | st.text())
def test_error_is_written_with_its_request(text: str, model: str, request_id: str | None) -> None:
    written = b"".join(write_stream_error(text, model, request_id))
    message = service_pb2.ModelStreamInferResponse.FromString(written)
    assert message.error_message == text
    assert message.infer_response.model_name == model
    assert message.infer_response.id == (request_id or "")
    if text:
        assert read_stream_response(written, CAP) == (text, None, True)


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_invalid(data: bytes) -> None:
    refused = None
    try:
        read_stream_response(data, CAP)
    except GatewayError as error:
        refused = error.kind
    assert refused in (None, ErrorKind.BAD_RESPONSE)


def test_unknown_fields_are_skipped() -> None:
    inner = service_pb2.ModelStreamInferResponse(infer_response=response()).SerializeToString()
    assert read_stream_response(b"\x78\x05" + inner, CAP).response is not None


def test_parameter_that_protobuf_cannot_carry_is_refused() -> None:
    tensor = OutputTensor("y", DATATYPES["FP32"], (0,), 0, {"p": {}})
    text = "must be true, false, a string or a number to be sent over gRPC, got an object"
    with refused(ErrorKind.BAD_RESPONSE, f"output 'y': parameter 'p' {text}"):
        write_infer_response(InferResponse(InferResponseHead((tensor,))), [[]])
