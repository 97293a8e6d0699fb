"""What is known of tensors and models before any data is seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.protocol.datatypes import Datatype

MAX_RANK = 64
"""Dimensions that a tensor has at most: as many as numpy's arrays have."""

MAX_TENSORS = 1024
"""Tensors that a request has at most, unless the settings say otherwise."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as a model's metadata declares it; -1 marks a dimension of variable size."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """A model's inputs as a request must bring them, and its outputs where they are known.

    Where ``batching`` holds, the leading dimension of every shape is the batch dimension; None, by
    which it is not, is of a server that does not say.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    batching: bool | None
    outputs: tuple[TensorSpec, ...] = ()


# More elements than any body can hold: beyond it the exact product does not matter, and a shape
# of many huge dimensions must not cost the time of multiplying them out.
_BOUNDLESS = 2**63


def element_count(shape: Sequence[int]) -> int:
    """Give the number of elements of a tensor of this shape; 2**63 stands for that or more."""
    if 0 in shape:
        return 0
    count = 1
    for size in shape:
        count *= size
        if count >= _BOUNDLESS:
            return _BOUNDLESS
    return count
