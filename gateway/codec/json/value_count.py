"""Limits the values in JSON that is parsed in one call: each takes time, however short it is."""

from __future__ import annotations

from typing import Final

from gateway.codec.structure_scan import count_marks
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.tensors import MAX_TENSORS

VALUES_PER_TENSOR: Final = 32
"""More than a tensor of 16 dimensions with a few parameters. A thousand of them take some 7 ms."""

_MARKS: Final = b",[{"
"""One stands before each value, but for those of members that are alone in their object."""


def check_value_count(text: bytes | bytearray, tensor_cap: int = MAX_TENSORS) -> None:
    """Refuse JSON with more values than ``tensor_cap`` tensors need; raises GatewayError (413)."""
    cap = VALUES_PER_TENSOR * max(tensor_cap, MAX_TENSORS)
    # Quick bounds first: the second counts marks inside strings, too.
    if len(text) <= cap or sum(map(text.count, _MARKS)) <= cap:
        return
    if sum(count_marks(bytes(text), _MARKS)) > cap:
        raise GatewayError(
            ErrorKind.TOO_LARGE,
            f"the request has, without its tensors' data, more than {cap} values: "
            f"{VALUES_PER_TENSOR} for each tensor that it may have (limits.max_tensors)",
        )
