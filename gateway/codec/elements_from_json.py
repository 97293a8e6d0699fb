"""Runs of JSON elements → little-endian bytes, per datatype."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from functools import partial
from itertools import chain
from types import NoneType
from typing import Any, Self

import numpy as np
import orjson
import simdjson

from gateway.codec.array_scanner import Run, StringPart
from gateway.codec.faults import element_fault
from gateway.codec.plain_numbers import (
    REFUSALS,
    Values,
    parse_numbers,
    plain_numbers,
    round_to,
)
from gateway.protocol.datatypes import Datatype, Family
from gateway.protocol.messages import REQUEST, Message

_LENGTH = struct.Struct("<I")
_LONGEST_ELEMENT = 2**32 - 1


class TensorFromJson:
    """Takes the runs of one tensor's ``data``; holds its bytes.

    ``label`` names the tensor of the message in errors. ``feed`` raises GatewayError (400, 502)
    that names tensor, index and value of an element that is not of the datatype.
    """

    def __init__(self, label: str, datatype: Datatype, message: Message = REQUEST) -> None:
        self.chunks: list[bytes] = []
        self.size = 0
        self.count = 0
        self._label = label
        self._message = message
        self.datatype = datatype
        self._parser = simdjson.Parser()
        # No bound method: with a cycle, the parser's memory would wait for the collector.
        self._convert = self._converter(datatype)
        self._long: _LongString | None = None
        self._has_nonfinite = False

    def feed(self, item: Run | StringPart) -> None:
        """Convert the next run, or piece of a long string."""
        if isinstance(item, StringPart):
            self._feed_string_part(item)
            return
        count, data = self._converted(item)
        self.count += count
        self._hold(data)

    def leave_out(self) -> int:
        """Leave the place of a run that is converted elsewhere; give its number."""
        self.chunks.append(b"")
        return len(self.chunks) - 1

    def fill_in(self, place: int, run: Run, data: bytes | None) -> None:
        """Put a run's numbers into the place left for them; None has the run converted here.

        All places before must be filled in.
        """
        width = self.datatype.size
        assert width is not None
        if data is None:
            # Should it have a fault, its index counts from here.
            self.count = sum(map(len, self.chunks[:place])) // width
            _, data = self._converted(run)
        self.chunks[place] = data
        self.size += len(data)
        self.count = self.size // width

    def _converted(self, run: Run) -> tuple[int, bytes]:
        if run.lacks_element:
            raise self._fault(run)
        return self._convert(self, run)

    def _hold(self, data: bytes) -> None:
        self.chunks.append(data)
        self.size += len(data)

    def _fault(self, run: Run) -> Exception:
        return element_fault(self._label, self.datatype, run, self.count, self._message)

    @classmethod
    def _converter(cls, datatype: Datatype) -> Callable[[Self, Run], tuple[int, bytes]]:
        if datatype.dtype is None:
            return cls._text
        if datatype.family is Family.BOOLEAN:
            return cls._booleans
        if datatype.family is Family.INTEGER:
            return cls._integers
        return cls._floats

    def _booleans(self, run: Run) -> tuple[int, bytes]:
        values = self._objects(run, bool)
        return len(values), np.array(values, dtype=np.bool_).tobytes()

    def _integers(self, run: Run) -> tuple[int, bytes]:
        data = plain_numbers(self._parser, run.balanced(), self.datatype)
        if data is None:
            raise self._fault(run)
        return self._counted(data)

    def _floats(self, run: Run) -> tuple[int, bytes]:
        text = run.balanced()
        if not (self._has_nonfinite and self._may_be_nonfinite(text)):
            data = plain_numbers(self._parser, text, self.datatype)
            if data is not None:
                return self._counted(data)
        dtype = self.datatype.dtype
        assert dtype is not None
        values = self._doubles(run, text)
        narrow = round_to(values, dtype)
        if (np.isinf(narrow) != np.isinf(values)).any():
            raise self._fault(run)
        return values.size, narrow.tobytes()

    def _counted(self, data: bytes) -> tuple[int, bytes]:
        assert self.datatype.size is not None
        return len(data) // self.datatype.size, data

    def _may_be_nonfinite(self, text: bytes) -> bool:
        return b"N" in text or b"I" in text or (self._message.null_is_nan and b"u" in text)

    def _doubles(self, run: Run, text: bytes) -> Values:
        if self._may_be_nonfinite(text):
            self._has_nonfinite = True  # and so, probably, what follows
            values = self._nonfinite_doubles(text)
            if values is not None:
                return values
        # Integers beyond 64 bits, which simdjson refuses, are fine as floats; so is NaN anywhere.
        nothing = (NoneType,) if self._message.null_is_nan else ()
        return np.array(self._objects(run, float, *nothing), dtype=np.float64)

    def _nonfinite_doubles(self, text: bytes) -> Values | None:
        """Parse an array with bare NaN, Infinity and null tokens, None if that is not all it has.

        Each token gives way to a zero between spaces, so that what touches it stays an error;
        its element's index is the number of commas before it.
        """
        plain = text.replace(b"NaN", b" 0 ")
        if self._message.null_is_nan:
            plain = plain.replace(b"null", b" 0 ")
        if b"I" in plain:
            plain = plain.replace(b"-Infinity", b" 0 ").replace(b"Infinity", b" 0 ")
        try:
            values = parse_numbers(self._parser, plain, "d").copy()
        except REFUSALS:
            return None
        codes = np.frombuffer(text, np.uint8)
        commas = np.flatnonzero(codes == ord(","))
        if values.size != commas.size + 1:
            return None  # empty inner arrays: commas do not count elements
        # It parsed, so every N, I and u belonged to a token: NaN holds two, the others one.
        nans = np.flatnonzero(codes == ord("N"))[::2]
        nulls = np.flatnonzero(codes == ord("u"))
        infinities = np.flatnonzero(codes == ord("I"))
        values[np.searchsorted(commas, nans)] = np.nan
        values[np.searchsorted(commas, nulls)] = np.nan
        signs = np.where(codes[infinities - 1] == ord("-"), -1.0, 1.0)
        values[np.searchsorted(commas, infinities)] = signs * np.inf
        return values

    def _text(self, run: Run) -> tuple[int, bytes]:
        strings = list(map(str.encode, self._objects(run, str)))
        lengths = map(_LENGTH.pack, map(len, strings))
        parts = list(chain.from_iterable(zip(lengths, strings, strict=True)))
        if self._long is not None:
            # The empty string that stands for it comes first.
            self._end_long_string(self._long)
            parts = parts[2:]
        return len(strings), b"".join(parts)

    def _objects(self, run: Run, *types: type) -> list[Any]:
        """Parse a run into Python objects of these types; for what is rare or has no buffer."""
        try:
            items = (_FLOATS if float in types else orjson.loads)(run.balanced())
        except REFUSALS:
            raise self._fault(run) from None
        while list in (kinds := set(map(type, items))):
            items = list(chain.from_iterable(x if type(x) is list else (x,) for x in items))
        if not kinds.issubset(types):
            raise self._fault(run)
        return items  # type: ignore[no-any-return]

    def _feed_string_part(self, part: StringPart) -> None:
        try:
            text = orjson.loads(b'"' + part.text + b'"').encode()
        except orjson.JSONDecodeError as error:
            raise self._message.fault(
                f"{self._label}: element {self.count} is not a valid JSON string ({error.msg})"
            ) from None
        if self.datatype.family is not Family.TEXT:
            run = Run(b'["' + part.text[:60] + b'"]', 0, 0, first=True)
            raise self._fault(run)
        if self._long is None:
            self._long = _LongString(len(self.chunks))
            self._hold(bytes(_LENGTH.size))
        self._long.length += len(text)
        self._hold(text)

    def _end_long_string(self, long: _LongString) -> None:
        if long.length > _LONGEST_ELEMENT:
            raise self._message.fault(f"{self._label}: element {self.count} is longer than 4 GiB")
        self.chunks[long.chunk] = _LENGTH.pack(long.length)
        self._long = None


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


def _finite_integer(digits: str) -> float:
    return finite_float(digits) + 0.0  # the integer -0 has no sign, to simdjson neither


# The standard library's parser knows NaN and Infinity; it is slow, for what nothing else takes.
_FLOATS = partial(json.loads, parse_int=_finite_integer, parse_float=finite_float)
