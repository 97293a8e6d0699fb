"""Decodes runs of JSON elements into the binary form of a datatype."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache
from itertools import chain
from typing import Any, Self

import numpy as np
import orjson

from gateway.codec import native
from gateway.codec.elements.bytes_elements import PREFIX_SIZE, PartialElement, pack_strings
from gateway.codec.elements.diagnose import diagnose_run, invalid_array_error, split_run
from gateway.codec.elements.fast_decode import (
    PARSE_ERRORS,
    native_decode,
    parse_numbers,
    pure_decode_numbers,
)
from gateway.codec.elements.fast_strings import fast_decode_strings
from gateway.codec.elements.rounding import (
    Values,
    find_separators,
    has_ties,
    needs_rounding,
    round_text,
)
from gateway.codec.json.array_scanner import ElementRun, StringPart, find_string_cut
from gateway.codec.offload_interface import ConversionJob
from gateway.protocol.datatypes import DATATYPES, Datatype, Family
from gateway.protocol.error_vocabulary import REQUEST, ErrorVocabulary
from gateway.sizes import NUMPY_MIN_TEXT, QUOTED_NAME

_LONG_DIGITS = 19
"""An integer with this number of digits may exceed 64 bits."""
_LONG_INTEGERS = re.compile(rb"([\[, \t\n\r]-?[0-9]{%d,}+)(?![0-9.eE])" % _LONG_DIGITS)
"""Such an integer, with the byte before it."""
_IS_DIGIT = bytes(code in b"0123456789" for code in range(256))
_IS_BEFORE_NUMBER = np.zeros(256, np.bool_)
_IS_BEFORE_NUMBER[list(b"[, \t\n\r")] = True
_IN_FRACTION = np.zeros(256, np.bool_)
_IN_FRACTION[list(b".eE")] = True

_BOOLEAN_BYTES = b"truefals[], \t\n\r"


@cache
def _job(datatype: Datatype) -> ConversionJob:
    """Return the job of a datatype, one for all decoders: there may be many tensors."""
    return ConversionJob(to_json=False, datatype=datatype)


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
        self.job = _job(datatype)
        # Not a bound method: a reference cycle would keep the chunks until the garbage collector
        # runs.
        self._convert = self._method_for(datatype)
        self._partial_element: PartialElement | None = None
        self._expects_nonfinite = False

    def feed(self, item: ElementRun | StringPart) -> None:
        """Decode the next run, or the next piece of a long string."""
        if isinstance(item, StringPart):
            self._feed_string_part(item)
            return
        count, data = self._decode_or_raise(item)
        self.count += count
        self._append(data)

    def reserve_chunk(self) -> int:
        """Reserve the chunk of a run that is offloaded; return its number."""
        self.chunks.append(b"")
        return len(self.chunks) - 1

    def fill_chunk(
        self, chunk_number: int, run: ElementRun, data: bytes | memoryview | None
    ) -> None:
        """Fill the reserved chunk of a run; with None, the run is decoded here.

        All reserved chunks before it must be filled.
        """
        width = self.datatype.size
        assert width is not None
        if data is None:
            # Indices in an error count from here.
            self.count = sum(map(len, self.chunks[:chunk_number])) // width
            _, data = self._decode_or_raise(run)
        self.chunks[chunk_number] = bytes(data)  # no copy if it is bytes
        self.size += len(data)
        self.count = self.size // width

    def _decode_or_raise(self, run: ElementRun) -> tuple[int, bytes]:
        decoded = self.try_decode(run)
        if decoded is None:
            raise self._error_in_run(run)
        return decoded

    def try_decode(self, run: ElementRun) -> tuple[int, bytes] | None:
        """Return the number of a run's elements, and their bytes; None if one is invalid."""
        data = native_decode(
            run.view, self.datatype, run.depth_before, run.depth_after, self._words.null_is_nan
        )
        if data is not None:
            return self._with_count(data)
        return None if run.lacks_element else self._convert(self, run)

    def _append(self, data: bytes) -> None:
        self.chunks.append(data)
        self.size += len(data)

    def _error_in_run(self, run: ElementRun) -> Exception:
        """Make the error for a run; only a small part of it is searched element by element."""
        index = self.count
        for part in split_run(run):
            decoded = self.try_decode(part)
            if decoded is None:
                return diagnose_run(self._label, self.datatype, part, index, self._words)
            index += decoded[0]
            if part.depth_after < 1:
                break
        return invalid_array_error(self._label, max(self.count, index - 1), self._words)

    @classmethod
    def _method_for(
        cls, datatype: Datatype
    ) -> Callable[[Self, ElementRun], tuple[int, bytes] | None]:
        of_family = {
            Family.BOOLEAN: cls._decode_booleans,
            Family.INTEGER: cls._decode_integers,
            Family.FLOAT: cls._decode_floats,
            Family.TEXT: cls._decode_strings,
        }
        return of_family[datatype.family]

    def _decode_booleans(self, run: ElementRun) -> tuple[int, bytes] | None:
        text = run.balanced()
        if text.translate(None, _BOOLEAN_BYTES):
            return None
        ones = text.replace(b"true", b" 1 ").replace(b"false", b" 0 ")
        data = pure_decode_numbers(ones, DATATYPES["UINT8"])
        return None if data is None else self._with_count(data)

    def _decode_integers(self, run: ElementRun) -> tuple[int, bytes] | None:
        data = pure_decode_numbers(run.balanced(), self.datatype)
        return None if data is None else self._with_count(data)

    def _decode_floats(self, run: ElementRun) -> tuple[int, bytes] | None:
        text = run.balanced()
        if not (self._expects_nonfinite and self._may_be_nonfinite(text)):
            data = pure_decode_numbers(text, self.datatype)
            if data is not None:
                return self._with_count(data)
        return self.decode_unusual_floats(text)

    def decode_unusual_floats(self, text: bytes) -> tuple[int, bytes] | None:
        """Decode floats that ``fast_decode_numbers`` leaves; returns what ``try_decode`` does."""
        values = self._parse_doubles(text)
        if values is None:
            return None
        narrow = round_text(values, text, self.datatype)
        return None if narrow is None else (values.size, narrow.tobytes())

    def has_ties(self, run: ElementRun) -> bool:
        """Tell whether rounding any number of a run depends on its text."""
        if not needs_rounding(self.datatype):
            return False
        values = self._parse_doubles(run.balanced())
        return values is not None and has_ties(values, self.datatype)

    def _with_count(self, data: bytes) -> tuple[int, bytes]:
        assert self.datatype.size is not None
        return len(data) // self.datatype.size, data

    def _may_be_nonfinite(self, text: bytes) -> bool:
        return b"N" in text or b"I" in text or (self._words.null_is_nan and b"u" in text)

    def _parse_doubles(self, text: bytes) -> Values | None:
        """Parse numbers that JSON or simdjson does not have; None if anything else is invalid.

        These are bare NaN, Infinity and null, and integers beyond 64 bits. Each such word is
        replaced by a zero between spaces, so that a word that touches other text stays an error.
        """
        numbers = text
        has_words = self._may_be_nonfinite(text)
        if has_words:
            self._expects_nonfinite = True  # probably in the next runs too
            numbers = numbers.replace(b"NaN", b" 0 ")
            if self._words.null_is_nan:
                numbers = numbers.replace(b"null", b" 0 ")
            if b"I" in numbers:
                numbers = numbers.replace(b"-Infinity", b" 0 ").replace(b"Infinity", b" 0 ")
        try:
            values = parse_numbers(numbers, "d")
        except PARSE_ERRORS:
            try:
                values = parse_numbers(_add_exponents(numbers), "d")
            except PARSE_ERRORS:
                return None
        return _insert_nonfinite(values.copy(), text) if has_words else values

    def _decode_strings(self, run: ElementRun) -> tuple[int, bytes] | None:
        decoded = fast_decode_strings(run)
        if decoded is None:
            values = parse_strings(run)
            if values is None:
                return None
            decoded = len(values), pack_strings(values)
        if self._partial_element is None:
            return decoded
        # The first string is the placeholder of the long one.
        self.end_element()
        count, data = decoded
        return count, data[PREFIX_SIZE:]

    def _feed_string_part(self, part: StringPart) -> None:
        text = native.decode_text(part.text) if native.decode_text is not None else None
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


