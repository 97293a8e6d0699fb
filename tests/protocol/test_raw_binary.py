from __future__ import annotations

import pytest

from gateway.errors import ErrorKind
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.messages import InferRequestHead, InputTensor
from gateway.protocol.raw_binary import read_raw_binary
from gateway.protocol.tensors import ModelMetadata, TensorSpec
from tests.support.checks.refused import refused_with


def model(datatype: str, *shapes: list[int], batching: bool = False) -> ModelMetadata:
    tensors = [
        TensorSpec(f"in{i}", DATATYPES[datatype], tuple(shape)) for i, shape in enumerate(shapes)
    ]
    return ModelMetadata("m", tuple(tensors), batching)


# Cases that Triton was observed to handle, and similar ones.
ACCEPTED = [
    (model("FP32", [-1]), 8, [2]),
    (model("FP32", [-1, -1, 4], batching=True), 16, [1, 1, 4]),
    (model("FP32", [-1], batching=True), 4, [1]),
    (model("UINT8", [2, -1, 2]), 8, [2, 2, 2]),
    (model("FP64", [-1, 0]), 0, [0, 0]),
]


@pytest.mark.parametrize(("metadata", "size", "shape"), ACCEPTED)
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


REFUSED = [
    (model("FP32"), 4, "metadata of model 'm' lists no inputs"),
    (model("FP32", [-1], [-1]), 4, "model 'm' takes 2 inputs; a raw binary request"),
    (model("FP32", [-1, -1]), 4, "shape [-1, -1]; a raw binary request allows at most 1 variable"),
    (model("FP32", [-1]), 3, "'in0' of shape [-1] and datatype FP32 takes a multiple of 4 bytes"),
    (model("FP32", [2, 2]), 15, "'in0' of shape [2, 2] and datatype FP32 takes 16 bytes, got 15"),
    (model("BYTES", [2]), 4, "'in0' of model 'm' is BYTES of shape [2]; a raw binary request"),
    (model("BYTES", [1]), 2**32, "input 'in0' can take at most 4 GiB in one BYTES element"),
]


@pytest.mark.parametrize(("metadata", "size", "message"), REFUSED)
def test_model_that_cannot_take_raw_binary_is_refused(
    metadata: ModelMetadata, size: int, message: str
) -> None:
    with refused_with(ErrorKind.BAD_REQUEST, message):
        read_raw_binary(metadata, size)
