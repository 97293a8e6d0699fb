"""Runs of JSON elements → little-endian bytes, per datatype."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from itertools import chain
from typing import Any, Self

import numpy as np
import orjson

from gateway.codec.elements.diagnose import diagnose_run, invalid_array_error, split_run
from gateway.codec.elements.fast_decode import PARSE_ERRORS, parse_numbers, plain_numbers
from gateway.codec.elements.fast_strings import pack_strings, plain_strings
from gateway.codec.elements.rounding import Values, element_marks, has_ties, is_rounded, round_text
from gateway.codec.json.array_scanner import ElementRun, StringPart, find_string_cut
from gateway.protocol.datatypes import DATATYPES, Datatype, Family
from gateway.protocol.error_vocabulary import REQUEST, ErrorVocabulary

_LENGTH = struct.Struct("<I")
_LONGEST_ELEMENT = 2**32 - 1

_LONG_DIGITS = 19
"""Digits of an integer that may be beyond 64 bits."""
_LONG_INTEGER = re.compile(rb"([\[, \t\n\r]-?[0-9]{%d,}+)(?![0-9.eE])" % _LONG_DIGITS)
"""Such an integer, with what stands before it."""
_LARGE = 2 * 1024
"""Bytes of text from which on numpy takes less time to find them."""
_DIGITS = bytes(code in b"0123456789" for code in range(256))
_BEFORE_NUMBER = np.zeros(256, np.bool_)
_BEFORE_NUMBER[list(b"[, \t\n\r")] = True
_IN_FRACTION = np.zeros(256, np.bool_)
_IN_FRACTION[list(b".eE")] = True

_OF_BOOLEANS = b"truefals[], \t\n\r"


class TensorDecoder:
    """Takes the runs of one tensor's ``data``; holds its bytes.

    ``label`` names the tensor of the message in errors. ``feed`` raises GatewayError (400, 502)
    that names tensor, index and value of an element that is not of the datatype.
    """

    def __init__(self, label: str, datatype: Datatype, message: ErrorVocabulary = REQUEST) -> None:
        self.chunks: list[bytes] = []
        self.size = 0
        self.count = 0
        self._label = label
        self._message = message
        self.datatype = datatype
        # No bound method: with a cycle, what is held would wait for the collector.
        self._convert = self._converter(datatype)
        self._long: _LongString | None = None
        self._has_nonfinite = False

    def feed(self, item: ElementRun | StringPart) -> None:
        """Convert the next run, or piece of a long string."""
        if isinstance(item, StringPart):
            self._feed_string_part(item)
            return
        count, data = self._of(item)
        self.count += count
        self._hold(data)

    def leave_out(self) -> int:
        """Leave the place of a run that is converted elsewhere; give its number."""
        self.chunks.append(b"")
        return len(self.chunks) - 1

    def fill_in(self, place: int, run: ElementRun, data: bytes | memoryview | None) -> None:
        """Put a run's numbers into the place left for them; None has the run converted here.

        All places before must be filled in.
        """
        width = self.datatype.size
        assert width is not None
        if data is None:
            # Should it have a fault, its index counts from here.
            self.count = sum(map(len, self.chunks[:place])) // width
            _, data = self._of(run)
        self.chunks[place] = bytes(data)  # the same object, if it is bytes
        self.size += len(data)
        self.count = self.size // width

    def _of(self, run: ElementRun) -> tuple[int, bytes]:
        converted = self.converted(run)
        if converted is None:
            raise self._fault(run)
        return converted

    def converted(self, run: ElementRun) -> tuple[int, bytes] | None:
        """Give the number of a run's elements, and their bytes; None where there is a fault."""
        return None if run.lacks_element else self._convert(self, run)

    def _hold(self, data: bytes) -> None:
        self.chunks.append(data)
        self.size += len(data)

    def _fault(self, run: ElementRun) -> Exception:
        """Make the error for a run; only a small part of it is looked at element by element."""
        index = self.count
        for part in split_run(run):
            converted = self.converted(part)
            if converted is None:
                return diagnose_run(self._label, self.datatype, part, index, self._message)
            index += converted[0]
            if part.depth_after < 1:
                break
        return invalid_array_error(self._label, max(self.count, index - 1), self._message)

    @classmethod
    def _converter(
        cls, datatype: Datatype
    ) -> Callable[[Self, ElementRun], tuple[int, bytes] | None]:
        of_family = {
            Family.BOOLEAN: cls._booleans,
            Family.INTEGER: cls._integers,
            Family.FLOAT: cls._floats,
            Family.TEXT: cls._text,
        }
        return of_family[datatype.family]

    def _booleans(self, run: ElementRun) -> tuple[int, bytes] | None:
        text = run.balanced()
        if text.translate(None, _OF_BOOLEANS):
            return None
        ones = text.replace(b"true", b" 1 ").replace(b"false", b" 0 ")
        data = plain_numbers(ones, DATATYPES["UINT8"])
        return None if data is None else self._counted(data)

    def _integers(self, run: ElementRun) -> tuple[int, bytes] | None:
        data = plain_numbers(run.balanced(), self.datatype)
        return None if data is None else self._counted(data)

    def _floats(self, run: ElementRun) -> tuple[int, bytes] | None:
        text = run.balanced()
        if not (self._has_nonfinite and self._may_be_nonfinite(text)):
            data = plain_numbers(text, self.datatype)
            if data is not None:
                return self._counted(data)
        return self.decode_unusual_floats(text)

    def decode_unusual_floats(self, text: bytes) -> tuple[int, bytes] | None:
        """Convert an array of floats as ``converted`` does, if not all are ``plain_numbers``."""
        values = self._doubles(text)
        if values is None:
            return None
        narrow = round_text(values, text, self.datatype)
        return None if narrow is None else (values.size, narrow.tobytes())

    def has_ties(self, run: ElementRun) -> bool:
        """Tell whether the text of any number of a run decides what it is rounded to."""
        if not is_rounded(self.datatype):
            return False
        values = self._doubles(run.balanced())
        return values is not None and has_ties(values, self.datatype)

    def _counted(self, data: bytes) -> tuple[int, bytes]:
        assert self.datatype.size is not None
        return len(data) // self.datatype.size, data

    def _may_be_nonfinite(self, text: bytes) -> bool:
        return b"N" in text or b"I" in text or (self._message.null_is_nan and b"u" in text)

    def _doubles(self, text: bytes) -> Values | None:
        """Parse an array of what JSON or simdjson has no numbers for; None if that is not all.

        These are bare NaN, Infinity and null, and integers beyond 64 bits. Each token of a word
        gives way to a zero between spaces, so that what touches it stays an error.
        """
        plain = text
        has_words = self._may_be_nonfinite(text)
        if has_words:
            self._has_nonfinite = True  # and so, probably, what follows
            plain = plain.replace(b"NaN", b" 0 ")
            if self._message.null_is_nan:
                plain = plain.replace(b"null", b" 0 ")
            if b"I" in plain:
                plain = plain.replace(b"-Infinity", b" 0 ").replace(b"Infinity", b" 0 ")
        try:
            values = parse_numbers(plain, "d")
        except PARSE_ERRORS:
            try:
                values = parse_numbers(_with_exponents(plain), "d")
            except PARSE_ERRORS:
                return None
        return _with_words(values.copy(), text) if has_words else values

    def _text(self, run: ElementRun) -> tuple[int, bytes] | None:
        plain = plain_strings(run.balanced()) if self._long is None else None
        if plain is not None:
            return plain
        values = strings_of(run)
        if values is None:
            return None
        count = len(values)
        if self._long is not None:
            # The empty string that stands for it comes first.
            self._end_long_string(self._long)
            values = values[1:]
        return count, pack_strings(values)

    def _feed_string_part(self, part: StringPart) -> None:
        try:
            text = orjson.loads(b'"' + part.text + b'"').encode()
        except orjson.JSONDecodeError as error:
            raise self._message.malformed(
                f"{self._label}: element {self.count} is not a valid JSON string ({error.msg})"
            ) from None
        if self.datatype.family is not Family.TEXT:
            # Cut where no escape and no character is cut in two: it is quoted.
            end, _ = find_string_cut(part.text[:60], full=True, last=True) or (60, False)
            run = ElementRun(b'["' + part.text[:end] + b'"]', 0, 0, first=True)
            raise self._fault(run)
        if self._long is None:
            self._long = _LongString(len(self.chunks))
            self._hold(bytes(_LENGTH.size))
        self._long.length += len(text)
        self._hold(text)

    def _end_long_string(self, long: _LongString) -> None:
        if long.length > _LONGEST_ELEMENT:
            raise self._message.malformed(
                f"{self._label}: element {self.count} is longer than 4 GiB"
            )
        self.chunks[long.chunk] = _LENGTH.pack(long.length)
        self._long = None


