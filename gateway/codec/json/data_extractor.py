"""Extracts the ``data`` arrays from the JSON of a request or response while it streams by.

A small header is left, with a placeholder for each array; a JSON library parses it. An array under
the key ``data`` that is not a tensor's is an error.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from sys import getsizeof
from typing import Any, Final

import orjson

from gateway.codec.json.array_scanner import WINDOW, ArrayScanner, ElementRun, StringPart
from gateway.codec.json.body_checks import check_header_end
from gateway.codec.json.parse_cost import check_value_count
from gateway.codec.structure_scan import outside_strings
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
from gateway.protocol.request_header import (
    V1_REQUEST_HINT,
    check_entries,
    check_nesting,
    check_object,
)
from gateway.protocol.tensors import MAX_TENSORS

_KEY: Final = b'"data"'
_PROBE_KEY: Final = "data array"
"""A probe key in place of ``data``, to see which tensor an array belongs to."""
_SPACE: Final = re.compile(rb"[ \t\n\r]*+")
_V1_START: Final = re.compile(rb'[ \t\n\r]*\{[ \t\n\r]*"instances"[ \t\n\r]*:')
# Most occurrences of the key need no parse: they are plain strings, or no array follows. Behind a
# backslash, its first quote is part of a string. A look-behind checks that, because patterns that
# begin with plain text are found ten times faster.
_ARRAY_KEY: Final = re.compile(rb'"data"(?<!\\"data")[ \t\n\r]*+(?:\Z|:[ \t\n\r]*+(?:\[|\Z))')
_NON_ARRAY_KEY: Final = re.compile(rb'"data"(?<!\\"data")[ \t\n\r]*+:[ \t\n\r]*+[^\[ \t\n\r]')


_NUMBERS_AT_ONCE: Final = 4 * WINDOW
"""Bytes of numbers to feed at once: they are scanned in place, and only a last part is copied."""
_EXTRACTED_ARRAY_OVERHEAD: Final = 200
"""Bytes of memory of an ExtractedArray with its numbers."""


@dataclass(frozen=True, slots=True)
class ArrayStart:
    """An array begins: the ``data`` of tensor number ``index``.

    ``fields`` are the fields of the tensor before its data. ``previous`` are the fields behind the
    data of the tensor before.
    """

    index: int
    fields: dict[str, Any]
    previous: dict[str, Any]


Event = ArrayStart | ElementRun | StringPart


def placeholder(number: int) -> list[int]:
    """Return the placeholder of an array; nothing else in a valid header equals it."""
    return [number]


class DataExtractor:
    """Yields the arrays of a message's text, and returns the header around them at the end."""

    def __init__(
        self,
        header_cap: int,
        depth_cap: int,
        words: ErrorVocabulary = REQUEST,
        tensor_cap: int = MAX_TENSORS,
    ) -> None:
        self._words = words
        self._header_cap = header_cap
        self._depth_cap = depth_cap
        self._tensor_cap = tensor_cap
        self._header = bytearray()
        self._fragment_start = 0
        self._next_probe = 0
        """The header size from which on a key without an array is checked again."""
        self._buffer = b""
        self._position = 0
        """The offset in the buffer of text that was not scanned yet."""
        self._key_at = 0
        self._expected = b""
        """The character that must follow the key in the buffer if an array is its value."""
        self._array: ArrayScanner | None = None
        self._tensor = -1
        self._label = ""
        self.arrays: list[int] = []
        """The tensor's index of each extracted array."""
        self._received = 0
        self._array_start = self._placeholder_at = 0
        self.extracted: list[ExtractedArray] = []
        """The extracted arrays, so that errors can quote the original text."""

    @property
    def preferred_read_size(self) -> int:
        """Return the size of the next text that would fill a window; several ones of numbers."""
        if self._is_in_numbers:
            return _NUMBERS_AT_ONCE
        return max(1, WINDOW - len(self._buffer) + self._position)

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes buffered: header, text, and records of extracted arrays."""
        size = (
            getsizeof(self._header)
            + len(self._buffer)
            + _EXTRACTED_ARRAY_OVERHEAD * len(self.extracted)
        )
        return size if self._array is None else size + self._array.buffered_bytes

    @property
    def _offset(self) -> int:
        """Return the offset of the scan in the whole text."""
        return self._received - len(self._buffer) + self._position

    def feed(
        self, text: bytes | memoryview, last: bool = False, whole: memoryview | None = None
    ) -> Iterator[Event]:
        """Yield the items of the text; consume all of them before the next call.

        If all text lies in one piece of memory, ``whole``, numbers are not copied. Raises
        GatewayError: 400 for text that cannot be a request, 413 for a header over the cap; 502 for
        either in a response.
        """
        if whole is not None and self._buffer and self._is_in_numbers:
            start = self._offset
            text = whole[start : self._received + len(text)]
            self._received = start
            self._buffer, self._position = b"", 0
        missing = WINDOW - len(self._buffer)
        if self._buffer and len(text) > missing and self._is_in_numbers:
            # Of numbers, only the window that has begun is joined.
            yield from self._scan(text[:missing], False)
            rest = len(self._buffer)
            if self._is_in_numbers and rest <= missing:
                missing -= rest
                self._received -= rest
                self._buffer = b""
            text = memoryview(text)[missing:]
        yield from self._scan(text, last)

    @property
    def _is_in_numbers(self) -> bool:
        return self._array is not None and self._array.has_numbers

    def _scan(self, text: bytes | memoryview, last: bool) -> Iterator[Event]:
        """Scan a text behind the buffer; numbers are scanned where they were received."""
        self._received += len(text)
        if self._buffer or not self._is_in_numbers:
            self._buffer += text
            text = b""
        yield from self._scan_buffer(text, last)
        # Release what was scanned before more text comes.
        self._buffer, self._position = self._buffer[self._position :], 0

    def _scan_buffer(self, numbers: bytes | memoryview, last: bool) -> Iterator[Event]:
        """Scan the buffer; if it is empty, ``numbers`` are the next text of an array."""
        while True:
            if self._array is not None:
                yield from self._array.scan(numbers or self._buffer, last, self._position)
                numbers = b""
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
        """Return the header with its placeholders, and release it.

        Call it once, after ``feed(b"", last=True)``. Raises GatewayError: 400 or 502 for text that
        ends inside an array, 413 for a request with too many values.
        """
        if self._array is not None:
            raise self._truncated_error(self._array)
        self._move_to_header(len(self._buffer))
        if self.arrays and b"\\" in self._header[self._fragment_start :]:
            # A key with escapes is not extracted, and its value could equal a placeholder.
            self._check_no_second_data(self._parse_tensors(self._header[self._fragment_start :]))
        self._check_value_count(self._header)
        header, self._header = bytes(self._header), bytearray()
        self._buffer, self._position = b"", 0
        return header

    def _leave_array(self) -> None:
        """Go on behind an array that has ended."""
        self._array = None
        behind = self._fragment_start
        self.extracted.append(
            ExtractedArray(self._array_start, self._offset, self._placeholder_at, behind)
        )

    def _truncated_error(self, array: ArrayScanner) -> GatewayError:
        if array.invalid_text is None:
            return self._words.malformed(
                f"{self._words.name} ends at byte {self._received}, "
                f"inside the data of {self._label}"
            )
        return self._words.malformed(
            f"{self._label}: data is not an array of plain values, at byte "
            f"{self._array_start + array.invalid_at}, near: {quote_bytes(array.invalid_text)}"
        )

    def _find_key(self, last: bool) -> bool:
        """Move text to the header, up to the next ``"data"`` that may be a tensor's key."""
        buffer, start = self._buffer, self._position
        found = self._search(_ARRAY_KEY, start, len(buffer))
        look = max(start, start + self._next_probe - len(self._header))
        end = len(buffer) if found is None else found.start() + 1
        key = self._search(_NON_ARRAY_KEY, look, end) or found
        if key is None:
            # The key may have arrived in part.
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
        """Search for a key in the buffer; the text before the buffer is in the header."""
        found = pattern.search(self._buffer, start, end)
        if found is not None and not found.start() and self._header.endswith(b"\\"):
            return pattern.search(self._buffer, 1, end)
        return found

    def _enter_value(self) -> Generator[Event, None, bool]:
        """Look at the value of the key; return whether text is left to scan."""
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
        """Scan again from the last quote of what was no key: another key may begin there.

        That is no valid JSON, but errors must not depend on how the text was split.
        """
        self._header.pop()
        self._buffer, self._position = b'"' + self._buffer[self._position :], 0

    def _check_data_is_array(self) -> None:
        """Refuse data of a tensor that is no array; other keys ``data`` may have any value.

        The missing placeholder would show it in the end. But before that, a large string would be
        refused for its size. Each check parses the header, so the header must have doubled in
        between.
        """
        if self._key_at < self._next_probe:
            return
        self._next_probe = 2 * self._key_at
        tensors = self._tensors_so_far()
        if tensors:
            index = max(0, self._tensor) + len(tensors) - 1
            is_same = index == self._tensor
            label = self._label if is_same else self._words.label_of(tensors[-1], index)
            kind = describe_json_kind(self._buffer[self._position : self._position + 1])
            raise self._words.malformed(f"{label}: data must be an array, got {kind}")

    def _enter_array(self) -> ArrayStart:
        tensors = self._tensors_so_far()
        if tensors is None:
            self._check_value_count(self._header)
            raise _misplaced_array_error(
                self._words, bytes(self._header), self._key_at, self.extracted
            )
        first = not self.arrays
        if not first:
            self._check_no_second_data(tensors)
            if len(tensors) == 1:
                raise self._duplicate_data_error(self._label)
        self._tensor = len(tensors) - 1 + max(0, self._tensor)
        if self._tensor >= self._tensor_cap:
            raise self._words.too_many_tensors(self._tensor_cap)
        self._array_start = self._offset
        self._placeholder_at = len(self._header)
        self._append_to_header(orjson.dumps(placeholder(len(self.arrays))))
        self._fragment_start = len(self._header)
        self.arrays.append(self._tensor)
        self._label = self._words.label_of(tensors[-1], self._tensor)
        if "data" in tensors[-1]:
            raise self._duplicate_data_error(self._label)
        self._array = ArrayScanner(self._label, self._depth_cap, self._words)
        return ArrayStart(self._tensor, tensors[-1], {} if first else tensors[0])

    def _check_no_second_data(self, tensors: list[dict[str, Any]] | None) -> None:
        """Refuse a second ``data`` in the tensor of the last array, the first of ``tensors``."""
        if tensors and "data" in tensors[0]:
            raise self._duplicate_data_error(self._label)

    def _duplicate_data_error(self, label: str) -> GatewayError:
        return self._words.malformed(f"{label} has more than one data")

    def _tensors_so_far(self) -> list[dict[str, Any]] | None:
        """Parse the text since the last array up to a key ``data``; None if it is no tensor's key.

        With a probe key and the missing brackets appended, the text is valid JSON, and the last
        tensor has the probe key. A JSON library decides that more reliably than counting quotes. A
        key ``data`` in the result is a second one.
        """
        fragment = self._header[self._fragment_start : self._key_at]
        tensors = self._parse_tensors(fragment + b'"%s":1}]}' % _PROBE_KEY.encode())
        if not tensors or tensors[-1].pop(_PROBE_KEY, None) != 1:
            return None
        tensors[0].pop(_PROBE_KEY, None)
        return tensors

    def _parse_tensors(self, fragment: bytearray) -> list[dict[str, Any]] | None:
        """Parse the text behind the last array; None if it contains no tensors."""
        self._check_value_count(fragment)
        key = self._words.tensors
        opening = b'{"%s":[{"%s":0' % (key.encode(), _PROBE_KEY.encode()) if self.arrays else b""
        try:
            fields = parse_json(opening + fragment)
        except orjson.JSONDecodeError:
            return None
        tensors = fields.get(key) if isinstance(fields, dict) else None
        if not isinstance(tensors, list) or not all(isinstance(entry, dict) for entry in tensors):
            return None
        return tensors

    def _check_value_count(self, text: bytearray) -> None:
        """Refuse a request with too many values, before it is parsed; servers are trusted."""
        if self._words is REQUEST:
            try:
                check_value_count(text, self._tensor_cap)
            except GatewayError:
                if _V1_START.match(text):
                    raise bad_request(V1_REQUEST_HINT) from None
                check_nesting(bytes(text), self._depth_cap)
                raise

    def _move_to_header(self, end: int) -> None:
        """Move the text of the buffer up to ``end`` to the header."""
        self._append_to_header(self._buffer[self._position : end])
        self._position = end

    def _append_to_header(self, text: bytes) -> None:
        self._header += text
        if len(self._header) > self._header_cap:
            raise self._too_large_error()

    def _too_large_error(self) -> GatewayError:
        if self._words is REQUEST:
            # Look no further: that would depend on how the text arrived.
            start = bytes(self._header[: self._header_cap + 1])
            if _V1_START.match(start):
                return bad_request(V1_REQUEST_HINT)
            check_header_end(start, self.extracted)
        return GatewayError(
            self._words.too_large,
            f"the JSON around the data is larger than {self._header_cap} bytes "
            "(limits.max_inference_header_bytes)",
        )


