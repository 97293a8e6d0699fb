"""JSON documents: parse them, take typed members out of them, write them."""

import json
from typing import Any, Final, TypeVar

from gateway.demo.server.errors import RequestError
from gateway.demo.server.tensors import NamedFloat

T = TypeVar("T")

_NAMES: Final[dict[type, str]] = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "integer",
}


def parse_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object; of members of the same name the first counts, as in Triton.

    Raises RequestError for anything else, and for nesting deeper than Python's parser goes.
    """
    try:
        document = json.loads(
            text.decode(),
            parse_constant=NamedFloat,
            object_pairs_hook=lambda members: dict(reversed(members)),
        )
    except (ValueError, RecursionError) as error:
        raise RequestError(f"failed to parse the request JSON buffer: {error}") from None
    return as_type(document, dict, "the request")


def as_type(value: object, kind: type[T], what: str) -> T:
    """Return `value`, which must be of type `kind`; a bool is no integer."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RequestError(f"Unable to parse {what}: not a JSON {_NAMES[kind]}")
    return value


def member(document: dict[str, Any], key: str, kind: type[T]) -> T:
    """Return a member that must be there."""
    if key not in document:
        raise RequestError(f"Unable to parse '{key}': missing")
    return as_type(document[key], kind, f"'{key}'")


def optional(document: dict[str, Any], key: str, default: T) -> T:
    """Return a member of the default's type, or the default where there is none."""
    return member(document, key, type(default)) if key in document else default


def size(document: dict[str, Any], key: str, default: int = 0) -> int:
    """Return a member that must be an integer from 0 on."""
    return as_size(optional(document, key, default), f"'{key}'")


def as_size(value: object, what: str) -> int:
    """Return `value`, which must be an integer from 0 on."""
    number = as_type(value, int, what)
    if number < 0:
        raise RequestError(f"Unable to parse {what}: {number} is negative")
    return number


def to_text(document: object) -> bytes:
    """Write a JSON document: compact, UTF-8, with NaN and infinities as bare tokens."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    return text.encode(errors="replace")  # a lone surrogate may come back in an error message
