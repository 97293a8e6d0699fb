"""Cuts the ``data`` arrays out of a request's or an answer's JSON while it streams by.

What is left is a small header, in which a stand-in holds the place of each array; a JSON library
parses it. An array that is not the ``data`` of a tensor is an error.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from sys import getsizeof
from typing import Any

import numpy as np
import orjson

from gateway.codec.json.array_scanner import WINDOW, ArrayScanner, ElementRun, StringPart
from gateway.codec.json.header_length_check import check_header_end
from gateway.codec.json.structure_scan import mask_strings
from gateway.errors import GatewayError, bad_request
from gateway.protocol.error_vocabulary import REQUEST, ErrorVocabulary
from gateway.protocol.json_errors import (
    ExtractedArray,
    describe_json_kind,
    invalid_json_error,
    original_offset,
    parse_json,
    quote_around,
    quote_bytes,
)
from gateway.protocol.request_header import V1_REQUEST_HINT, check_entries, check_object
from gateway.protocol.tensors import MAX_TENSORS

_KEY = b'"data"'
_PROBE_KEY = "data array"
"""The key that stands for ``data`` where the tensors around an array are looked at."""
_SPACE = re.compile(rb"[ \t\n\r]*+")
_V1_START = re.compile(rb'[ \t\n\r]*\{[ \t\n\r]*"instances"[ \t\n\r]*:')
# Most text of a key needs no look: it is a mere string, or no array follows. Behind a backslash,
# its first quote belongs to a string, which the one behind ``data`` ends. That is told by a look
# back, as patterns that begin with plain text are found ten times sooner.
_ARRAY_KEY = re.compile(rb'"data"(?<!\\"data")[ \t\n\r]*+(?:\Z|:[ \t\n\r]*+(?:\[|\Z))')
_NON_ARRAY_KEY = re.compile(rb'"data"(?<!\\"data")[ \t\n\r]*+:[ \t\n\r]*+[^\[ \t\n\r]')


_EXTRACTED_ARRAY_OVERHEAD = 200
"""Bytes of memory that a Cut takes, with its numbers."""


@dataclass(frozen=True, slots=True)
class ArrayStart:
    """An array begins: the ``data`` of tensor number ``index``.

    ``fields`` are those of the tensor that stand before its data; ``previous`` those of the tensor
    of the array before, that stand behind it.
    """

    index: int
    fields: dict[str, Any]
    previous: dict[str, Any]


Event = ArrayStart | ElementRun | StringPart


def placeholder(number: int) -> list[int]:
    """Give what the header has in place of an array: no other ``data`` can be an array there."""
    return [number]


class DataExtractor:
    """Takes the text of a message; gives the events of its arrays, and at last the header."""

    def __init__(
        self,
        header_cap: int,
        depth_cap: int,
        message: ErrorVocabulary = REQUEST,
        tensor_cap: int = MAX_TENSORS,
    ) -> None:
        self._message = message
        self._header_cap = header_cap
        self._depth_cap = depth_cap
        self._tensor_cap = tensor_cap
        self._header = bytearray()
        self._fragment_start = 0
        self._next_probe = 0
        """Bytes of the header from which on a key is looked at that no array follows."""
        self._buffer = b""
        self._position = 0
        """Where in the buffer is what was not looked at yet."""
        self._key_at = 0
        self._expected = b""
        """What follows a key that is at hand, behind spaces, if it is the one of an array."""
        self._array: ArrayScanner | None = None
        self._tensor = -1
        self._label = ""
        self.arrays: list[int] = []
        """Of each array cut out, the index of its tensor."""
        self._received = 0
        self._array_start = self._placeholder_at = 0
        self.extracted: list[ExtractedArray] = []
        """The arrays cut out, for errors that quote what is left."""

    @property
    def preferred_read_size(self) -> int:
        """Give the bytes of text that are best fed next: with them a window is full."""
        return max(1, WINDOW - len(self._buffer) + self._position)

    @property
    def held(self) -> int:
        """Give the bytes that are held: what the header has so far, the buffer, and the cuts."""
        size = (
            getsizeof(self._header)
            + len(self._buffer)
            + _EXTRACTED_ARRAY_OVERHEAD * len(self.extracted)
        )
        return size if self._array is None else size + self._array.held

    @property
    def _offset(self) -> int:
        """Give the bytes of the whole text that were looked at."""
        return self._received - len(self._buffer) + self._position

    def feed(self, text: bytes | memoryview, last: bool = False) -> Iterator[Event]:
        """Yield what the text brings; all of it must be consumed before the next call.

        Raises GatewayError: 400 for text that cannot be a request, 413 for a header over the cap;
        502 for either in an answer.
        """
        self._buffer += text
        self._received += len(text)
        yield from self._scan(last)
        # What is done with is not held until more comes.
        self._buffer, self._position = self._buffer[self._position :], 0

    def _scan(self, last: bool) -> Iterator[Event]:
        while True:
            if self._array is not None:
                yield from self._array.scan(self._buffer, last, self._position)
                self._buffer, self._position = self._array.take_rest()
                if not self._array.ended:
                    return
                self._leave_array()
            elif self._expected:
                if not (yield from self._enter_value()):
                    return
            elif not self._find_key(last):
                return

    def finish(self) -> bytes:
        """Give the header, with a stand-in for each array, and keep nothing of it.

        To be called once, after ``feed(b"", last=True)``. Raises GatewayError (400, 502) for text
        that ends inside an array.
        """
        if self._array is not None:
            raise self._truncated_error(self._array)
        self._move_to_header(len(self._buffer))
        if self.arrays and b"\\" in self._header[self._fragment_start :]:
            # A key with escapes is not cut out, and its value could be that of the stand-in.
            self._check_no_second_data(self._parse_tensors(self._header[self._fragment_start :]))
        header, self._header = bytes(self._header), bytearray()
        self._buffer, self._position = b"", 0
        return header

    def _leave_array(self) -> None:
        """Go on behind an array, which has ended."""
        self._array = None
        behind = self._fragment_start
        self.extracted.append(
            ExtractedArray(self._array_start, self._offset, self._placeholder_at, behind)
        )

    def _truncated_error(self, array: ArrayScanner) -> GatewayError:
        if array.invalid_text is None:
            return self._message.malformed(
                f"{self._message.name} ends at byte {self._received}, "
                f"inside the data of {self._label}"
            )
        return self._message.malformed(
            f"{self._label}: data is not an array of plain values, at byte "
            f"{self._array_start + array.invalid_at}, near: {quote_bytes(array.invalid_text)}"
        )

    def _find_key(self, last: bool) -> bool:
        """Move text to the header, up to behind the next ``"data"`` that needs a look."""
        buffer, start = self._buffer, self._position
        found = self._search(_ARRAY_KEY, start, len(buffer))
        look = max(start, start + self._next_probe - len(self._header))
        end = len(buffer) if found is None else found.start() + 1
        key = self._search(_NON_ARRAY_KEY, look, end) or found
        if key is None:
            # The key may have come in part.
            self._move_to_header(len(buffer) if last else max(start, len(buffer) - len(_KEY) + 1))
            return False
        self._key_at = len(self._header) + key.start() - start
        if buffer[key.end() - 1] == ord("["):
            self._expected = b"["
            self._move_to_header(key.end() - 1)
        else:
            self._expected = b":"
            self._move_to_header(key.start() + len(_KEY))
        return True

    def _search(self, pattern: re.Pattern[bytes], start: int, end: int) -> re.Match[bytes] | None:
        """Search for a key in the buffer; what stands before that is in the header."""
        found = pattern.search(self._buffer, start, end)
        if found is not None and not found.start() and self._header.endswith(b"\\"):
            return pattern.search(self._buffer, 1, end)
        return found

    def _enter_value(self) -> Generator[Event, None, bool]:
        """Look at what follows the key; tell whether there is text left to look at."""
        spaces = _SPACE.match(self._buffer, self._position)
        if spaces is not None:
            self._move_to_header(spaces.end())
        if self._position == len(self._buffer):
            return False
        awaited, self._expected = self._expected, b""
        if not self._buffer.startswith(awaited, self._position):
            if awaited == b"[":
                self._check_data_is_array()
            elif self._header.endswith(b'"'):
                self._rescan_last_quote()
        elif awaited == b":":
            self._move_to_header(self._position + 1)
            self._expected = b"["
        else:
            yield self._enter_array()
        return True

    def _rescan_last_quote(self) -> None:
        """Look again from the last quote of a key which is none: it may be the first of another.

        That makes no valid JSON, but what is refused must not hang on how the text was split.
        """
        self._header.pop()
        self._buffer, self._position = b'"' + self._buffer[self._position :], 0

    def _check_data_is_array(self) -> None:
        """Refuse a tensor's data that is no array; ``data`` elsewhere is its writer's own.

        The stand-ins show it at the end at the latest; but then a large string would be refused
        for its size. Each look costs a parse: one only where the header has doubled.
        """
        if self._key_at < self._next_probe:
            return
        self._next_probe = 2 * self._key_at
        tensors = self._tensors_so_far()
        if tensors:
            index = max(0, self._tensor) + len(tensors) - 1
            is_same = index == self._tensor
            label = self._label if is_same else self._message.label_of(tensors[-1], index)
            kind = describe_json_kind(self._buffer[self._position : self._position + 1])
            raise self._message.malformed(f"{label}: data must be an array, got {kind}")

    def _enter_array(self) -> ArrayStart:
        tensors = self._tensors_so_far()
        if tensors is None:
            raise _misplaced_array_error(
                self._message, bytes(self._header), self._key_at, self.extracted
            )
        first = not self.arrays
        if not first:
            self._check_no_second_data(tensors)
            if len(tensors) == 1:
                raise self._duplicate_data_error(self._label)
        self._tensor = len(tensors) - 1 + max(0, self._tensor)
        if self._tensor >= self._tensor_cap:
            raise self._message.too_many_tensors(self._tensor_cap)
        self._array_start = self._offset
        self._placeholder_at = len(self._header)
        self._append_to_header(orjson.dumps(placeholder(len(self.arrays))))
        self._fragment_start = len(self._header)
        self.arrays.append(self._tensor)
        self._label = self._message.label_of(tensors[-1], self._tensor)
        if "data" in tensors[-1]:
            raise self._duplicate_data_error(self._label)
        self._array = ArrayScanner(self._label, self._depth_cap, self._message)
        return ArrayStart(self._tensor, tensors[-1], {} if first else tensors[0])

    def _check_no_second_data(self, tensors: list[dict[str, Any]] | None) -> None:
        """Refuse other data behind the last array, in its tensor: the first of those since."""
        if tensors and "data" in tensors[0]:
            raise self._duplicate_data_error(self._label)

    def _duplicate_data_error(self, label: str) -> GatewayError:
        return self._message.malformed(f"{label} has more than one data")

    def _tensors_so_far(self) -> list[dict[str, Any]] | None:
        """Parse the text since the last array up to a key ``data``; None if it is no tensor's.

        With the brackets closed that must be open here, the text is valid JSON, whose last tensor
        has that key, here written otherwise: a JSON library tells it better than any counting of
        quotes. Any ``data`` of the tensors is another one.
        """
        fragment = self._header[self._fragment_start : self._key_at]
        tensors = self._parse_tensors(fragment + b'"%s":1}]}' % _PROBE_KEY.encode())
        if not tensors or tensors[-1].pop(_PROBE_KEY, None) != 1:
            return None
        tensors[0].pop(_PROBE_KEY, None)
        return tensors

    def _parse_tensors(self, fragment: bytearray) -> list[dict[str, Any]] | None:
        """Parse the text behind the last array; None if it has no tensors."""
        key = self._message.tensors
        opening = b'{"%s":[{"%s":0' % (key.encode(), _PROBE_KEY.encode()) if self.arrays else b""
        try:
            fields = parse_json(opening + fragment)
        except orjson.JSONDecodeError:
            return None
        tensors = fields.get(key) if isinstance(fields, dict) else None
        if not isinstance(tensors, list) or not all(isinstance(entry, dict) for entry in tensors):
            return None
        return tensors

    def _move_to_header(self, end: int) -> None:
        """Move the text up to a place in the buffer to the header."""
        self._append_to_header(self._buffer[self._position : end])
        self._position = end

    def _append_to_header(self, text: bytes) -> None:
        self._header += text
        if len(self._header) > self._header_cap:
            raise self._too_large_error()

    def _too_large_error(self) -> GatewayError:
        if self._message is REQUEST:
            # No more of it, as that would hang on how the text arrived.
            start = bytes(self._header[: self._header_cap + 1])
            if _V1_START.match(start):
                return bad_request(V1_REQUEST_HINT)
            check_header_end(start, self.extracted)
        return GatewayError(
            self._message.too_large,
            f"the JSON around the data is larger than {self._header_cap} bytes "
            "(limits.header_bytes)",
        )


_OPENING_BRACKETS, _CLOSING_BRACKETS = b"[{", b"]}"


def _misplaced_array_error(
    message: ErrorVocabulary, header: bytes, key_at: int, cuts: Sequence[ExtractedArray]
) -> GatewayError:
    """Make the error of an array that is the value of the last key of a header, at ``key_at``.

    ``cuts`` are the arrays before it. Names what is wrong before the key, if anything is.
    """
    try:
        fields = parse_json(header + b"1" + _missing_brackets(header))
    except orjson.JSONDecodeError as error:
        return invalid_json_error(message, header, error, cuts)
    try:
        if message.tensors in check_object(fields, message):
            check_entries(fields, message)
    except GatewayError as error:
        return error
    return message.malformed(
        f'there is an array "data" outside the tensors of {message.tensors}, '
        f"at byte {original_offset(key_at, cuts)}, near: {quote_around(header, key_at, cuts)}"
    )


def _missing_brackets(text: bytes) -> bytes:
    """Give the brackets that a text lacks which ends outside of any string."""
    codes, inside = mask_strings(text)
    is_open: list[int] = []
    for code in codes[
        (inside == 0) & np.isin(codes, list(_OPENING_BRACKETS + _CLOSING_BRACKETS))
    ].tolist():
        if code in _OPENING_BRACKETS:
            is_open.append(code)
        elif is_open:
            is_open.pop()
    return bytes(_CLOSING_BRACKETS[_OPENING_BRACKETS.index(code)] for code in reversed(is_open))
