"""Errors of invalid JSON, which quote the text as sent and name the byte."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.errors import GatewayError, shorten
from gateway.protocol.error_vocabulary import ErrorVocabulary
from gateway.sizes import QUOTED_NAME

_AROUND = 20
"""Bytes that are quoted before and after an error."""

_ELIDED = "[…]"
"""Stands for an extracted array in a quotation."""

_DEEPEST = 1024
"""Levels of nesting that orjson accepts."""

_KINDS = {
    **{bytes([digit]): "a number" for digit in b"-0123456789"},
    b'"': "a string",
    b"{": "an object",
    b"[": "an array",
    b"t": "true",
    b"f": "false",
    b"n": "null",
}

_SPACE = b" \t\n\r"
_CONTINUATIONS = bytes(range(0x80, 0xC0))


@dataclass(frozen=True, slots=True)
class ExtractedArray:
    """An array that was replaced by a placeholder in a JSON text.

    ``start`` and ``end`` are its offsets in the text as sent; the placeholder's are those in the
    remaining text.
    """

    start: int
    end: int
    placeholder_start: int
    placeholder_end: int


def parse_json(text: bytes) -> Any:
    """Parse JSON; raises orjson.JSONDecodeError."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if error.msg != "failed to allocate memory":
            raise
    # orjson 3.13 bug: two spaces after the first bracket make it expect indented JSON and reserve
    # too little memory if a thousand 1-byte values follow. Spaces before the bracket are harmless.
    start = text.lstrip(_SPACE)
    rest = start[1:].lstrip(_SPACE)
    return orjson.loads(b" " * (len(text) - 1 - len(rest)) + start[:1] + rest)


def invalid_json_error(
    words: ErrorVocabulary,
    text: bytes,
    error: orjson.JSONDecodeError,
    cuts: Sequence[ExtractedArray] = (),
    before: int = 0,
) -> GatewayError:
    """Make the error of invalid JSON; ``cuts`` are the arrays extracted from it, in order.

    The error quotes the text as sent and names the byte; ``before`` bytes precede the text.
    """
    if error.msg == "depth limit exceeded":
        return words.malformed(f"{words.name} is JSON nested deeper than {_DEEPEST}")
    if not text.strip():
        return words.malformed(f"{words.name} is not valid JSON (it is empty)")
    offset = min(_byte_of(text, error), len(text))
    near = quote_around(text, offset, cuts)
    return words.malformed(
        f"{words.name} is not valid JSON "
        f"({_reason(error)} at byte {before + original_offset(offset, cuts)}), near: {near}"
    )


def describe_json_kind(start: bytes) -> str:
    """Name the kind of a JSON value by its first byte."""
    return _KINDS.get(start[:1], "no JSON value")


def original_offset(offset: int, cuts: Sequence[ExtractedArray]) -> int:
    """Map an offset in the remaining text to the text as sent."""
    sent = offset
    for cut in cuts:
        if offset < cut.placeholder_end:
            return min(sent, cut.start)
        sent = cut.end + offset - cut.placeholder_end
    return sent


def quote_around(text: bytes, offset: int, cuts: Sequence[ExtractedArray] = ()) -> str:
    """Quote the remaining text around an offset, without placeholders."""
    start, end = _character_start(text, max(0, offset - _AROUND)), offset + _AROUND
    parts: list[str] = []
    for cut in cuts:
        if start < cut.placeholder_end and cut.placeholder_start < end:
            parts += (quote_bytes(text[start : cut.placeholder_start]), _ELIDED)
            start = cut.placeholder_end
    return "".join([*parts, quote_bytes(text[start:end])])


def quote_bytes(text: bytes) -> str:
    """Quote bytes as text; the last character may be incomplete.

    Bytes that are not UTF-8 become escapes.
    """
    return codecs.getincrementaldecoder("utf-8")("backslashreplace").decode(text)


def _character_start(text: bytes, offset: int) -> int:
    """Return the offset of the first character at or after an offset."""
    # In UTF-8, at most three bytes follow the first of a character.
    inside = text[offset : offset + 3] if offset else b""
    return offset + len(inside) - len(inside.lstrip(_CONTINUATIONS))


def _byte_of(text: bytes, error: orjson.JSONDecodeError) -> int:
    """Return the offset of a text's first invalid byte."""
    try:
        text.decode()
    except UnicodeDecodeError as undecodable:
        return undecodable.start
    return len(error.doc[: error.pos].encode())  # orjson counts characters


def _reason(error: orjson.JSONDecodeError) -> str:
    # orjson's message mentions surrogates, whatever the bytes are.
    return "not UTF-8" if "not valid UTF-8" in error.msg else error.msg


def describe_value(value: object) -> str:
    """Describe a value of a wrong type for an error."""
    if isinstance(value, dict):
        return "an object"
    return "an array" if isinstance(value, list) else quote_value(value)


def quote_value(value: object) -> str:
    """Quote the start of a value for an error."""
    return shorten(orjson.dumps(value).decode(), QUOTED_NAME)
