"""Decodes runs of JSON elements into the binary form of a datatype."""

from __future__ import annotations

import json
from collections.abc import Callable, Set
from itertools import chain
from typing import Any, Final

import numpy as np
import orjson

from gateway.codec import native
from gateway.codec.elements.bytes_elements import PREFIX_SIZE, PartialElement, pack_strings
from gateway.codec.elements.diagnose import (
    ELEMENT_TYPES,
    diagnose_run,
    invalid_array_error,
    split_run,
)
from gateway.codec.elements.rounding import Values, has_many_digits, has_ties, round_text
from gateway.codec.json.array_scanner import ElementRun, StringPart, find_string_cut
from gateway.protocol.datatypes import Datatype, Family
from gateway.protocol.error_vocabulary import REQUEST, ErrorVocabulary
from gateway.sizes import CONVERT_CHUNK, QUOTED_NAME

_FLOATS_OR_NULL: Final = ELEMENT_TYPES[Family.FLOAT] | {type(None)}


def decode_numbers(text: bytes, datatype: Datatype) -> bytes | None:
    """Decode a JSON array, nested or flat, of numbers or booleans.

    Also reads the bare NaN, Infinity and -Infinity that clients write. Returns None if the text is
    no such array, or if an element does not fit; of a text that would take Python more than one
    time slice, also if C is not sure.
    """
    code = native.DATATYPE_CODES.get(datatype.name)
    data = None if code is None else native.decode_numbers(text, code)
    if data is None and (code is None or len(text) <= CONVERT_CHUNK):
        data = decode_plainly(text, datatype)
    return data


def decode_plainly(text: bytes, datatype: Datatype, null_is_nan: bool = False) -> bytes | None:
    """Decode an array by way of Python's objects, exactly as C does.

    With ``null_is_nan``, null is NaN among floats.
    """
    if datatype.floats is not None:
        values = _parse_floats(text, null_is_nan)
        rounded = None if values is None else round_text(values, text, datatype)
        return None if rounded is None else rounded.tobytes()
    elements = _parse_elements(text, ELEMENT_TYPES[datatype.family])
    if elements is None or datatype.integers is None:
        return None if elements is None else bytes(elements)
    return pack_integers(elements, datatype)


def pack_integers(elements: list[Any], datatype: Datatype) -> bytes | None:
    """Return integers in binary form; None if one does not fit."""
    limits = datatype.integers
    assert limits is not None
    if elements and not limits.least <= min(elements) <= max(elements) <= limits.most:
        return None
    return np.array(elements, datatype.dtype).tobytes()


def _parse_floats(text: bytes, null_is_nan: bool) -> Values | None:
    """Parse an array into the doubles nearest to its numbers; None for any other text."""
    types = _FLOATS_OR_NULL if null_is_nan else ELEMENT_TYPES[Family.FLOAT]
    is_long = has_many_digits(text)
    elements, infinities = None if is_long else _parse_elements(text, types), 0
    if elements is None and (is_long or b"N" in text or b"I" in text):
        # The standard library takes the bare words, but makes infinities of large numbers, too.
        elements, infinities = _parse_elements(text, types, _parse_with_words), text.count(b"I")
    if elements is None:
        return None
    try:
        values = np.array(elements, np.float64)
    except OverflowError:
        return None
    return values if np.count_nonzero(np.isinf(values)) == infinities else None


def _parse_with_words(text: bytes) -> Any:
    return json.loads(text.decode("ascii"))


def _parse_elements(
    text: bytes, types: Set[type], parse: Callable[[bytes], Any] = orjson.loads
) -> list[Any] | None:
    """Parse an array, nested or flat, of elements of some types; None for any other text."""
    try:
        items = parse(text)
        if type(items) is not list:
            return None
        while list in (kinds := set(map(type, items))):
            items = list(chain.from_iterable(items)) if len(kinds) == 1 else _collect(items, [])
    except (ValueError, RecursionError):
        return None
    return items if kinds <= types else None


def _collect(items: list[Any], flat: list[Any]) -> list[Any]:
    """Append the elements of arrays of any depth, visiting each once."""
    for item in items:
        if type(item) is list:
            _collect(item, flat)
        else:
            flat.append(item)
    return flat


def decode_strings(array: bytes) -> tuple[int, bytes] | None:
    """Return the number of an array's strings, and their bytes; None if anything else is in it."""
    decoded = native.decode_strings(array)
    return _decode_strings_plainly(array) if decoded is None else decoded


