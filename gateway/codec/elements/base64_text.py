"""Base64 in JSON strings → bytes: piece by piece, or many short ones at once."""

from __future__ import annotations

import binascii

import numpy as np
import numpy.typing as npt

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


Codes = npt.NDArray[np.uint8]
Lengths = npt.NDArray[np.intp]


def pad_texts(lengths: Lengths, texts: Codes) -> tuple[Lengths, Codes] | None:
    """Pad texts that lack all of their padding; None where one has a part of it.

    ``texts`` are one behind the other, each of its length.
    """
    missing = -lengths & 3
    if not missing.any():
        return lengths, texts
    has_some = (missing > 0) & (texts[np.maximum(np.cumsum(lengths) - 1, 0)] == ord("="))
    if (missing == 3).any() or has_some.any():
        return None
    lengths = lengths + missing
    is_text = _without_last(lengths, missing)
    padded = np.full(is_text.size, ord("="), np.uint8)
    np.place(padded, is_text, texts)
    return lengths, padded


def decode_texts(lengths: Lengths, texts: Codes, canonical: bool) -> tuple[Lengths, Codes] | None:
    """Decode padded texts, one behind the other; give the bytes likewise, with their lengths.

    Gives None where one is no base64 or, if ``canonical``, where its last character holds bits
    behind the last byte.
    """
    if (lengths & 3).any():
        return None
    ends = np.cumsum(lengths)[lengths > 0]
    is_padding = texts == ord("=")
    padding = np.zeros(lengths.size, np.intp)
    padding[lengths > 0] = is_padding[ends - 1] * (1 + is_padding[ends - 2].astype(np.intp))
    if np.count_nonzero(is_padding) != padding.sum():
        return None
    try:
        # All in one, as if there were no padding: each text is made of groups of four.
        text = texts.tobytes().replace(b"=", b"A")
        data = np.frombuffer(binascii.a2b_base64(text, strict_mode=True), np.uint8)
    except binascii.Error:
        return None
    sizes = lengths // 4 * 3
    is_data = _without_last(sizes, padding)
    if canonical and np.compress(~is_data, data).any():
        return None
    return sizes - padding, np.compress(is_data, data)


def _without_last(lengths: Lengths, counts: Lengths) -> npt.NDArray[np.bool_]:
    """Tell which bytes of texts are not among the last ones of each: so many, two at most."""
    ends = np.cumsum(lengths)
    others = np.ones(int(lengths.sum()), np.bool_)
    for count in (1, 2):
        others[ends[counts >= count] - count] = False
    return others
