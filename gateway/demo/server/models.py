"""The models of the demo server."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gateway.demo.server.tensors import DTYPES, Array, RequestError

VERSION: Final = "1"  # the only version of each model


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output; `shape` has no batch dimension, and -1 is a variable dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the demo server.

    `compute` takes the arrays of the inputs and returns those of the outputs, in the order of the
    specs. With `max_batch_size` 0 the model does not batch. With `any_rank` the model accepts
    every shape. `split` divides the input of `generate_stream` into parts, one for each event.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    compute: Callable[..., Sequence[Array]]
    max_batch_size: int = 0
    any_rank: bool = False
    split: Callable[..., Sequence[Sequence[Array]]] = lambda *arrays: [arrays]


def _identity(array: Array) -> Sequence[Array]:
    return [array]


def _half(array: Array) -> Sequence[Array]:
    return [array * np.float16(0.5)]


def _add(left: Array, right: Array) -> Sequence[Array]:
    if left.shape != right.shape:
        raise RequestError(
            f"model 'add' takes two inputs of the same shape, "
            f"got {list(left.shape)} and {list(right.shape)}"
        )
    return [left + right]


def _upper(texts: Array) -> Sequence[Array]:
    # surrogateescape preserves bytes that are not UTF-8
    upper = [
        text.decode(errors="surrogateescape").upper().encode(errors="surrogateescape")
        for text in texts
    ]
    return [np.array(upper, object)]


def _words(texts: Array) -> Sequence[Sequence[Array]]:
    return [[np.array([word], object)] for text in texts for word in text.split()]


def _image(images: Array) -> Sequence[Array]:
    return [images.mean(axis=(2, 3), dtype=np.float32), 1 - images]


def _identity_model(datatype: str) -> Model:
    return Model(
        name=f"identity_{datatype.lower()}",
        inputs=(TensorSpec("INPUT0", datatype, (-1,)),),
        outputs=(TensorSpec("OUTPUT0", datatype, (-1,)),),
        compute=_identity,
        any_rank=True,
    )


_MODELS: Final = (
    Model(
        name="add",
        inputs=(TensorSpec("INPUT0", "FP32", (-1,)), TensorSpec("INPUT1", "FP32", (-1,))),
        outputs=(TensorSpec("SUM", "FP32", (-1,)),),
        compute=_add,
    ),
    Model(
        name="half",
        inputs=(TensorSpec("INPUT0", "FP16", (-1,)),),
        outputs=(TensorSpec("OUTPUT0", "FP16", (-1,)),),
        compute=_half,
    ),
    *map(_identity_model, DTYPES),
    Model(
        name="image",
        inputs=(TensorSpec("INPUT", "FP32", (3, 224, 224)),),
        outputs=(
            TensorSpec("MEAN", "FP32", (3,)),
            TensorSpec("INVERTED", "FP32", (3, 224, 224)),
        ),
        compute=_image,
        max_batch_size=8,
    ),
    Model(
        name="upper",
        inputs=(TensorSpec("INPUT0", "BYTES", (1,)),),
        outputs=(TensorSpec("OUTPUT0", "BYTES", (1,)),),
        compute=_upper,
        split=_words,
    ),
)

MODELS: Final = {model.name: model for model in _MODELS}