def _decode_strings_plainly(array: bytes) -> tuple[int, bytes] | None:
    strings = _parse_elements(array, ELEMENT_TYPES[Family.TEXT])
    return None if strings is None else (len(strings), pack_strings(strings))


class TensorDecoder:
    """Decodes the runs of one tensor's ``data`` into chunks of its binary form.

    ``label`` names the tensor in errors. ``feed`` raises GatewayError (400, 502) that names tensor,
    index and value of an element that is invalid for the datatype.
    """

    def __init__(self, label: str, datatype: Datatype, words: ErrorVocabulary = REQUEST) -> None:
        self.chunks: list[bytes] = []
        self.size = 0
        self.count = 0
        self._label = label
        self._words = words
        self.datatype = datatype
        self._code = native.DATATYPE_CODES.get(datatype.name)
        self._partial_element: PartialElement | None = None

    def feed(self, item: ElementRun | StringPart) -> None:
        """Decode the next run, or the next piece of a long string."""
        if isinstance(item, StringPart):
            self._feed_string_part(item)
            return
        decoded = self.try_decode(item)
        if decoded is None:
            raise self._error_in_run(item)
        count, data = decoded
        self.append(count, data)

    def append(self, count: int, data: bytes) -> None:
        """Take the next elements in binary form."""
        self.count += count
        self.chunks.append(data)
        self.size += len(data)

    def try_decode(self, run: ElementRun) -> tuple[int, bytes] | None:
        """Return the number of a run's elements, and their bytes; None if one is invalid."""
        size = self.datatype.size
        if size is None:
            return self._decode_strings(run)
        null_is_nan, data = self._words.null_is_nan, None
        if self._code is not None:
            data = native.decode_numbers(
                run.view, self._code, run.depth_before, run.depth_after, null_is_nan
            )
        if data is None and not run.lacks_element:
            data = decode_plainly(run.balanced(), self.datatype, null_is_nan)
        return None if data is None else (len(data) // size, data)

    def _error_in_run(self, run: ElementRun) -> Exception:
        """Make the error for a run; only a small part of it is searched element by element."""
        index = self.count
        for part in split_run(run):
            decoded = self.try_decode(part)
            if decoded is None:
                return diagnose_run(
                    self._label, self.datatype, part, index, self.try_decode, self._words
                )
            index += decoded[0]
            if part.depth_after < 1:
                break
        return invalid_array_error(self._label, max(self.count, index - 1), self._words)

    def has_ties(self, run: ElementRun) -> bool:
        """Tell whether rounding any number of a run depends on its text."""
        if self.datatype.floats is None:
            return False
        values = _parse_floats(run.balanced(), null_is_nan=False)
        return values is not None and has_ties(values, self.datatype)

    def _decode_strings(self, run: ElementRun) -> tuple[int, bytes] | None:
        decoded = native.decode_strings(run.view, run.depth_before, run.depth_after)
        if decoded is None and not run.lacks_element:
            decoded = _decode_strings_plainly(run.balanced())
        if decoded is None or self._partial_element is None:
            return decoded
        # The first string is the placeholder of the long one.
        self.end_element()
        count, data = decoded
        return count, data[PREFIX_SIZE:]

    def _feed_string_part(self, part: StringPart) -> None:
        text = native.decode_text(part.text)
        if text is None:
            text = self._parse_string_part(part)
        if self.datatype.family is not Family.TEXT:
            # The error quotes this: split no escape and no character.
            start = part.text[:QUOTED_NAME]
            cut = find_string_cut(start, full=True, last=True)
            end = len(start) if cut is None else cut[0]
            run = ElementRun(b'["' + start[:end] + b'"]', 0, 0, first=True)
            raise self._error_in_run(run)
        self.append_to_element(text)

    def _parse_string_part(self, part: StringPart) -> bytes:
        try:
            text: str = orjson.loads(b'"' + part.text + b'"')
        except orjson.JSONDecodeError as error:
            raise self._words.malformed(
                f"{self._label}: element {self.count} is not a valid JSON string ({error.msg})"
            ) from None
        return text.encode()

    def append_to_element(self, data: bytes) -> None:
        """Take the next bytes of a BYTES element that arrives in pieces."""
        if self._partial_element is None:
            self._partial_element = PartialElement(self.chunks)
            self.size += PREFIX_SIZE
        self._partial_element.append(data)
        self.size += len(data)

    def end_element(self) -> None:
        """End the element that arrived in pieces; the caller counts it."""
        assert self._partial_element is not None
        try:
            self._partial_element.end()
        except ValueError:
            raise self._words.malformed(
                f"{self._label}: element {self.count} is longer than 4 GiB"
            ) from None
        self._partial_element = None
