"""Settings of declared models: their inputs and outputs."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from gateway.settings.values.fields import Check, Section, count
from gateway.settings.values.wording import describe

Datatype = Literal[
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "BF16",
    "FP32",
    "FP64",
    "BYTES",
]
"""Datatypes of tensors."""

_LARGEST = 2**31 - 1


def _dimension(value: object) -> int:
    if type(value) is int and (value == -1 or 1 <= value <= _LARGEST):
        return value
    raise ValueError(f"expected 1 to {_LARGEST}, or -1 where it varies, got {describe(value)}")


def _name(value: object) -> str:
    if isinstance(value, str) and value:
        return value
    raise ValueError(f"expected the name of a tensor, got {describe(value)}")


class Tensor(Section):
    """A declared input or output of a model."""

    name: Annotated[str, Check(_name, str)]
    """Name of the tensor."""
    datatype: Datatype
    """Datatype of its elements."""
    shape: tuple[Annotated[int, Check(_dimension, int)], ...]
    """Its dimensions, -1 for one that varies. Where the model batches, the batch dimension is left
    out."""


def _check_names(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    names = [tensor.name for tensor in tensors]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the tensor {describe(name)} is declared twice")
    return tensors


class Model(Section):
    """A declared model. Requests that do not fit its inputs are answered with 400."""

    inputs: Annotated[tuple[Tensor, ...], Field(min_length=1), AfterValidator(_check_names)]
    """Inputs of the model."""
    outputs: Annotated[tuple[Tensor, ...], AfterValidator(_check_names)] = ()
    """Outputs of the model, as far as they are known."""
    max_batch_size: Annotated[int, count("0", "1000000")] = 0
    """Largest batch. Its dimension goes before those of every shape. With 0, the model does not
    batch."""
