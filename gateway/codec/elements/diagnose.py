"""Finds the invalid element of a run, and describes what is wrong with it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import numpy as np

from gateway.codec.json.array_scanner import ElementRun
from gateway.codec.structure_scan import ARRAY_STEPS, mask_strings, nesting_steps
from gateway.errors import GatewayError, shorten
from gateway.protocol.datatypes import Datatype, Family
from gateway.protocol.error_vocabulary import REQUEST, ErrorVocabulary
from gateway.sizes import QUOTED_NAME

_TOKEN = re.compile(r'([ \t\n\r\[\],]*+)("(?:[^"\\]++|\\.)*+"?|[^ \t\n\r\[\],"]++)?+', re.DOTALL)
_SPACE = " \t\n\r"

_PART_SIZE = 1024
"""The size of the parts of a run that are examined element by element."""

ELEMENT_TYPES: dict[Family, frozenset[type]] = {
    Family.BOOLEAN: frozenset({bool}),
    Family.INTEGER: frozenset({int}),
    Family.FLOAT: frozenset({int, float}),
    Family.TEXT: frozenset({str}),
}
"""What Python's JSON libraries make of elements. For orjson, integers beyond 64 bits are floats."""

_NOT_JSON = "is not a JSON value"
_NOT_UTF8 = "is not UTF-8"
_HALF_SURROGATE = "holds half of a surrogate pair"
_MALFORMED = (_NOT_JSON, _NOT_UTF8, _HALF_SURROGATE)
"""What is wrong with a token that no datatype takes."""


def diagnose_run(
    label: str,
    datatype: Datatype,
    run: ElementRun,
    first_index: int,
    decode: Callable[[ElementRun], object | None],
    words: ErrorVocabulary = REQUEST,
) -> GatewayError:
    """Make the error for a run that could not be decoded.

    ``first_index`` is the flat index of the run's first element. ``decode`` returns None for an
    invalid one. The error names the tensor, and index and value of the first invalid element.
    """
    text = run.text.decode("utf-8", "surrogateescape")
    index, depth = first_index, run.depth_before
    for between, token in _TOKEN.findall(text):
        depth += between.count("[") - between.count("]")
        if not token:
            continue
        if reason := _describe_bracket_error(token, depth):
            last = index - (depth <= 0 or token.startswith("}"))
            return words.malformed(f"{label}: data {reason}, behind element {max(0, last)}")
        if token.startswith("{"):
            needed = f"{datatype.name} needs {datatype.family.value}"
            return words.wrong_datatype(f"{label}: element {index} is an object, {needed}")
        element = ElementRun(token.encode("utf-8", "surrogateescape"), 1, 1, first=True)
        if decode(element) is None:
            error = _describe_token_error(token, datatype)
            make_error = words.malformed if error in _MALFORMED else words.wrong_datatype
            return make_error(f"{label}: element {index} ({_quote(token)}) {error}")
        if index > first_index and not between.strip("]" + _SPACE):
            break  # a comma is missing
        index += 1
    return invalid_array_error(label, max(first_index, index - 1), words)


def _describe_bracket_error(token: str, depth: int) -> str:
    """Describe what is wrong with the brackets before a token, if anything is.

    ``depth`` counts the brackets open there.
    """
    if depth < 0:
        return "has a closing bracket too many"
    if not depth:
        return f"ends and is followed by {_quote(token)}"
    is_string = token.startswith('"')
    return "lacks a closing bracket" if "}" in token and "{" not in token and not is_string else ""


def invalid_array_error(label: str, near: int, words: ErrorVocabulary) -> GatewayError:
    """Make the error for invalid brackets or commas near element number ``near``."""
    return words.malformed(f"{label}: data is not a valid JSON array, near element {near}")


def split_run(run: ElementRun) -> Iterator[ElementRun]:
    """Split a run into small ones at its commas."""
    text = run.text
    codes, inside = mask_strings(text)
    steps = nesting_steps(text, inside, ARRAY_STEPS)
    depths = run.depth_before + np.cumsum(steps, dtype=np.int32)
    start, depth = 0, run.depth_before
    commas = np.flatnonzero((codes == ord(",")) & (inside == 0))
    behind = np.searchsorted(commas, np.arange(_PART_SIZE, len(text), _PART_SIZE))
    for cut in dict.fromkeys(commas[behind[behind < commas.size]].tolist()):
        depth_after = int(depths[cut])
        yield ElementRun(text[start:cut], depth, depth_after, run.first and not start)
        start, depth = cut + 1, depth_after
    yield ElementRun(text[start:], depth, run.depth_after, run.first and not start)


def _describe_token_error(token: str, datatype: Datatype) -> str:
    """Describe what is wrong with a token that is no element of a datatype."""
    try:
        value = _decode_json(token)
    except ValueError:
        return _NOT_JSON
    if type(value) not in ELEMENT_TYPES[datatype.family]:
        return f"is not {datatype.family.value}, as {datatype.name} needs"
    if isinstance(value, str):
        return _NOT_UTF8 if _escape_invalid_utf8(token) != token else _HALF_SURROGATE
    return f"does not fit {datatype.name}"


# Python refuses to parse integers of thousands of digits; of any, only the type matters.
_decode_json = json.JSONDecoder(parse_int=lambda _: 0).decode


def _escape_invalid_utf8(token: str) -> str:
    """Escape the bytes of a token that are not UTF-8."""
    return token.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _quote(token: str) -> str:
    return shorten(_escape_invalid_utf8(token), QUOTED_NAME)
