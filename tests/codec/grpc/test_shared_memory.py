"""ModelInfer messages with tensors in shared memory are as they were, but for their contents."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.grpc.shared_memory import (
    ContentsReader,
    SharedMessage,
    find_contents,
    read_sharable,
)
from gateway.codec.v2.shared_memory import Place
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.grpc.wire import WireError
from gateway.protocol.messages import InferRequest
from tests.codec import strategies
from tests.codec.grpc.infer_messages import serialized
from tests.support.grpc.proto_file import ModelInferRequest, ModelInferResponse

CAPS = 1 << 20, 64
UNKNOWN = b"\xfa\x07\x03own"
"""Field 127, which no message has."""
INPUTS, OUTPUTS = Place("inputs", 4096), Place("outputs", 64)
_KEYS = [f"shared_memory_{each}" for each in ("region", "offset", "byte_size")]


def read(message: bytes) -> tuple[int, InferRequest | None]:
    """Return where raw contents begin, and the request if it can go through shared memory."""
    position = find_contents(message)
    assert position is not None
    return position, read_sharable(message[:position], len(message), *CAPS)


def share(message: bytes, sizes: dict[str, int]) -> SharedMessage:
    position, request = read(message)
    assert request is not None
    contents = memoryview(message)[position:]
    data = list(ContentsReader(request).feed(contents))
    return SharedMessage(request, message[:position], data, [contents], sizes)


def make(*tensors: tuple[str, str, Sequence[int]], **fields: Any) -> Any:
    """Make a request of tensors with their contents."""
    request = ModelInferRequest(model_name="m", **fields)
    for number, (name, datatype, shape) in enumerate(tensors):
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        size = int(np.prod(shape)) * (DATATYPES[datatype].size or 0)
        request.raw_input_contents.append(bytes([number]) * size)
    return request


def take_place(tensor: Any) -> tuple[str, int, int]:
    """Remove the parameters of a place from a tensor; return region, offset and size."""
    region, offset, size = (tensor.parameters[key] for key in _KEYS)
    for key in _KEYS:
        del tensor.parameters[key]
    return region.string_param, offset.int64_param, size.int64_param


# --------------------------------------------------------------------------------- requests


def test_tensors_have_a_place_and_all_else_of_a_request_is_kept() -> None:
    request = make(("a", "FP32", [2, 3]), ("b", "INT8", [4]), id="42", model_version="1")
    request.inputs[0].parameters["mine"].int64_param = 1
    request.inputs[1].MergeFromString(UNKNOWN)
    request.outputs.add(name="z").parameters["mine"].bool_param = True
    request.parameters["priority"].uint64_param = 2**63
    shared = share(serialized(request), {"z": 16})
    written = ModelInferRequest.FromString(b"".join(shared.write(INPUTS, OUTPUTS)))
    assert take_place(written.inputs[0]) == ("inputs", 4096, 24)
    assert take_place(written.inputs[1]) == ("inputs", 4120, 4)
    assert take_place(written.outputs[0]) == ("outputs", 64, 16)
    request.ClearField("raw_input_contents")
    assert serialized(written) == serialized(request)
    assert UNKNOWN in serialized(written)


def test_outputs_that_the_request_does_not_list_have_a_place() -> None:
    shared = share(serialized(make(("a", "FP32", [2]))), {"y": 8, "z": 16})
    written = ModelInferRequest.FromString(b"".join(shared.write(None, OUTPUTS)))
    assert [each.name for each in written.outputs] == ["y", "z"]
    places = [take_place(each) for each in written.outputs]
    assert places == [("outputs", 64, 8), ("outputs", 72, 16)]
    assert written.raw_input_contents == [bytes(8)]


def test_message_without_places_is_as_the_client_wrote_it() -> None:
    message = serialized(make(("a", "FP32", [2]), ("b", "INT8", [3])))
    shared = share(message, {"y": 8})
    assert b"".join(shared.write(None, None)) == message
    shared.set_inputs(memoryview(bytes(8) + b"\1\1\1"))
    assert b"".join(shared.write(None, None)) == message


def _with(change: Any) -> bytes:
    request = make(("a", "FP32", [2]))
    change(request)
    return serialized(request)


def _name_region(request: Any) -> None:
    request.inputs[0].parameters["shared_memory_region"].string_param = "own"


@pytest.mark.parametrize(
    "message",
    [
        serialized(make(("a", "BYTES", [1]))),
        serialized(make(("a", "FP32", [0]))),
        serialized(make(("a", "FP32", [2]), ("b", "FP32", [0]))),
        _with(_name_region),
        _with(lambda x: x.inputs[0].contents.fp32_contents.append(1.0)),
        _with(lambda x: x.raw_input_contents.append(b"more")),
        _with(lambda x: x.inputs[0].shape.append(2)),
        _with(lambda x: x.ClearField("inputs")),
        serialized(make(("a", "FP32", [2]))) + UNKNOWN,
        serialized(make(("a", "FP32", [2]))) + serialized(ModelInferRequest(id="2")),
    ],
    ids=[
        "strings",
        "empty",
        "one empty",
        "region",
        "typed, too",
        "more contents",
        "other shape",
        "no inputs",
        "unknown field at the end",
        "known field at the end",
    ],
)
def test_message_that_is_not_sharable_is_none(message: bytes) -> None:
    assert read(message)[1] is None


@pytest.mark.parametrize(
    "change",
    [
        lambda x: setattr(x.inputs[0], "datatype", "FP31"),
        lambda x: x.inputs[0].shape.append(-1),
    ],
)
def test_message_of_invalid_tensors_is_refused(change: Any) -> None:
    with pytest.raises(GatewayError):
        read(_with(change))


def test_start_of_a_message_tells_whether_contents_have_begun() -> None:
    message = serialized(make(("a", "FP32", [2]), id="42"))
    position = len(message) - 10
    assert [find_contents(message[:n]) for n in range(position + 1)] == [None] * (position + 1)
    assert find_contents(message[: position + 1]) == position
    with pytest.raises(WireError):
        find_contents(b"\x07")


def test_contents_of_other_sizes_than_the_shapes_tell_are_refused() -> None:
    request = make(("a", "FP32", [1]), ("b", "FP32", [2]))
    request.raw_input_contents[:] = [bytes(8), bytes(4)]
    message = serialized(request)
    position, read_request = read(message)
    assert read_request is not None
    with pytest.raises(GatewayError, match="raw_input_contents") as caught:
        list(ContentsReader(read_request).feed(memoryview(message)[position:]))
    assert caught.value.kind is ErrorKind.BAD_REQUEST


@pytest.mark.parametrize(("ending", "found"), [(b"", b"a"), (b"ab", b"ac"), (b"ab", b"abc")])
def test_another_ending_than_the_one_that_must_follow_is_refused(
    ending: bytes, found: bytes
) -> None:
    message = serialized(make(("a", "FP32", [2])))
    position, request = read(message)
    assert request is not None
    with pytest.raises(GatewayError):
        list(ContentsReader(request, ending).feed(memoryview(message + found)[position:]))


# --------------------------------------------------------------------------------- responses

MEMORY = b"yyyyYYYY" + b"zzzzZZZZ" * 2 + b"another call's"
SHARED = share(serialized(make(("a", "FP32", [2]))), {"y": 8, "z": 16})


def response(*outputs: tuple[str, str, Sequence[int]], contents: Sequence[bytes] = ()) -> Any:
    made = ModelInferResponse(model_name="m", model_version="1", id="42")
    for name, datatype, shape in outputs:
        made.outputs.add(name=name, datatype=datatype, shape=shape)
    made.raw_output_contents.extend(contents)
    return made


Y, Z = ("y", "FP32", [2]), ("z", "FP32", [4])


@pytest.mark.parametrize("contents", [(), (b"", b"")])
@pytest.mark.parametrize(
    ("outputs", "data"),
    [
        ((Y, Z), [MEMORY[:8], MEMORY[8:24]]),
        ((Z, Y), [MEMORY[8:24], MEMORY[:8]]),
        # The shape and the datatype are the server's, if they fit into the place.
        ((("y", "INT8", [1, 8]), ("z", "FP32", [2, 2])), [MEMORY[:8], MEMORY[8:24]]),
        ((("y", "FP32", [1]), ("z", "FP32", [0])), [MEMORY[:4], b""]),
    ],
)
def test_response_gets_its_contents(
    outputs: Any, data: list[bytes], contents: Sequence[bytes]
) -> None:
    message = response(*outputs, contents=contents)
    message.parameters["p"].double_param = 1.5
    message.outputs[0].parameters["confidence"].bool_param = True
    message.MergeFromString(UNKNOWN)
    chunks = SHARED.read_response(serialized(message), memoryview(MEMORY))
    found = ModelInferResponse.FromString(b"".join(chunks))
    message.raw_output_contents[:] = data
    assert serialized(found) == serialized(message)


NOT_AS_REQUESTED = "the server's response does not have the requested outputs"


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (response(), NOT_AS_REQUESTED),
        (response(Y), NOT_AS_REQUESTED),
        (response(Y, ("x", "FP32", [4])), NOT_AS_REQUESTED),
        (response(Y, Y), NOT_AS_REQUESTED),
        (response(Y, Z, Z), NOT_AS_REQUESTED),
        (response(("y", "FP32", [3]), Z), "output 'y'"),
        (response(Y, ("z", "FP32", [2**62, 2**62])), "output 'z'"),
        (response(("y", "BYTES", [1]), Z), "output 'y'"),
        (response(("y", "FP31", [1]), Z), "FP31"),
        (response(("y", "FP32", [-2]), Z), "output 'y'"),
        (response(Y, Z, contents=[b"12345678", b""]), "outputs that it left in memory"),
    ],
    ids=str,
)
def test_response_of_other_outputs_is_invalid(message: Any, told: str) -> None:
    with pytest.raises(GatewayError, match=told) as caught:
        SHARED.read_response(serialized(message), memoryview(MEMORY))
    assert caught.value.kind is ErrorKind.BAD_RESPONSE


@pytest.mark.parametrize("document", [b"\x07", b"\x2a\x05a", b"\x0a\x05a"])
def test_response_that_is_no_protobuf_is_invalid(document: bytes) -> None:
    with pytest.raises(GatewayError) as caught:
        SHARED.read_response(document, memoryview(MEMORY))
    assert caught.value.kind is ErrorKind.BAD_RESPONSE


# ------------------------------------------------------------------------------- there and back

_NUMBERS = sorted(name for name, datatype in DATATYPES.items() if datatype.size)
_SHAPES = st.lists(st.integers(1, 4), max_size=3)
_TEXTS = st.text(max_size=6)


@dataclass(frozen=True)
class Drawn:
    """A request with raw contents, and the outputs of its model with theirs."""

    request: Any
    response: Any


@st.composite
def calls(draw: st.DrawFn) -> Drawn:
    rng = random.Random(draw(strategies.SEEDS))
    made = ModelInferRequest(model_name=draw(_TEXTS), model_version=draw(_TEXTS), id=draw(_TEXTS))
    answer = ModelInferResponse(model_name="m", id=draw(_TEXTS))
    sides = (made.inputs, made.raw_input_contents), (answer.outputs, answer.raw_output_contents)
    for tensors, contents in sides:
        for name in draw(st.lists(_TEXTS, min_size=1, max_size=3, unique=True)):
            datatype, shape = draw(st.sampled_from(_NUMBERS)), draw(_SHAPES)
            tensor = tensors.add(name=name, datatype=datatype, shape=shape)
            if draw(st.booleans()):
                tensor.parameters[draw(_TEXTS)].string_param = draw(_TEXTS)
            if draw(st.booleans()):
                tensor.MergeFromString(UNKNOWN)
            contents.append(rng.randbytes(int(np.prod(shape)) * (DATATYPES[datatype].size or 0)))
    if draw(st.booleans()):
        for output in answer.outputs:
            made.outputs.add(name=output.name).parameters["p"].int64_param = draw(st.integers(0, 9))
    return Drawn(made, answer)


def serve(message: bytes, memory: memoryview, drawn: Drawn) -> tuple[Any, bytes]:
    """Serve a request as Triton; return it as it is without shared memory, and the response."""
    request, answer = ModelInferRequest.FromString(message), ModelInferResponse()
    answer.CopyFrom(drawn.response)
    del answer.raw_output_contents[:]
    if not request.raw_input_contents:
        for tensor in request.inputs:
            region, start, size = take_place(tensor)
            assert region == "region"
            request.raw_input_contents.append(bytes(memory[start : start + size]))
    wanted = {output.name: take_place(output) for output in request.outputs}
    for output, data in zip(
        drawn.response.outputs, drawn.response.raw_output_contents, strict=True
    ):
        region, start, size = wanted.pop(output.name)
        assert (region, size) == ("region", len(data))
        memory[start : start + size] = data
        answer.raw_output_contents.append(b"")
    assert not wanted
    if not drawn.request.outputs:
        del request.outputs[:]
    return request, serialized(answer)


@strategies.LAW
@given(calls(), st.booleans(), strategies.SEEDS)
def test_call_through_shared_memory_is_the_call_over_the_socket(
    drawn: Drawn, share_inputs: bool, seed: int
) -> None:
    rng = random.Random(seed)
    message = serialized(drawn.request)
    outputs = zip(drawn.response.outputs, drawn.response.raw_output_contents, strict=True)
    shared = share(message, {output.name: len(data) for output, data in outputs})
    start = rng.randrange(3) * 64
    end = start + shared.input_size
    memory = memoryview(bytearray(end + shared.output_size))
    assert isinstance(shared.data, list)
    if share_inputs:
        memory[start:end] = b"".join(shared.data)
    inputs = Place("region", start) if share_inputs else None
    written = b"".join(shared.write(inputs, Place("region", end)))
    request, answer = serve(written, memory, drawn)
    assert serialized(request) == message
    found = b"".join(shared.read_response(answer, memory[end:]))
    assert ModelInferResponse.FromString(found) == drawn.response


@strategies.LAW
@given(calls(), st.lists(st.integers(0, 300), max_size=5), st.binary(max_size=9))
def test_data_are_found_wherever_pieces_end(drawn: Drawn, cuts: list[int], ending: bytes) -> None:
    message = serialized(drawn.request)
    position, request = read(message)
    assert request is not None
    message += ending
    reader, data = ContentsReader(request, ending), bytearray()
    ends = [*sorted(min(position + cut, len(message)) for cut in cuts), len(message)]
    for start, end in zip([position, *ends], ends, strict=False):
        for part in reader.feed(memoryview(message)[start:end]):
            data += part
    assert data == b"".join(drawn.request.raw_input_contents)