_OPENING_BRACKETS, _CLOSING_BRACKETS = b"[{", b"]}"
_ALL_BUT_BRACKETS: Final = bytes(set(range(256)) - set(b"[{]}"))


def _misplaced_array_error(
    words: ErrorVocabulary, header: bytes, key_at: int, cuts: Sequence[ExtractedArray]
) -> GatewayError:
    """Make the error for an array that is the value of the last key of a header, at ``key_at``.

    ``cuts`` are the arrays extracted before it. Anything wrong before the key is reported first.
    """
    try:
        fields = parse_json(header + b"1" + _missing_brackets(header))
    except orjson.JSONDecodeError as error:
        return invalid_json_error(words, header, error, cuts)
    try:
        if words.tensors in check_object(fields, words):
            check_entries(fields, words)
    except GatewayError as error:
        return error
    return words.malformed(
        f'there is an array "data" outside the tensors of {words.tensors}, '
        f"at byte {original_offset(key_at, cuts)}, near: {quote_around(header, key_at, cuts)}"
    )


def _missing_brackets(text: bytes) -> bytes:
    """Return the brackets that a text lacks; it ends outside of any string."""
    is_open: list[int] = []
    for code in outside_strings(text).translate(None, _ALL_BUT_BRACKETS):
        if code in _OPENING_BRACKETS:
            is_open.append(code)
        elif is_open:
            is_open.pop()
    return bytes(_CLOSING_BRACKETS[_OPENING_BRACKETS.index(code)] for code in reversed(is_open))