def strings_of(run: ElementRun) -> list[str] | None:
    """Parse a run of strings; None where it is none."""
    try:
        items: list[Any] = orjson.loads(run.balanced())
    except orjson.JSONDecodeError:
        return None
    while list in (kinds := set(map(type, items))):
        items = list(chain.from_iterable(items)) if len(kinds) == 1 else _flat(items, [])
    return items if kinds.issubset((str,)) else None


def _flat(items: list[Any], flat: list[Any]) -> list[Any]:
    """Add the elements of arrays of any depth, each looked at once."""
    for item in items:
        if type(item) is list:
            _flat(item, flat)
        else:
            flat.append(item)
    return flat


def _with_exponents(text: bytes) -> bytes:
    """Give long integers an exponent, without which simdjson takes none beyond 64 bits."""
    if len(text) < _LARGE:
        return _LONG_INTEGER.sub(rb"\1e0", text)
    codes = np.frombuffer(text, np.uint8)
    is_digit = np.frombuffer(text.translate(_DIGITS), np.bool_)
    edges = np.flatnonzero(np.diff(is_digit, prepend=False, append=False))
    begins, ends = edges[::2], edges[1::2]
    is_long = ends - begins >= _LONG_DIGITS
    begins, ends = begins[is_long], ends[is_long]
    before = codes[begins - 1 - (codes[begins - 1] == ord("-"))]
    is_integer = _BEFORE_NUMBER[before] & ~_IN_FRACTION[codes[np.minimum(ends, codes.size - 1)]]
    # Each exponent stands behind those before it.
    places = ends[is_integer] + np.arange(0, 2 * np.count_nonzero(is_integer), 2)
    longer = np.empty(codes.size + 2 * places.size, np.uint8)
    is_code = np.ones(longer.size, np.bool_)
    for place, code in enumerate(b"e0"):
        longer[places + place] = code
        is_code[places + place] = False
    np.place(longer, is_code, codes)
    return longer.tobytes()


def _with_words(values: Values, text: bytes) -> Values:
    """Put in what stands in a text of which each word was read as a zero.

    It could be read, so every N, I and u belongs to a word: NaN holds two, the others one.
    """
    codes = np.frombuffer(text, np.uint8)
    marks = element_marks(codes, values.size)
    nans = np.flatnonzero(codes == ord("N"))[::2]
    nulls = np.flatnonzero(codes == ord("u"))
    infinities = np.flatnonzero(codes == ord("I"))
    values[np.searchsorted(marks, nans)] = np.nan
    values[np.searchsorted(marks, nulls)] = np.nan
    signs = np.where(codes[infinities - 1] == ord("-"), -1.0, 1.0)
    values[np.searchsorted(marks, infinities)] = signs * np.inf
    return values


class _LongString:
    """A BYTES element that arrives in pieces: where its length goes, and its length so far."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self.length = 0


def finite_float(digits: str) -> float:
    """Read a number; raises ValueError for one that only infinity would be near."""
    value = float(digits)
    if math.isinf(value):
        raise ValueError(digits)
    return value
