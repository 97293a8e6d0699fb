"""Parses and encodes JSON documents, and reads their members with type checks."""

import json
from typing import Any, Final, TypeVar

from gateway.demo.server.errors import RequestError
from gateway.demo.server.tensors import NamedFloat

T = TypeVar("T")

_TYPE_NAMES: Final[dict[type, str]] = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "integer",
}


def parse_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object; if a name is repeated, the first member counts, as in Triton.

    Raises RequestError for any other text, and for nesting that is too deep for Python's parser.
    """
    try:
        document = json.loads(
            text.decode(),
            parse_constant=NamedFloat,
            object_pairs_hook=lambda members: dict(reversed(members)),
        )
    except (ValueError, RecursionError) as error:
        raise RequestError(f"failed to parse the request JSON buffer: {error}") from None
    return check_type(document, dict, "the request")


def check_type(value: object, kind: type[T], what: str) -> T:
    """Return `value` if it is of type `kind`, else raise RequestError; a bool is no integer."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RequestError(f"Unable to parse {what}: not a JSON {_TYPE_NAMES[kind]}")
    return value


def get_member(document: dict[str, Any], key: str, kind: type[T]) -> T:
    """Return a required member."""
    if key not in document:
        raise RequestError(f"Unable to parse '{key}': missing")
    return check_type(document[key], kind, f"'{key}'")


def get_optional(document: dict[str, Any], key: str, default: T) -> T:
    """Return a member, which must be of the default's type; the default if there is none."""
    return get_member(document, key, type(default)) if key in document else default


def get_size(document: dict[str, Any], key: str, default: int = 0) -> int:
    """Return a member, which must be an integer of at least 0."""
    return check_size(get_optional(document, key, default), f"'{key}'")


def check_size(value: object, what: str) -> int:
    """Return `value` if it is an integer of at least 0, else raise RequestError."""
    number = check_type(value, int, what)
    if number < 0:
        raise RequestError(f"Unable to parse {what}: {number} is negative")
    return number


def encode(document: object) -> bytes:
    """Encode a JSON document: compact, in UTF-8, with NaN and infinities as bare tokens."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    return text.encode(errors="replace")  # an error message may quote a lone surrogate
