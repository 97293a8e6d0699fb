"""Base64 in JSON strings → bytes, piece by piece."""

from __future__ import annotations

import binascii

_PADDING = (b"", b"===", b"==", b"=")


class Base64Decoder:
    """Takes what stands between the quotes of a string; gives the bytes that it is.

    Standard alphabet; the padding may be left out (as TensorFlow Serving takes it), and nothing
    else may stand there. Raises ValueError that says what is wrong.
    """

    def __init__(self) -> None:
        self._partial = b""
        self._padded = False

    def feed(self, text: bytes, last: bool) -> bytes:
        """Decode the next text, as far as it is whole; ``last`` tells that it is the end."""
        text = self._partial + text
        cut = len(text) if last else len(text) - text.endswith(b"\\")
        text, self._partial = text[:cut], text[cut:]
        if b"\\" in text:
            # The one escape that may stand for a character of base64, as PHP writes it.
            text = text.replace(b"\\/", b"/")
        if self._padded and text:
            raise ValueError("text behind the padding")
        if last and not text.endswith(b"="):
            text += b"=" * (-len(text) % 4)
        elif not last:
            whole = len(text) - len(text) % 4
            text, self._partial = text[:whole], text[whole:] + self._partial
        self._padded = text.endswith(b"=")
        return binascii.a2b_base64(text, strict_mode=True) if text else b""


def decoded(text: bytes) -> bytes:
    """Decode a whole text, of which escapes are resolved; raises ValueError."""
    if not text.endswith(b"="):
        # Most have all of their padding or none of it, and there may be very many.
        return binascii.a2b_base64(text + _PADDING[len(text) % 4], strict_mode=True)
    return Base64Decoder().feed(text, last=True)
