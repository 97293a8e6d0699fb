"""Detects binary tensors behind JSON in a message without Inference-Header-Content-Length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gateway.codec.structure_scan import mask_strings, nesting_steps, scan_values
from gateway.errors import bad_request, bad_response
from gateway.protocol.json_errors import ExtractedArray, original_offset
from gateway.sizes import SCAN_WINDOW

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


def check_header_length(body: bytes) -> None:
    """Check a complete response; raises GatewayError (502) as HeaderLengthCheck does."""
    if _KEY in body:
        HeaderLengthCheck().feed(body)
