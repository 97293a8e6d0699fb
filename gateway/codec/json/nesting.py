"""Limits the nesting of JSON that passes through: deep nesting crashes recursive parsers."""

from __future__ import annotations

import numpy as np

from gateway.errors import GatewayError, bad_request
from gateway.sizes import SCAN_WINDOW

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
