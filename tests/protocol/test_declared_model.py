from __future__ import annotations

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.declared_model import DeclaredModel, complete_metadata, find_differences
from gateway.protocol.messages import InputTensor
from gateway.protocol.tensors import ModelMetadata, TensorSpec


def spec(name: str, datatype: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, DATATYPES[datatype], shape)


def came(name: str, datatype: str, *shape: int) -> InputTensor:
    return InputTensor(name, DATATYPES[datatype], shape)


def declared(*inputs: TensorSpec, outputs: tuple[TensorSpec, ...] = ()) -> DeclaredModel:
    return DeclaredModel(ModelMetadata("m", inputs, False, outputs))


PLAIN = declared(spec("x", "FP32", -1, 3), spec("y", "BYTES", 1))
BATCHED = DeclaredModel(ModelMetadata("m", (spec("x", "INT8", -1, 2, -1),), True), 4)
SCALAR = declared(spec("x", "FP32"))

TAKEN = [
    (PLAIN, came("x", "FP32", 7, 3)),
    (SCALAR, came("x", "FP32")),
    (BATCHED, came("x", "INT8", 4, 2, 0)),
]
X = "input 'x' of model 'm' is declared as"
REFUSED = [
    (PLAIN, came("z", "FP32", 7, 3), "model 'm' has no input 'z'; declared: 'x', 'y'"),
    (PLAIN, came("x", "FP64", 7, 3), f"{X} FP32 [-1, 3], got FP64 [7, 3]"),
    (PLAIN, came("x", "FP32", 7, 4), f"{X} FP32 [-1, 3], got FP32 [7, 4]"),
    (
        BATCHED,
        came("x", "INT8", 2, 9),
        f"{X} INT8 [-1, 2, -1] in batches of 1 to 4, got INT8 [2, 9]",
    ),
    (BATCHED, came("x", "INT8", 1, 3, 9), "in batches of 1 to 4, got INT8 [1, 3, 9]"),
]


@pytest.mark.parametrize(("model", "tensor"), TAKEN)
def test_declared_inputs_are_accepted(model: DeclaredModel, tensor: InputTensor) -> None:
    model.check([tensor])
    assert model.accepts([tensor])


@pytest.mark.parametrize(("model", "tensor", "message"), REFUSED)
def test_other_inputs_are_refused(model: DeclaredModel, tensor: InputTensor, message: str) -> None:
    with pytest.raises(GatewayError) as caught:
        model.check([came("x", *_good(model)), tensor])
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    assert caught.value.message.endswith(message)
    assert not model.accepts([tensor])


def _good(model: DeclaredModel) -> tuple[str, *tuple[int, ...]]:
    first = model.metadata.inputs[0]
    return (first.datatype.name, *(abs(size) for size in first.shape))


X_OF_SERVER, Y_OF_SERVER = spec("x", "INT64", 1), spec("out", "BYTES", 1)
OURS = declared(spec("x", "FP32", -1), outputs=(spec("out", "FP32", -1),))


@pytest.mark.parametrize(
    ("inputs", "outputs", "wanted"),
    [
        ((), (), OURS.metadata),
        ((X_OF_SERVER,), (), ModelMetadata("m", (X_OF_SERVER,), True, OURS.metadata.outputs)),
        ((), (Y_OF_SERVER,), ModelMetadata("m", OURS.metadata.inputs, False, (Y_OF_SERVER,))),
    ],
)
def test_reported_metadata_overrides_declared_metadata(
    inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], wanted: ModelMetadata
) -> None:
    known = ModelMetadata("m", inputs, True, outputs)
    assert complete_metadata(known, OURS) == wanted
    assert complete_metadata(known, None) is known


@pytest.mark.parametrize(
    ("batching", "shape", "wanted"),
    [
        (None, (-1, 2, -1), True),
        (None, (8, 2, 5), True),  # the server reports more of the sizes
        (None, (2, -1), None),  # without the batch dimension, or for another model
        (False, (-1, 2, -1), False),
    ],
)
def test_declared_batching_counts_if_the_server_does_not_say(
    batching: bool | None, shape: tuple[int, ...], wanted: bool | None
) -> None:
    known = ModelMetadata("m", (spec("x", "INT8", *shape),), batching)
    assert complete_metadata(known, BATCHED).batching is wanted
    assert complete_metadata(known, BATCHED).inputs == known.inputs
    other = ModelMetadata("m", (spec("y", "INT8", *shape),), None)
    assert complete_metadata(other, BATCHED).batching is None


KNOWN = ModelMetadata("m", (spec("x", "FP32", -1),), False, (spec("out", "FP32", -1),))


@pytest.mark.parametrize(
    ("known", "max_batch_size", "told"),
    [
        (KNOWN, 0, []),
        (ModelMetadata("m", (), False), None, []),
        (KNOWN, 8, ["max_batch_size is 8, declared 0"]),
        (
            ModelMetadata("m", (spec("x", "FP64", -1),), False),
            0,
            ["input 'x' is FP64 [-1], declared FP32 [-1]"],
        ),
        (
            ModelMetadata("m", (spec("z", "FP32", -1),), False, (spec("other", "FP32", -1),)),
            0,
            ["there is no input 'x'", "there is no output 'out'", "input 'z' is not declared"],
        ),
    ],
)
def test_differences_are_described(
    known: ModelMetadata, max_batch_size: int | None, told: list[str]
) -> None:
    assert list(find_differences(OURS, known, max_batch_size)) == told
