"""The settings of models: what they take and give, where servers do not say it."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PlainValidator

from gateway.settings.values.fields import Section, count
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
"""What the elements of a tensor are."""

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
    """Declare an input or an output."""

    name: Annotated[str, PlainValidator(_name, json_schema_input_type=str)] = Field(
        description="Its name."
    )
    datatype: Datatype = Field(description="What its elements are.")
    shape: tuple[Annotated[int, PlainValidator(_dimension, json_schema_input_type=int)], ...] = (
        Field(
            description="Its dimensions, -1 for one that varies; without that of the batch, where"
            " the model batches."
        )
    )


def _once(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    names = [tensor.name for tensor in tensors]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the tensor {describe(name)} is declared twice")
    return tensors


class Model(Section):
    """Declare a model: what requests for it may bring, and what it answers."""

    inputs: Annotated[tuple[Tensor, ...], Field(min_length=1), AfterValidator(_once)] = Field(
        description="What it takes."
    )
    outputs: Annotated[tuple[Tensor, ...], AfterValidator(_once)] = Field(
        default=(), description="What it gives, as far as it is known."
    )
    max_batch_size: Annotated[int, count("0", "1000000")] = Field(
        default=0,
        description="The largest batch, whose dimension goes before those of every shape; 0 for a"
        " model that does not batch.",
    )
