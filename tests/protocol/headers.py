"""Parts of inference headers."""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]


def tensor(**changes: Any) -> Fields:
    """Give an input or output; a change to None leaves the field out."""
    entry = {"name": "x", "datatype": "FP32", "shape": [2]} | changes
    return {key: value for key, value in entry.items() if value is not None}


def nested(depth: int) -> bytes:
    """Give an object that nests in so many levels."""
    return b'{"x":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
