from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.codec.grpc.request import write_infer_request
from gateway.codec.v2.binary_request import write_binary_header
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.messages import InferRequest, InferRequestHead, InputTensor, TensorData
from tests.codec.grpc.infer_messages import (
    FIELDS,
    Drawn,
    broken,
    check_broken_request,
    check_request,
    raw_data,
    read_request,
    requests,
    rewritten,
    serialized,
)
from tests.support.checks.refused import refused
from tests.support.grpc import wire_bytes
from tests.support.grpc.proto_file import ModelInferRequest
from tests.support.grpc.wire_bytes import field
from tests.support.scale import scaled

LAW = settings(max_examples=scaled(300))


def written(found: Any, raw: bool) -> Any:
    chunks = write_infer_request(found.request, found.model, found.version, raw)
    return ModelInferRequest.FromString(b"".join(chunks))


@LAW
@given(requests(), st.booleans(), st.integers(0, 2**32))
def test_request_is_read_and_written_as_the_runtime_does(
    drawn: Drawn, raw: bool, seed: int
) -> None:
    message = drawn.in_form(raw)
    data = serialized(message)
    for form in (data, rewritten(data, seed), memoryview(data)):
        found = read_request(form)  # type: ignore[arg-type]
        check_request(found, message)
        assert written(found, raw=True) == drawn.raw
        if drawn.typed is not None:
            assert written(found, raw=False) == drawn.typed
            has_contents = any(each.HasField("contents") for each in message.inputs)
            assert found.is_raw == (not has_contents)


@LAW
@given(broken(requests()))
def test_broken_request_is_refused_if_the_runtime_refuses_it(data: bytes) -> None:
    check_broken_request(data)


@LAW
@given(requests(), st.lists(wire_bytes.messages(), min_size=3, max_size=3))
def test_unknown_fields_are_kept_where_they_were(drawn: Drawn, unknown: list[bytes]) -> None:
    message = drawn.raw
    message.MergeFromString(unknown[0])
    for tensor in message.inputs:
        tensor.MergeFromString(unknown[1])
    for output in message.outputs:
        output.MergeFromString(unknown[2])
    found = read_request(message.SerializeToString())
    assert written(found, raw=True) == message
    again = written(found, raw=True).SerializeToString(deterministic=True)
    assert again == message.SerializeToString(deterministic=True)


def test_unknown_fields_do_not_reach_a_server_of_the_binary_form() -> None:
    found = read_request(fp32_request(raw=True).SerializeToString() + field(99, b"unknown"))
    assert found.request.head.unknown_fields == field(99, b"unknown")
    assert b"unknown" not in write_binary_header(found.request)


# --------------------------------------------------------------------------------- examples


def fp32_request(raw: bool, count: int = 2, **more: Any) -> Any:
    message = ModelInferRequest(model_name="m", **more)
    tensor = message.inputs.add(name="x", datatype="FP32", shape=[count])
    values = range(1, count + 1)
    if raw:
        message.raw_input_contents.append(raw_data("FP32", values))
    else:
        tensor.contents.fp32_contents.extend(values)
    return message


@pytest.mark.parametrize("raw", [True, False])
def test_float_data_are_views_of_the_message(raw: bool) -> None:
    data = serialized(fp32_request(raw, count=2000))
    found = read_request(data)
    ((view,),) = found.request.tensors  # type: ignore[misc]
    assert isinstance(view, memoryview)
    assert view.obj is data
    for as_raw in (True, False):
        assert any(chunk is view for chunk in write_infer_request(found.request, "m", raw=as_raw))


def test_head_of_raw_requests_is_read_once_whatever_their_id() -> None:
    one = read_request(fp32_request(True, id="1").SerializeToString())
    other = read_request(fp32_request(True, id="2").SerializeToString())
    assert one.request.head is other.request.head
    assert (one.request.id, other.request.id) == ("1", "2")


def test_parameters_of_the_form_over_http_are_dropped() -> None:
    message = fp32_request(raw=True)
    message.parameters["binary_data_output"].bool_param = False
    message.inputs[0].parameters["binary_data_size"].int64_param = 3
    message.outputs.add(name="y").parameters["binary_data"].bool_param = False
    head = read_request(message.SerializeToString()).request.head
    assert (head.parameters, head.inputs[0].parameters, head.outputs[0].parameters) == ({}, {}, {})
    assert head.output_encoding.all_binary


def test_features_are_read() -> None:
    message = fp32_request(raw=True)
    message.outputs.add(name="y").parameters["classification"].int64_param = 3
    message.parameters["priority"].string_param = "high"
    features = read_request(message.SerializeToString()).request.head.features
    assert features.classified_outputs == ("y",)
    assert features.error == ('the request: priority must be an integer of 0 or more, got "high"')


def test_typed_contents_that_occur_twice_are_merged() -> None:
    parts = [field(5, field(6, raw_data("FP32", [value]))) for value in (1.0, 2.0)]
    entry = parts[0] + field(1, b"x") + parts[1] + field(2, b"FP32") + field(3, 2)
    message = ModelInferRequest.FromString(field(5, entry))
    check_request(read_request(field(5, entry)), message)


# ----------------------------------------------------------------------------------- writing


