"""Splits the text of one JSON array into runs of complete elements while it streams by.

Runs end at places that depend on the text alone, never on how it arrived. The scanner looks at
windows of ``WINDOW`` or ``STRING_WINDOW`` bytes, counted from the end of the run before. So results
and errors are the same however a body is split.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import numpy as np

from gateway.codec import native
from gateway.errors import GatewayError
from gateway.protocol.error_vocabulary import REQUEST, ErrorVocabulary

WINDOW = 256 * 1024
"""Bytes of numbers scanned and converted at once: about 0.3 ms of work in C."""

STRING_WINDOW = 32 * 1024
"""Bytes of strings scanned and converted at once: tiny ones cost ten times as much per byte."""

_PEEK_BYTES: Final = 16

_QUOTED_SUFFIX: Final = 64
"""Bytes behind an invalid character that stay in the run, so that errors can quote them."""


class ElementRun:
    """Complete elements of an array: the text between two of its commas.

    The text is a part of ``buffer``, or all of it: cutting it out would copy it. Numbers may lie
    where they were received.
    ``depth_before`` and ``depth_after`` count the brackets open around it; ``balanced()`` adds
    them.
    """

    def __init__(
        self,
        buffer: bytes | memoryview,
        depth_before: int,
        depth_after: int,
        first: bool,
        start: int = 0,
        size: int | None = None,
    ) -> None:
        self.buffer = buffer
        self.depth_before = depth_before
        self.depth_after = depth_after
        self.first = first
        self.start = start
        self.size = len(buffer) - start if size is None else size

    @property
    def text(self) -> bytes:
        """Return the text of the run."""
        return bytes(self.buffer[self.start : self.start + self.size])

    def __len__(self) -> int:
        """Return the size of the text in bytes."""
        return self.size

    def detach(self) -> None:
        """Copy the text from where it was received, which it would pin, so that it may wait."""
        if not isinstance(self.buffer, bytes):
            self.buffer, self.start = self.text, 0

    def balanced(self) -> bytes:
        """Return the run as a JSON array, with the brackets that it lacks."""
        if not (self.depth_before or self.depth_after):
            return self.text
        return b"".join((b"[" * self.depth_before, self.view, b"]" * self.depth_after))

    @property
    def view(self) -> memoryview:
        """Return the text of the run, not copied."""
        return memoryview(self.buffer)[self.start : self.start + self.size]

    @property
    def lacks_element(self) -> bool:
        """Tell whether the comma before or behind the run lacks an element beside it.

        Such a run, balanced, would look like a valid array.
        """
        begins = not self.first and _first_byte(self.view) in (b"", b"]")
        return begins or (self.depth_after > 0 and _last_byte(self.view) in (b"", b"["))


class StringPart:
    """A piece of a string longer than a window; no escape and no character is split.

    The string is the first element of the next run, where ``""`` is its placeholder.
    """

    def __init__(self, text: bytes) -> None:
        self.text = text

    def __len__(self) -> int:
        """Return the size of the text in bytes."""
        return len(self.text)


_Step = tuple[ElementRun | StringPart | None, int, bytes]
"""One step of the scan: the item, the bytes it used, and the placeholder to leave."""

_SPACE: Final = b" \t\n\r"
BEFORE_FIRST_VALUE = re.compile(rb"[\[\], \t\n\r]*+")
_MAX_ESCAPE: Final = len(rb"\ud83d\ude00")


class ArrayScanner:
    """Splits one array into runs and finds its end; its text begins with the opening bracket.

    ``label`` names the tensor in errors. Raises GatewayError (400, 502) for nesting beyond the cap,
    and for a window without a comma.
    """

    def __init__(self, label: str, depth_cap: int, words: ErrorVocabulary = REQUEST) -> None:
        self._label = label
        self._words = words
        self._depth_cap = depth_cap
        self._depth = 0
        self._first = True
        self._window = WINDOW
        self._is_strings: bool | None = None
        self._before_long_string: bytes | None = None
        self._searched = 0
        self.ended = False
        self._buffer: bytes | memoryview = b""
        self._position = 0
        self._consumed = 0
        self.invalid_text: bytes | None = None
        """Text that no array of plain values can contain; the scan ends there."""
        self.invalid_at = 0
        """The offset of that text in the array."""

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes of text held beside the buffer; all of what is scanned in place."""
        held = len(self._before_long_string or b"")
        return held if isinstance(self._buffer, bytes) else held + len(self._buffer)

    @property
    def has_numbers(self) -> bool:
        """Whether the array is known to hold no strings: then its text may be any buffer."""
        return self._is_strings is False

    @property
    def rest(self) -> bytes:
        """Return the text that is not scanned yet or, if ``ended``, what follows the array."""
        return bytes(self._buffer[self._position :])

    def take_rest(self) -> tuple[bytes, int]:
        """Return the buffer and the offset of ``rest`` in it, and release both."""
        buffer = self._buffer
        rest = (buffer, self._position) if isinstance(buffer, bytes) else (self.rest, 0)
        self._buffer, self._position = b"", 0
        return rest

    def scan(
        self, buffer: bytes | memoryview, last: bool, position: int = 0
    ) -> Iterator[ElementRun | StringPart]:
        """Yield the items of the buffer, which begins with the ``rest`` of the last call.

        The text begins at ``position``; ``last`` marks its end. Text behind the array is hardly
        read and never copied, as a buffer may hold many arrays. It is bytes unless the array
        ``has_numbers``.
        """
        self._buffer, self._position = buffer, position
        while not self.ended and self.invalid_text is None:
            step = self._step(self._buffer, self._position, last)
            if step is None:
                break
            item, used, placeholder = step
            self._searched = 0
            self._position += used
            self._consumed += used - len(placeholder)
            if placeholder:
                self._buffer, self._position = placeholder + self.rest, 0
            if item is not None:
                yield item
        if self.invalid_text is not None:
            self._buffer, self._position = b"", 0

    def _step(self, buffer: bytes | memoryview, start: int, last: bool) -> _Step | None:
        if self._is_strings is None and not self._detect_kind(buffer, start, last):
            return None
        end = min(start + self._window, len(buffer))
        if not self._is_strings:
            return self._number_run(buffer, start, end, last)
        assert isinstance(buffer, bytes)
        if self._before_long_string is not None:
            full = end - start == self._window
            return self._long_string(buffer[start:end], self._before_long_string, full, last)
        return self._string_run(buffer, start, end, last)

    def _detect_kind(self, buffer: bytes | memoryview, start: int, last: bool) -> bool:
        """Look whether the first value is a string; return whether that can be told yet."""
        end = min(start + self._window, len(buffer))
        before = BEFORE_FIRST_VALUE.match(buffer, start + self._searched, end)
        value = before.end() if before else start
        if value == end:
            self._searched = end - start
            return last or end - start == self._window
        self._searched = 0
        self._is_strings = buffer[value] == ord('"')
        if self._is_strings:
            self._window = STRING_WINDOW
        return True

    def _number_run(
        self, buffer: bytes | memoryview, start: int, end: int, last: bool
    ) -> _Step | None:
        size = end - start
        full = size == self._window
        searched = 0 if full else self._searched
        scan = native.scan_numbers(buffer, start + searched, end)
        stopped = searched + scan[0] < size
        if not stopped and not full:
            return self._wait(size)
        if searched:
            scan = native.scan_numbers(buffer, start, end)
        stop, close, opened, closed, cut, opened_before_cut, closed_before_cut = scan
        quoted_end = min(start + stop + _QUOTED_SUFFIX, end)
        behind = buffer[start + close : start + stop]
        is_end = close > 0 and bytes(behind).strip(_SPACE) in (b"", b",")
        if is_end and self._depth_behind(opened, closed, buffer, start, close) == 0:
            return self._run(buffer, start, close, 0, close)
        if stopped:
            return self._invalid_run(bytes(buffer[start:quoted_end]), stop, full or last)
        if cut < 0:
            self._check_depth(self._depth + max_depth(bytes(buffer[start:quoted_end])))
            raise self._no_comma_error()
        depth = self._depth_behind(opened_before_cut, closed_before_cut, buffer, start, cut)
        return self._run(buffer, start, cut, depth, cut + 1)

    def _depth_behind(
        self, opened: int, closed: int, buffer: bytes | memoryview, start: int, size: int
    ) -> int:
        """Return the depth behind so many brackets; checks the nesting of the text from start."""
        if self._depth + opened > self._depth_cap:
            self._check_depth(self._depth + max_depth(bytes(buffer[start : start + size])))
        return self._depth + opened - closed

    def _string_run(self, buffer: bytes, start: int, end: int, last: bool) -> _Step | None:
        size = end - start
        full = size == self._window
        if not full and not last and buffer.find(b"]", start + self._searched, end) < 0:
            return self._wait(size)
        scan = native.scan_strings(memoryview(buffer)[start:end], self._depth)
        position, cut, depth_at_cut, deepest, last_string, ended = scan
        self._check_depth(deepest)
        if ended:
            return self._run(buffer, start, position, 0, position)
        window = buffer[start:end]
        tail = window[position:].lstrip(_SPACE)
        if tail and not tail.startswith(b'"'):
            return self._invalid_run(window, position, full or last)
        if not full:
            return self._wait(size)
        if cut:
            return self._run(window, 0, cut - 1, depth_at_cut, cut)
        return self._open_long_string(window, last_string)

    def _open_long_string(self, window: bytes, start: int | None) -> _Step:
        # The window may end right behind a complete string: that one is long too.
        # An empty string, or one that has only begun, would come up again in the next window.
        if start is None or window[start : start + 2] in (b'"', b'""'):
            raise self._no_comma_error()
        self._before_long_string = window[:start]
        return None, start + 1, b""

    def _long_string(self, window: bytes, before: bytes, full: bool, last: bool) -> _Step | None:
        if not full and not last and window.find(b'"', self._searched) < 0:
            return self._wait(len(window))
        cut = find_string_cut(window, full, last)
        if cut is None:
            return self._wait(len(window))
        end, closed = cut
        if not closed:
            return StringPart(window[:end]), end, b""
        self._before_long_string = None
        return StringPart(window[:end]), end + 1, before + b'""'

    def _wait(self, size: int) -> _Step | None:
        # Text that arrives in small reads must not be searched from its start each time.
        self._searched = size
        return None

    def _run(
        self, buffer: bytes | memoryview, start: int, size: int, depth_after: int, used: int
    ) -> _Step:
        if isinstance(buffer, bytes) and len(buffer) - size > len(buffer) // 16:
            # Do not pin much more memory than the text that is accounted for.
            buffer, start = buffer[start : start + size], 0
        run = ElementRun(buffer, self._depth, depth_after, self._first, start, size)
        self._depth, self._first = depth_after, False
        self.ended = depth_after == 0
        return run, used, b""

    def _invalid_run(self, window: bytes, stop: int, whole: bool) -> _Step | None:
        """Return a run with the text that is invalid at ``stop``: the decoder names the element."""
        if not whole and len(window) - stop < _QUOTED_SUFFIX:
            return None
        self.invalid_text = window[stop : stop + _QUOTED_SUFFIX]
        self.invalid_at = self._consumed + stop
        size = min(stop + _QUOTED_SUFFIX, len(window))
        return self._run(window, 0, size, max(1, self._depth), len(window))

    def _no_comma_error(self) -> GatewayError:
        size = self._window
        return self._words.malformed(f"{self._label}: data holds {size} bytes without a comma")

    def _check_depth(self, depth: int) -> None:
        if depth > self._depth_cap:
            raise self._words.malformed(
                f"{self._label}: data is nested deeper than {self._depth_cap}"
            )


