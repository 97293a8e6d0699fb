"""Parts of inference headers."""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]


def tensor(**changes: Any) -> Fields:
    """Make an input or output; None removes a field."""
    entry = {"name": "x", "datatype": "FP32", "shape": [2]} | changes
    return {key: value for key, value in entry.items() if value is not None}


def nested(depth: int) -> bytes:
    """Make a JSON object nested this deep."""
    return b'{"x":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
