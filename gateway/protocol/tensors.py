"""Tensors and models as metadata describes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.protocol.datatypes import Datatype

MAX_RANK: Final = 64
"""Dimensions that a tensor may have: numpy's limit."""

MAX_TENSORS: Final = 1024
"""Tensors that a request may have by default."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as metadata declares it; -1 is a dimension of variable size."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """A model's inputs as requests must send them, and its outputs if known.

    With ``batching`` the first dimension of every shape is the batch. None means that the server
    does not say; then it is not.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    batching: bool | None
    outputs: tuple[TensorSpec, ...] = ()


# More elements than any body can hold. Beyond it the exact product does not matter, and a shape
# of many huge dimensions must not cost the time to multiply them.
_MAX_COUNT: Final = 2**63


def element_count(shape: Sequence[int]) -> int:
    """Return the number of elements of a shape; 2**63 means that or more."""
    if 0 in shape:
        return 0
    count = 1
    for size in shape:
        count *= size
        if count >= _MAX_COUNT:
            return _MAX_COUNT
    return count