def max_depth(text: bytes) -> int:
    """Return the deepest nesting of brackets in a text of numbers."""
    brackets = np.frombuffer(text.translate(None, _ALL_BUT_BRACKETS), np.int8)
    return int(np.cumsum(_MIDDLE - brackets, dtype=np.int32).max(initial=0))


def find_string_cut(window: bytes, full: bool, last: bool) -> tuple[int, bool] | None:
    """Find where text within a string can be split; return that, and whether the string ends there.

    ``full``: the window is full. ``last``: no more text will come. Returns None if
    more text is needed.
    """
    end = native.find_string_end(window)
    if window[end : end + 1] == b'"':
        return end, True
    if not full and not (last and end < len(window)):
        return None
    if not full or len(window) - end >= _MAX_ESCAPE:
        # This is no valid escape: the decoder gets it and reports it.
        return min(end + _MAX_ESCAPE, len(window)), False
    return _character_end(window, end), False


def _first_byte(text: memoryview) -> bytes:
    # Mostly it is near, which saves a copy of the text.
    return (bytes(text[:_PEEK_BYTES]).lstrip(_SPACE) or bytes(text).lstrip(_SPACE))[:1]


def _last_byte(text: memoryview) -> bytes:
    return (bytes(text[-_PEEK_BYTES:]).rstrip(_SPACE) or bytes(text).rstrip(_SPACE))[-1:]


_ALL_BUT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]"))
# An opening bracket is one less than this, a closing one is one more.
_MIDDLE: Final = np.int8(sum(b"[]") // 2)


def _character_end(text: bytes, end: int) -> int:
    """Return the last offset up to ``end`` that does not split a UTF-8 character."""
    for back in range(1, 4):
        code = text[end - back]
        if code < 0x80:
            return end
        if code >= 0xC0:
            length = 2 if code < 0xE0 else 3 if code < 0xF0 else 4
            return end if back >= length else end - back
    return end
