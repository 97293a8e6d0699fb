"""Errors of JSON that is not valid: they quote the text as it was sent, and say at which byte."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.errors import GatewayError
from gateway.protocol.error_vocabulary import ErrorVocabulary

_AROUND = 20
"""Bytes that are quoted before an error, and behind it."""

_ELIDED = "[…]"
"""What a quotation has in place of an array that was cut out."""

_DEEPEST = 1024
"""Levels of nesting that the library takes."""

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
    """An array that was cut out of a JSON text, and the placeholder that was put there.

    ``start`` and ``end`` are its bytes in the text as it was sent; ``at`` and ``behind`` are those
    of the placeholder in what is left of the text.
    """

    start: int
    end: int
    at: int
    behind: int


def parse_json(text: bytes) -> Any:
    """Parse JSON; raises orjson.JSONDecodeError."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if error.msg != "failed to allocate memory":
            raise
    # orjson 3.13 reserves too little memory where two spaces behind the first bracket make it
    # expect indented JSON, and a thousand values of a byte each follow. Before it they do no harm.
    start = text.lstrip(_SPACE)
    rest = start[1:].lstrip(_SPACE)
    return orjson.loads(b" " * (len(text) - 1 - len(rest)) + start[:1] + rest)


def invalid_json_error(
    message: ErrorVocabulary,
    text: bytes,
    error: orjson.JSONDecodeError,
    cuts: Sequence[ExtractedArray] = (),
    before: int = 0,
) -> GatewayError:
    """Make the error of a text that is not JSON; ``cuts`` are the arrays cut out of it, in order.

    The error quotes what was sent, and counts its bytes, of which so many come ``before`` the text.
    """
    if error.msg == "depth limit exceeded":
        return message.malformed(f"{message.name} is JSON nested deeper than {_DEEPEST}")
    if not text.strip():
        return message.malformed(f"{message.name} is not valid JSON (it is empty)")
    place = min(_byte_of(text, error), len(text))
    near = quote_around(text, place, cuts)
    return message.malformed(
        f"{message.name} is not valid JSON "
        f"({_reason(error)} at byte {before + original_offset(place, cuts)}), near: {near}"
    )


def describe_json_kind(start: bytes) -> str:
    """Say what kind of JSON value starts like this."""
    return _KINDS.get(start[:1], "no JSON value")


def original_offset(place: int, cuts: Sequence[ExtractedArray]) -> int:
    """Give where in the text as it was sent a byte stands that is at ``place`` in what is left."""
    sent = place
    for cut in cuts:
        if place < cut.behind:
            return min(sent, cut.start)
        sent = cut.end + place - cut.behind
    return sent


def quote_around(text: bytes, place: int, cuts: Sequence[ExtractedArray] = ()) -> str:
    """Quote what stands around a place in what is left of a text, without placeholders."""
    start, end = _character_start(text, max(0, place - _AROUND)), place + _AROUND
    parts: list[str] = []
    for cut in cuts:
        if start < cut.behind and cut.at < end:
            parts += (quote_bytes(text[start : cut.at]), _ELIDED)
            start = cut.behind
    return "".join([*parts, quote_bytes(text[start:end])])


def quote_bytes(text: bytes) -> str:
    """Quote a piece of a text, which may end within a character.

    Bytes that are not UTF-8 are shown as escapes.
    """
    return codecs.getincrementaldecoder("utf-8")("backslashreplace").decode(text)


def _character_start(text: bytes, place: int) -> int:
    """Give where the next character begins, at a place or behind it."""
    # Of UTF-8's bytes, at most three follow the first of a character.
    inside = text[place : place + 3] if place else b""
    return place + len(inside) - len(inside.lstrip(_CONTINUATIONS))


def _byte_of(text: bytes, error: orjson.JSONDecodeError) -> int:
    """Give the byte of a text at which it stops to be JSON."""
    try:
        text.decode()
    except UnicodeDecodeError as undecodable:
        return undecodable.start
    return len(error.doc[: error.pos].encode())  # the library counts characters


def _reason(error: orjson.JSONDecodeError) -> str:
    # It names surrogates, whatever the bytes are.
    return "not UTF-8" if "not valid UTF-8" in error.msg else error.msg
