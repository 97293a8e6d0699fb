"""Random messages of any type."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from gateway.codec.grpc.document_form import is_map

_TEXTS = ("", "m", "m" * 200, "é", "a/b", "trace_level")
_NUMBERS = (0, 1, 2, 127, 128, 2**31 - 1)
_FLOATS = (0.0, 0.5, 16777216.0, float("inf"), float("-inf"), float("nan"))
_MAX_DEPTH = 4


def fill(chance: random.Random, message: Any, depth: int = 0) -> Any:
    """Set some fields of a message, and return it."""
    for field in message.DESCRIPTOR.fields:
        if not chance.randrange(3) or (field.message_type is not None and depth == _MAX_DEPTH):
            continue
        if is_map(field):
            _fill_map(chance, getattr(message, field.name), field.message_type, depth)
        elif field.is_repeated:
            values = getattr(message, field.name)
            for _ in range(chance.randrange(3)):
                if field.message_type is None:
                    values.append(_scalar(chance, field))
                else:
                    fill(chance, values.add(), depth + 1)
        elif field.message_type is not None:
            fill(chance, getattr(message, field.name), depth + 1).SetInParent()
        else:
            setattr(message, field.name, _scalar(chance, field))
    return message


def _fill_map(chance: random.Random, entries: Any, entry: Any, depth: int) -> None:
    key, value = entry.fields
    for _ in range(chance.randrange(3)):
        name = _scalar(chance, key)
        if value.message_type is None:
            entries[name] = _scalar(chance, value)
        else:
            fill(chance, entries[name], depth + 1).SetInParent()


def _scalar(chance: random.Random, field: Any) -> Any:
    """Return a value for a field, by the runtime's Python types."""
    kinds: dict[int, Callable[[], Any]] = {
        field.CPPTYPE_STRING: lambda: chance.choice(_TEXTS),
        field.CPPTYPE_BOOL: lambda: chance.random() < 0.5,
        field.CPPTYPE_FLOAT: lambda: chance.choice([*_FLOATS, 0.125]),
        field.CPPTYPE_DOUBLE: lambda: chance.choice([*_FLOATS, 0.1]),
        field.CPPTYPE_ENUM: lambda: chance.choice([0, 1, 99]),
        field.CPPTYPE_INT32: lambda: chance.choice([*_NUMBERS, -1, -(2**31)]),
        field.CPPTYPE_INT64: lambda: chance.choice([*_NUMBERS, -1, -(2**63), 2**63 - 1]),
        field.CPPTYPE_UINT64: lambda: chance.choice([*_NUMBERS, 2**64 - 1]),
    }
    if field.type == field.TYPE_BYTES:
        return chance.randbytes(chance.randrange(5))
    make = kinds.get(field.cpp_type, lambda: chance.choice(_NUMBERS))
    return make()
