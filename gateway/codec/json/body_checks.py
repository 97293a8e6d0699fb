"""Checks JSON that passes through: its nesting, and binary tensors behind it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gateway.codec.structure_scan import mask_strings, nesting_steps, scan_values
from gateway.errors import GatewayError, bad_request, bad_response
from gateway.protocol.json_errors import ExtractedArray, original_offset
from gateway.sizes import SCAN_WINDOW

# --------------------------------------------------- nesting: it crashes recursive parsers

_QUOTE = ord('"')
_NON_STRUCTURAL = bytes(code for code in range(256) if code not in b'"[]{}')

_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1

# Bytes that may precede the first bracket: space, and a byte order mark. RapidJSON accepts parts of
# that mark.
_LEADING_BYTES = b" \t\r\n\xef\xbb\xbf"


def nests_deeper(body: bytes, cap: int) -> bool:
    """Tell whether a complete body is JSON nested deeper than ``cap`` levels."""
    # A quick upper bound: it counts brackets in strings too.
    if body.count(b"[") + body.count(b"{") <= cap:
        return False
    walk = NestingCheck(cap)
    try:
        walk.feed(body)
    except GatewayError:
        return True
    return False


class NestingCheck:
    """Checks the nesting of a body that arrives in parts, however it is split.

    ``cap`` is in levels. A body that does not begin with a bracket passes.
    """

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._started = False
        self._may_nest = True
        self._depth = 0
        self._inside = 0  # 1 within a string
        self._carry = b""

    def feed(self, text: bytes | memoryview) -> None:
        """Check the next part; raises GatewayError (400) if it nests too deep."""
        for start in range(0, len(text), SCAN_WINDOW):
            window = bytes(text[start : start + SCAN_WINDOW])
            if not self._started:
                self._start(window.lstrip(_LEADING_BYTES))
            if not self._may_nest:
                return
            self._scan(window)

    def _start(self, text: bytes) -> None:
        self._started = bool(text)
        self._may_nest = not text or text[:1] in (b"[", b"{")

    def _scan(self, text: bytes) -> None:
        text = self._carry + text
        if b"\\" in text:
            # Remove escapes, pairs of backslashes first, so that each quote begins or ends a
            # string.
            text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        self._carry = b"\\" if text.endswith(b"\\") else b""
        marks = np.frombuffer(text.translate(None, _NON_STRUCTURAL), np.uint8)
        if not marks.size:
            return
        inside = np.bitwise_and(np.cumsum(marks == _QUOTE, dtype=np.uint8) + self._inside, 1)
        depths = self._depth + np.cumsum(_STEPS[marks] * (inside ^ 1), dtype=np.int64)
        if int(depths.max()) > self._cap:
            raise bad_request(f"the request's JSON is nested deeper than {self._cap}")
        self._inside, self._depth = int(inside[-1]), int(depths[-1])


# ----------------------------- binary tensors without Inference-Header-Content-Length

_KEY = b'"binary_data_size"'
_SPACE = b" \t\r\n"
_BACKSLASH = ord("\\")


class HeaderLengthCheck:
    """Refuses a response with tensors behind its JSON but no Inference-Header-Content-Length.

    No client could tell where its JSON ends. Bodies without ``binary_data_size``, and bodies that
    are no JSON object, pass.
    """

    def __init__(self) -> None:
        self._started = False
        self._is_json = True
        self._has_size = False
        self._size = 0
        self._depth = 0
        self._carry = b""
        """The opening quote of a string that the last window ended in, and half of an escape."""
        self._key_carry = b""
        self._json_size = 0
        """Bytes of the JSON, once its end has come."""

    def feed(self, data: bytes | memoryview) -> None:
        """Check the next bytes of the response; raises GatewayError (502)."""
        for start in range(0, len(data), SCAN_WINDOW):
            if self._is_json:
                self._scan(bytes(data[start : start + SCAN_WINDOW]))

    def _scan(self, window: bytes) -> None:
        if not self._started:
            body = window.lstrip(_SPACE)
            self._started = bool(body)
            if body and not body.startswith(b"{"):
                self._is_json = False
                return
        rest = window
        if not self._json_size:
            end = self._find_json_end(window)
            key_text, rest = self._key_carry + window[:end], window[end:]
            self._has_size = self._has_size or _KEY in key_text
            self._key_carry = key_text[1 - len(_KEY) :]
        if rest.strip(_SPACE) and self._has_size:
            raise bad_response(
                "the server's response has binary tensors behind its JSON of "
                f"{self._json_size} bytes, but no Inference-Header-Content-Length"
            )
        self._size += len(window)

    def _find_json_end(self, window: bytes) -> int:
        """Return where the JSON ends in a window; the window's size if the end is to come."""
        text = self._carry + window
        codes, inside = mask_strings(text)
        depth_steps = nesting_steps(text, inside)
        offsets = np.flatnonzero(depth_steps)
        depths = self._depth + np.cumsum(depth_steps[offsets], dtype=np.int64)
        ends = offsets[depths <= 0]
        if ends.size:
            end = int(ends[0]) + 1 - len(self._carry)
            self._json_size = self._size + end
            return end
        self._depth = int(depths[-1]) if depths.size else self._depth
        self._carry = b""
        if text and inside[-1]:
            self._carry = b'"\\' if codes[-1] == _BACKSLASH else b'"'
        return len(window)


def check_header_end(text: bytes, cuts: Sequence[ExtractedArray] = ()) -> None:
    """Check the JSON part of a request; ``cuts`` are the arrays extracted from it.

    Raises GatewayError (400) if binary tensors follow the JSON.
    """
    ends, _ = scan_values(text)
    if _KEY in text and ends.size and text[ends[0] :].strip(_SPACE):
        size = original_offset(int(ends[0]), cuts)
        raise bad_request(
            f"bytes follow the request's JSON of {size} bytes: a request with binary tensors needs "
            f"the header Inference-Header-Content-Length: {size}"
        )
