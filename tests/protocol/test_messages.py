"""Tensors of messages, raw binary requests, and the unusual features of requests."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import ErrorKind
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.messages import Fields, InferRequestHead, InputTensor, RequestFeatures
from gateway.protocol.raw_binary import read_raw_binary
from gateway.protocol.request_features import may_hide_classification
from gateway.protocol.request_header import read_head, read_inputs
from gateway.protocol.tensors import ModelMetadata, TensorSpec, element_count
from tests.support.checks.refused import refused_with

TENSOR = InputTensor("IN", DATATYPES["FP32"], (1,), 4)


CONTROL = InputTensor("sequence_control_input", DATATYPES["UINT32"], (1,))
SEQUENCES: dict[str, tuple[InferRequestHead, bool]] = {
    "id": (InferRequestHead((TENSOR,), parameters={"sequence_id": 7}), True),
    "unknown member": (InferRequestHead((TENSOR,), extra={"sequence_id": "a"}), True),
    "input": (InferRequestHead((TENSOR, CONTROL)), True),
    "nothing": (InferRequestHead((TENSOR,)), False),
    "another parameter": (InferRequestHead((TENSOR,), parameters={"priority": 1}), False),
}


@pytest.mark.parametrize(("head", "is_in_sequence"), SEQUENCES.values(), ids=SEQUENCES)
def test_request_with_a_sequence_parameter_or_input_is_in_a_sequence(
    head: InferRequestHead, is_in_sequence: bool
) -> None:
    assert head.is_in_sequence is is_in_sequence


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ((0,), 0),
        ((2, 3, 4), 24),
        ((2**62, 2**62, 0), 0),
        ((2**40, 2**40), 2**63),
        ((1,) * 100_000, 1),
        ((9,) * 100_000, 2**63),
    ],
)
def test_elements_of_a_shape_are_counted(shape: tuple[int, ...], count: int) -> None:
    assert element_count(shape) == count
    assert element_count(list(shape)) == count


def model(datatype: str, *shapes: list[int], batching: bool = False) -> ModelMetadata:
    tensors = [
        TensorSpec(f"in{i}", DATATYPES[datatype], tuple(shape)) for i, shape in enumerate(shapes)
    ]
    return ModelMetadata("m", tuple(tensors), batching)


# Cases that Triton was observed to handle, and similar ones.
TAKEN_BY_MODELS = [
    (model("FP32", [-1]), 8, [2]),
    (model("FP32", [-1, -1, 4], batching=True), 16, [1, 1, 4]),
    (model("FP32", [-1], batching=True), 4, [1]),
    (model("UINT8", [2, -1, 2]), 8, [2, 2, 2]),
    (model("FP64", [-1, 0]), 0, [0, 0]),
]


@pytest.mark.parametrize(("metadata", "size", "shape"), TAKEN_BY_MODELS)
def test_shape_follows_from_the_size(metadata: ModelMetadata, size: int, shape: list[int]) -> None:
    tensor = InputTensor("in0", metadata.inputs[0].datatype, tuple(shape), size)
    request = read_raw_binary(metadata, size)
    assert request.head == InferRequestHead((tensor,))
    assert (request.id, request.tensors, request.text) == (None, (size,), b"")
    assert request.head.output_encoding.all_binary


@pytest.mark.parametrize(
    ("metadata", "shape"),
    [(model("BYTES", [1]), [1]), (model("BYTES", [-1, 1], batching=True), [1, 1])],
)
@pytest.mark.parametrize("size", [0, 3, 2**32 - 1])
def test_bytes_element_gets_its_length(
    metadata: ModelMetadata, shape: list[int], size: int
) -> None:
    request = read_raw_binary(metadata, size)
    assert request.tensors == ([size.to_bytes(4, "little")], size)
    (tensor,) = request.head.inputs
    assert (tensor.shape, tensor.binary_size) == (tuple(shape), size + 4)


REFUSED_BY_MODELS = [
    (model("FP32"), 4, "metadata of model 'm' lists no inputs"),
    (model("FP32", [-1], [-1]), 4, "model 'm' takes 2 inputs; a raw binary request"),
    (model("FP32", [-1, -1]), 4, "shape [-1, -1]; a raw binary request allows at most 1 variable"),
    (model("FP32", [-1]), 3, "'in0' of shape [-1] and datatype FP32 takes a multiple of 4 bytes"),
    (model("FP32", [2, 2]), 15, "'in0' of shape [2, 2] and datatype FP32 takes 16 bytes, got 15"),
    (model("BYTES", [2]), 4, "'in0' of model 'm' is BYTES of shape [2]; a raw binary request"),
    (model("BYTES", [1]), 2**32, "input 'in0' can take at most 4 GiB in one BYTES element"),
]


@pytest.mark.parametrize(("metadata", "size", "message"), REFUSED_BY_MODELS)
def test_model_that_cannot_take_raw_binary_is_refused(
    metadata: ModelMetadata, size: int, message: str
) -> None:
    with refused_with(ErrorKind.BAD_REQUEST, message):
        read_raw_binary(metadata, size)


def request(of_request: object = None, of_input: object = None, *outputs: dict[str, Any]) -> Fields:
    region: Fields = {"shared_memory_region": "r"}
    entry: Fields = {"name": "x", "datatype": "FP32", "shape": [1], "parameters": {**region}}
    if isinstance(of_input, dict):
        entry["parameters"] = {**region, **of_input}
    fields: Fields = {"inputs": [entry]}
    if of_request is not None:
        fields["parameters"] = of_request
    if outputs:
        fields["outputs"] = [
            {"name": f"y{i}", "parameters": each} for i, each in enumerate(outputs)
        ]
    return fields


def features_of(fields: Fields) -> RequestFeatures:
    return read_head(fields, read_inputs(fields)).features


PLAIN = [
    request(),
    request({"sequence_id": 0, "sequence_start": True, "sequence_end": False}),
    request({"foo": [1], "classification": -1, "shared_memory_region": 1}),
    request(None, {"shared_memory_offset": 4, "shared_memory_byte_size": 8}),
    request(None, None, {"shared_memory_region": "s", "shared_memory_byte_size": 0}),
    request(None, None, {"classification": 0}, {"binary_data": True}),
]

UNSIGNED = "must be an integer of 0 or more"
FAULTS = [
    (request({"sequence_start": 1}), "the request: sequence_start must be true or false, got 1"),
    (request({"sequence_id": -1}), f"the request: sequence_id {UNSIGNED}, or a string, got -1"),
    (
        request(None, {"shared_memory_region": 1}),
        "input 'x': shared_memory_region must be a string",
    ),
    (
        request(None, {"shared_memory_byte_size": "8"}),
        f"input 'x': shared_memory_byte_size {UNSIGNED}, got \"8\"",
    ),
    (request(None, None, {}, {"classification": -1}), f"output 'y1': classification {UNSIGNED}"),
]


@pytest.mark.parametrize("fields", PLAIN)
def test_usual_request_is_plain(fields: Fields) -> None:
    assert features_of(fields).is_plain


@pytest.mark.parametrize(("fields", "fault"), FAULTS)
def test_parameter_of_a_wrong_type_is_an_error(fields: Fields, fault: str) -> None:
    features = features_of(fields)
    assert not features.is_plain
    assert fault in features.error


def test_classified_outputs_are_named() -> None:
    fields = request(None, None, {"classification": 3}, {}, {"classification": 2**63})
    features = features_of(fields)
    assert features.classified_outputs == ("y0", "y2")
    assert not features.error
    assert not features.is_plain


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        (b'{"inputs":[],"outputs":[{"name":"y","parameters":{"classification":1}}]}', True),
        (b'{"parameters":{"cl\\u0061ssification":1}}', True),
        (b'{"inputs":[{"name":"\\n"}]}', False),
    ],
)
def test_text_may_hide_a_classification(text: bytes, hidden: bool) -> None:
    assert may_hide_classification(text) is hidden
