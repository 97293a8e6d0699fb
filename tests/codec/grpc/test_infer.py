"""Infer messages are read and written as the official runtime does, or refused."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.codec.grpc.infer import (
    read_infer_request,
    read_infer_response,
    read_stream_response,
    write_infer_request,
    write_infer_response,
    write_stream_error,
    write_stream_response,
)
from gateway.codec.v2.binary_request import write_binary_header
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.messages import (
    InferRequest,
    InferRequestHead,
    InferResponse,
    InferResponseHead,
    InputTensor,
    OutputTensor,
    TensorData,
)
from gateway.protocol.response_header import MAX_OUTPUTS
from tests.codec.grpc.infer_messages import (
    HEADER_CAP,
    Drawn,
    broken,
    check_request,
    check_response,
    raw_data,
    read_request,
    requests,
    responses,
    rewritten,
    serialized,
)
from tests.support.checks.refused import refused
from tests.support.grpc import wire_bytes
from tests.support.grpc.proto_file import ModelInferRequest, ModelInferResponse, message_class
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
    try:
        found = read_infer_request(data, HEADER_CAP, 100)
    except GatewayError as error:
        assert error.kind in (ErrorKind.BAD_REQUEST, ErrorKind.TOO_LARGE)  # noqa: PT017
        return
    check_request(found, ModelInferRequest.FromString(data))


@LAW
@given(broken(responses()))
def test_broken_response_is_refused_if_the_runtime_refuses_it(data: bytes) -> None:
    try:
        found = read_infer_response(data, HEADER_CAP)
    except GatewayError as error:
        assert error.kind is ErrorKind.BAD_RESPONSE  # noqa: PT017
        return
    check_response(found, ModelInferResponse.FromString(data))


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
    found = read_request(of_tensor("FP32", 2, raw=(8,)).SerializeToString() + field(99, b"unknown"))
    assert found.request.head.unknown_fields == field(99, b"unknown")
    assert b"unknown" not in write_binary_header(found.request)


# --------------------------------------------------------------------------------- examples


def of_tensor(datatype: str = "FP32", *shape: int, raw: tuple[int, ...] = (), **more: Any) -> Any:
    """Make a request with an input; ``raw`` are the sizes of raw contents, the rest is typed."""
    message = ModelInferRequest(raw_input_contents=map(bytes, raw))
    message.inputs.add(name="x", datatype=datatype, shape=shape, contents=more or None)
    return message


@pytest.mark.parametrize("form", [{"raw": (8000,)}, {"fp32_contents": [1] * 2000}])
def test_float_data_are_views_of_the_message(form: dict[str, Any]) -> None:
    data = serialized(of_tensor("FP32", 2000, **form))
    found = read_request(data)
    ((view,),) = found.request.tensors  # type: ignore[misc]
    assert isinstance(view, memoryview)
    assert view.obj is data
    for as_raw in (True, False):
        assert any(chunk is view for chunk in write_infer_request(found.request, "m", raw=as_raw))


def test_head_of_raw_requests_is_read_once_whatever_their_id() -> None:
    data = serialized(of_tensor("FP32", 2, raw=(8,)))
    one, other = (read_request(data + field(3, each)) for each in (b"1", b"2"))
    assert one.request.head is other.request.head
    assert (one.request.id, other.request.id) == ("1", "2")


def test_parameters_of_the_form_over_http_are_dropped() -> None:
    message = of_tensor("FP32", 2, raw=(8,))
    message.parameters["binary_data_output"].bool_param = False
    message.inputs[0].parameters["binary_data_size"].int64_param = 3
    message.outputs.add(name="y").parameters["binary_data"].bool_param = False
    head = read_request(message.SerializeToString()).request.head
    assert (head.parameters, head.inputs[0].parameters, head.outputs[0].parameters) == ({}, {}, {})
    assert head.output_encoding.all_binary


def test_parameter_of_an_unknown_type_has_no_value() -> None:
    unknown = field(4, field(1, b"p") + field(2, field(9, 1)))
    found = read_request(of_tensor("FP32", 2, raw=(8,)).SerializeToString() + unknown)
    assert found.request.head.parameters == {"p": None}


def test_features_are_read() -> None:
    message = of_tensor("FP32", 2, raw=(8,))
    message.outputs.add(name="y").parameters["classification"].int64_param = 3
    message.parameters["priority"].string_param = "high"
    features = read_request(message.SerializeToString()).request.head.features
    assert features.classified_outputs == ("y",)
    assert features.error == ('the request: priority must be an integer of 0 or more, got "high"')


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
        ("BYTES", (1,), b"\x02\0\0\0a", "input 'x' ends inside an element"),
        ("BYTES", (1,), b"\x01\0\0", "input 'x' ends inside an element"),
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
    tensor = OutputTensor("y", DATATYPES["FP32"], (0,), 0, {"p": [1]})
    with refused(ErrorKind.BAD_RESPONSE, f"output 'y': parameter 'p' {text}"):
        write_infer_response(InferResponse(InferResponseHead((tensor,))), [[]])


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
    text = "the request is larger than protobuf allows: 2147483647 bytes"
    with refused(ErrorKind.TOO_LARGE, text):
        write_infer_request(request, "m")


UNNAMED = ModelInferRequest(inputs=[{"datatype": "FP8"}])
TWO = ModelInferRequest(
    inputs=[{"name": name, "datatype": "FP32", "shape": [1]} for name in "xy"],
    raw_input_contents=[bytes(4)],
)
RAW_ONLY = "input 'x' has elements in fp32_contents; those of FP16 belong into raw_input_contents"
WRONG_FIELD = "input 'x' has elements in fp64_contents; those of FP32 belong into fp32_contents or "
IN_MEMORY = of_tensor("FP32", 2, fp32_contents=[1, 2])
IN_MEMORY.inputs[0].parameters["shared_memory_region"].string_param = "r"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            of_tensor("FP32", 2, raw=(8,), fp32_contents=[1, 2]),
            "input 'x' has contents beside raw_input_contents; send one of them",
        ),
        (
            of_tensor("FP32", 2, raw=(8, 8)),
            "the request has 2 raw_input_contents for 1 inputs; the last is input 'x'",
        ),
        (TWO, "input 'y' has no raw_input_contents: there are 1 of them for 2 inputs"),
        (
            of_tensor("FP32", 2, raw=(7,)),
            "input 'x': raw_input_contents has 7 bytes, but shape [2] of FP32 takes 8 bytes",
        ),
        (
            of_tensor("BYTES", 3, raw=(11,)),
            "input 'x': raw_input_contents has 11 bytes, but shape [3] of BYTES takes 3 elements "
            "of 4 bytes or more",
        ),
        (
            of_tensor("FP32", *[1] * 65, raw=(4,)),
            "input 'x': shape has 65 dimensions; at most 64 are allowed",
        ),
        (of_tensor(""), "input 'x': datatype is missing"),
        (UNNAMED, f'inputs[0]: unknown datatype "FP8"; known are {", ".join(DATATYPES)}'),
        (
            of_tensor("FP32", 2, fp32_contents=[1, 2, 3]),
            "input 'x': shape [2] takes 2 elements, fp32_contents has 3",
        ),
        (of_tensor("FP16", 2, fp32_contents=[1, 2]), f"{RAW_ONLY} only"),
        (
            of_tensor("UINT8", 2, uint_contents=[1, 256]),
            "input 'x': element 1 (256) does not fit UINT8",
        ),
        (
            of_tensor("FP32", -1, raw=(4,)),
            "input 'x': shape [-1] must hold integers of 0 or more only",
        ),
        (of_tensor("FP16", 2), "input 'x': shape [2] takes 2 elements, and there are 0"),
        (of_tensor("FP32", 2, fp64_contents=[1, 2]), f"{WRONG_FIELD}raw_input_contents"),
        (IN_MEMORY, "input 'x' has contents and shared_memory_region; send one of them"),
    ],
)
def test_error_names_the_tensor(message: Any, text: str) -> None:
    with refused(ErrorKind.BAD_REQUEST, text):
        read_request(message.SerializeToString())


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x0a\x05ab", "a value of 5 bytes is cut short: 2 are left at byte 1"),
        (field(5, field(1, b"a\xff")), "a string that is not UTF-8 at byte 5"),
        (
            field(3, b"id") + field(5, field(1, b"\xff")) + field(7, b""),
            "a string that is not UTF-8 at byte 8",
        ),
    ],
)
def test_error_of_invalid_protobuf_names_the_byte(data: bytes, text: str) -> None:
    with refused(ErrorKind.BAD_REQUEST, f"the request is not valid protobuf: {text}"):
        read_request(data)
    with pytest.raises(DecodeError):
        ModelInferRequest.FromString(data)


def test_invalid_varint_in_contents_names_the_tensor() -> None:
    entry = field(1, b"x") + field(2, b"INT32") + field(3, 1)
    data = field(5, entry + field(5, field(2, b"\x80" * 10 + b"\x01")))
    text = "input 'x': int_contents has a varint of more than 10 bytes"
    with refused(ErrorKind.BAD_REQUEST, text):
        read_request(data)
    with pytest.raises(DecodeError):
        ModelInferRequest.FromString(data)


# ------------------------------------------------------------------------------------ limits

HEADER_ERROR = (
    "the request has more than 100 bytes beside the data of tensors "
    "(limits.max_inference_header_bytes)"
)


@pytest.mark.parametrize(
    "more",
    [
        field(1, b"x" * 200),
        field(4, field(1, b"x" * 200)),
        field(5, field(1, b"x" * 200)),
        field(5, field(3, 1) * 100),
        field(6, field(1, b"x" * 200)),
        field(99, 1) * 50,
        field(4, b"") * 100,
        # Fields without elements.
        field(5, field(2, b"FP32") + field(5, field(1, b"") * 100)),
        field(5, field(2, b"FP32") + field(5, b"\x08\x01") * 100),
    ],
)
def test_bytes_beside_data_are_limited(more: bytes) -> None:
    with refused(ErrorKind.TOO_LARGE, HEADER_ERROR):
        read_request(more, header_cap=100)


def test_data_are_not_limited_as_header() -> None:
    for form in ({"raw": (4000,)}, {"fp32_contents": [0] * 1000}):
        message = of_tensor("FP32", 1000, **form)
        found = read_request(message.SerializeToString(), header_cap=100)
        assert found.request.data_size == 4000


@pytest.mark.parametrize(
    ("number", "what"),
    [
        (5, "has more than 2 inputs"),
        (7, "has more than 2 inputs"),
        (6, "asks for more than 2 outputs"),
    ],
)
def test_number_of_tensors_is_limited(number: int, what: str) -> None:
    with refused(ErrorKind.BAD_REQUEST, f"the request {what} (limits.max_tensors)"):
        read_request(field(number, b"") * 3, tensor_cap=2)


COUNT = 25_000
"""Elements of a message: enough that its memory shows."""


def element_messages() -> list[bytes]:
    count = COUNT
    numbers = field(1, b"x") + field(2, b"INT32") + field(3, count)
    texts = field(1, b"x") + field(2, b"BYTES") + field(3, count)
    return [
        field(5, numbers + field(5, field(2, b"\x01" * count))),
        field(5, numbers + field(5, field(2, 1) * count)),
        field(5, numbers + field(5, field(2, b"\x01") * count)),
        field(5, texts + field(5, field(8, b"") * count)),
        field(5, numbers + field(5, field(2, b"\x01")) * count),
    ]


@pytest.mark.parametrize("data", element_messages())
def test_memory_is_a_small_multiple_of_the_message(data: bytes) -> None:
    tracemalloc.start()
    try:
        found = read_request(data, header_cap=1 << 24)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * len(data) + 1_000_000
    assert found.request.data_size == 4 * COUNT


def test_lie_about_the_shape_allocates_nothing() -> None:
    entry = field(1, b"x") + field(2, b"INT64") + field(3, 2**40)
    data = field(5, entry + field(5, field(3, b"\x01" * 1000)))
    text = "input 'x': shape [1099511627776] takes 1099511627776 elements, int64_contents has 1000"
    tracemalloc.start()
    try:
        with refused(ErrorKind.BAD_REQUEST, text):
            read_request(data)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_head_knows_about_what_memory_it_takes() -> None:
    message = of_tensor("FP32", 2, raw=(8,))
    for number in range(1000):
        message.parameters[f"{number}"].bool_param = True
    data = message.SerializeToString()
    read_request(data + field(4, b""))  # fills caches that are shared
    tracemalloc.start()
    try:
        found = read_request(data)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used / 2 < found.request.head.memory < 6 * used


# -------------------------------------------------------------------------------- responses


def response_written(found: Any, raw: bool) -> Any:
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
        found = read_infer_response(form, HEADER_CAP)
        check_response(found, message)
        assert response_written(found, raw=True) == drawn.raw
        assert response_written(found, raw=False) == (drawn.typed or drawn.raw)


def test_half_floats_make_the_whole_response_raw() -> None:
    half = OutputTensor("h", DATATYPES["FP16"], (1,), 2)
    whole = OutputTensor("f", DATATYPES["FP32"], (1,), 4)
    response = InferResponse(InferResponseHead((half, whole), "m", "1"), "id")
    data = [[raw_data("FP16", [1])], [raw_data("FP32", [2])]]
    message = ModelInferResponse.FromString(b"".join(write_infer_response(response, data, False)))
    assert [*message.raw_output_contents] == [data[0][0], data[1][0]]
    assert (message.model_name, message.model_version, message.id) == ("m", "1", "id")


StreamResponse = message_class("ModelStreamInferResponse")


def response(**members: object) -> Any:
    message = ModelInferResponse(model_name="m", model_version="1", **members)
    message.outputs.add(name="OUT", datatype="INT8", shape=[2])
    message.raw_output_contents.append(b"\1\2")
    return message


def test_response_is_read() -> None:
    data = StreamResponse(infer_response=response(id="7")).SerializeToString()
    found = read_stream_response(data, HEADER_CAP)
    assert found.error is None
    assert found.response is not None
    assert found.response.response.id == "7"
    assert [list(map(bytes, each)) for each in found.response.tensors] == [[b"\1\2"]]


@given(st.text(min_size=1))
def test_error_is_read(text: str) -> None:
    message = StreamResponse(error_message=text)
    assert read_stream_response(message.SerializeToString(), HEADER_CAP) == (text, None, False)
    message.infer_response.SetInParent()
    assert read_stream_response(message.SerializeToString(), HEADER_CAP) == (text, None, False)
    message.infer_response.model_name = "m"
    assert read_stream_response(message.SerializeToString(), HEADER_CAP) == (text, None, True)


def test_response_without_the_message_around_it_is_read() -> None:
    found = read_stream_response(response(id="7").SerializeToString(), HEADER_CAP)
    assert found.response is not None
    assert found.response.response.head.model == "m"
    assert [each.name for each in found.response.response.head.outputs] == ["OUT"]


@pytest.mark.parametrize("data", [b"", b"\x12\x00", b"\x0a\x00"])
def test_empty_message_is_a_response_without_outputs(data: bytes) -> None:
    found = read_stream_response(data, HEADER_CAP)
    assert found.error is None
    assert found.response is not None
    assert found.response.response.head.outputs == ()


def test_response_is_written_as_the_last_of_its_request() -> None:
    data = response(id="7").SerializeToString()
    chunks = write_stream_response([data[:5], memoryview(data)[5:]])
    message = StreamResponse.FromString(b"".join(chunks))
    assert message.error_message == ""
    assert message.infer_response.parameters["triton_final_response"].bool_param
    message.infer_response.ClearField("parameters")
    assert message.infer_response == response(id="7")


@given(st.text(), st.text(), st.none() | st.text())
def test_error_is_written_with_its_request(text: str, model: str, request_id: str | None) -> None:
    written = b"".join(write_stream_error(text, model, request_id))
    message = StreamResponse.FromString(written)
    assert message.error_message == text
    assert message.infer_response.model_name == model
    assert message.infer_response.id == (request_id or "")
    if text:
        assert read_stream_response(written, HEADER_CAP) == (text, None, True)


@given(st.binary(max_size=40))
def test_any_message_of_a_stream_is_read_or_invalid(data: bytes) -> None:
    try:
        read_stream_response(data, HEADER_CAP)
    except GatewayError as error:
        assert error.kind is ErrorKind.BAD_RESPONSE  # noqa: PT017


OUTPUTS = f"the server's response has more than {MAX_OUTPUTS} outputs"
OF_RESPONSE = HEADER_ERROR.replace("the request", "the server's response")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (field(1, b"m" * 200), OF_RESPONSE),
        (field(6, b"") * (MAX_OUTPUTS + 1), OUTPUTS),
        (field(5, b"") * (MAX_OUTPUTS + 1), OUTPUTS),
        (
            field(5, field(1, b"y") + field(2, b"FP32") + field(3, 2)),
            "output 'y' of the server's response: shape [2] takes 2 elements, fp32_contents has 0",
        ),
    ],
)
def test_error_of_a_response_is_the_servers(data: bytes, text: str) -> None:
    with refused(ErrorKind.BAD_RESPONSE, text):
        read_infer_response(data, 100 if text == OF_RESPONSE else HEADER_CAP)
