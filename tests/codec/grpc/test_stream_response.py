"""Messages of servers' streams are read as the official runtime writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from gateway.codec.grpc.stream_response import (
    read_stream_response,
    write_stream_error,
    write_stream_response,
)
from gateway.errors import ErrorKind, GatewayError

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


def test_error_that_is_no_text_is_read() -> None:
    assert read_stream_response(b"\x0a\x01\xff", CAP).error == "\ufffd"


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


def test_unknown_fields_are_skipped() -> None:
    inner = service_pb2.ModelStreamInferResponse(infer_response=response()).SerializeToString()
    assert read_stream_response(b"\x78\x05" + inner, CAP).response is not None


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