def message_of(request: InferRequest, *arguments: Any, **options: Any) -> Any:
    """Return the message that is written of a request."""
    chunks = write_infer_request(request, "m", *arguments, **options)
    return ModelInferRequest.FromString(b"".join(chunks))


def hub_request(datatype: str, values: list[Any], **more: Any) -> InferRequest:
    data = raw_data(datatype, values)
    tensor = InputTensor("x", DATATYPES[datatype], (len(values),), len(data))
    halves: tuple[bytes, ...] = (data[: len(data) // 2 + 1], data[len(data) // 2 + 1 :])
    return InferRequest(InferRequestHead((tensor,), **more), None, (halves,))


@pytest.mark.parametrize(
    ("datatype", "parts", "data"),
    [
        ("BYTES", ([b"\x03\0\0\0"], [b"abc"]), b"\x03\0\0\0abc"),
        ("BYTES", ([bytes(4)], 0), bytes(4)),
        ("FP32", (0,), b""),
        ("FP32", ([b"1234", b"5678"],), b"12345678"),
    ],
)
def test_raw_binary_request_has_one_raw_content(
    datatype: str, parts: tuple[TensorData, ...], data: bytes
) -> None:
    """However many parts its data are, and even if there are none."""
    tensor = InputTensor("x", DATATYPES[datatype], (len(data) // 4 or 0,), len(data))
    request = InferRequest(InferRequestHead((tensor,)), None, parts)
    assert list(message_of(request).raw_input_contents) == [data]


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("BOOL", [True, False, True]),
        ("INT8", [-128, 127]),
        ("INT64", [-(2**63), 2**63 - 1]),
        ("UINT64", [2**64 - 1]),
        ("FP32", [float("inf"), -0.0]),
        ("BYTES", [b"", b"\xff", b"x" * 9000]),
    ],
)
def test_data_in_any_chunks_are_written(datatype: str, values: list[Any]) -> None:
    request = hub_request(datatype, values)
    contents = message_of(request, raw=False).inputs[0].contents
    assert [*getattr(contents, FIELDS[datatype])] == values
    assert [*message_of(request).raw_input_contents] == [raw_data(datatype, values)]


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_floats_cannot_be_typed(datatype: str) -> None:
    request = hub_request(datatype, [1.0])
    assert message_of(request)
    text = "which gRPC carries in raw_input_contents only, and typed contents are needed"
    with refused(ErrorKind.UNSUPPORTED, f"input 'x' is {datatype}, {text}"):
        write_infer_request(request, "m", raw=False)


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "text"),
    [
        ("BOOL", (2,), b"\x01\x02", "input 'x' is BOOL, but holds bytes other than 0 and 1"),
        ("BYTES", (1,), b"\x01\0\0", "input 'x' ends inside an element"),
        ("BYTES", (1,), b"\x02\0\0\0a", "input 'x' ends inside an element"),
        ("BYTES", (2,), b"\x01\0\0\0a", "input 'x': shape [2] takes 2 elements, data has 1"),
    ],
)
def test_invalid_data_cannot_be_typed(
    datatype: str, shape: tuple[int, ...], data: bytes, text: str
) -> None:
    tensor = InputTensor("x", DATATYPES[datatype], shape, len(data))
    request = InferRequest(InferRequestHead((tensor,)), None, ((data,),))
    with refused(ErrorKind.BAD_REQUEST, text):
        write_infer_request(request, "m", raw=False)


def test_parameter_that_protobuf_cannot_carry_is_refused() -> None:
    text = "must be true, false, a string or a number to be sent over gRPC, got an array"
    with refused(ErrorKind.BAD_REQUEST, f"the request: parameter 'p' {text}"):
        write_infer_request(hub_request("FP32", [1], parameters={"p": [1]}), "m")


def test_members_of_json_that_the_protocol_does_not_know_are_left_out() -> None:
    request = hub_request("FP32", [1], extra={"other": 1})
    assert message_of(request, "3") == ModelInferRequest(
        model_name="m",
        model_version="3",
        inputs=[{"name": "x", "datatype": "FP32", "shape": [1]}],
        raw_input_contents=[raw_data("FP32", [1])],
    )


def test_message_beyond_the_limit_of_protobuf_is_refused() -> None:
    class _Huge(bytes):
        def __len__(self) -> int:
            return 2**31

    tensor = InputTensor("x", DATATYPES["UINT8"], (2**31,), 2**31)
    request = InferRequest(InferRequestHead((tensor,)), None, ((_Huge(),),))
    with pytest.raises(GatewayError, match="larger than protobuf allows: 2147483647") as caught:
        write_infer_request(request, "m")
    assert caught.value.kind is ErrorKind.TOO_LARGE


def test_request_is_still_cached_after_a_flood_of_other_requests() -> None:
    def head(name: str) -> object:
        message = ModelInferRequest(model_name="m", raw_input_contents=[b"1"])
        message.inputs.add(name=name, datatype="INT8", shape=[1])
        return read_request(serialized(message)).request.head

    before = [head("innocent") for _ in range(2)][1]  # a full cache takes it at its second use
    for number in range(5000):
        head(f"n{number}")
    assert head("innocent") is before