def parse_strings(run: ElementRun) -> list[str] | None:
    """Parse a run of strings; return None if anything else is in it."""
    try:
        items: list[Any] = orjson.loads(run.balanced())
    except orjson.JSONDecodeError:
        return None
    while list in (kinds := set(map(type, items))):
        items = list(chain.from_iterable(items)) if len(kinds) == 1 else _flatten(items, [])
    return items if kinds.issubset((str,)) else None


def _flatten(items: list[Any], flat: list[Any]) -> list[Any]:
    """Append the elements of arrays of any depth, visiting each once."""
    for item in items:
        if type(item) is list:
            _flatten(item, flat)
        else:
            flat.append(item)
    return flat


def _add_exponents(text: bytes) -> bytes:
    """Append an exponent to long integers: simdjson parses none beyond 64 bits without it."""
    if len(text) < NUMPY_MIN_TEXT:
        return _LONG_INTEGERS.sub(rb"\1e0", text)
    codes = np.frombuffer(text, np.uint8)
    is_digit = np.frombuffer(text.translate(_IS_DIGIT), np.bool_)
    edges = np.flatnonzero(np.diff(is_digit, prepend=False, append=False))
    begins, ends = edges[::2], edges[1::2]
    is_long = ends - begins >= _LONG_DIGITS
    begins, ends = begins[is_long], ends[is_long]
    before = codes[begins - 1 - (codes[begins - 1] == ord("-"))]
    is_integer = _IS_BEFORE_NUMBER[before] & ~_IN_FRACTION[codes[np.minimum(ends, codes.size - 1)]]
    # Each insertion shifts those behind it.
    offsets = ends[is_integer] + np.arange(0, 2 * np.count_nonzero(is_integer), 2)
    longer = np.empty(codes.size + 2 * offsets.size, np.uint8)
    is_code = np.ones(longer.size, np.bool_)
    for shift, code in enumerate(b"e0"):
        longer[offsets + shift] = code
        is_code[offsets + shift] = False
    np.place(longer, is_code, codes)
    return longer.tobytes()


def _insert_nonfinite(values: Values, text: bytes) -> Values:
    """Put NaN and infinities into values where the text has such words, parsed as zeros.

    The text is valid, so every N, I and u belongs to a word. NaN contains two of them, the others
    one.
    """
    codes = np.frombuffer(text, np.uint8)
    marks = find_separators(codes, values.size)
    nans = np.flatnonzero(codes == ord("N"))[::2]
    nulls = np.flatnonzero(codes == ord("u"))
    infinities = np.flatnonzero(codes == ord("I"))
    values[np.searchsorted(marks, nans)] = np.nan
    values[np.searchsorted(marks, nulls)] = np.nan
    signs = np.where(codes[infinities - 1] == ord("-"), -1.0, 1.0)
    values[np.searchsorted(marks, infinities)] = signs * np.inf
    return values


def parse_finite_float(digits: str) -> float:
    """Parse a number; raises ValueError if it overflows to infinity."""
    value = float(digits)
    if math.isinf(value):
        raise ValueError(digits)
    return value
