"""Compressed request bodies, which Triton takes as gzip or deflate."""

import zlib
from typing import Final

from gateway.demo.server.errors import RequestError

_DETECT: Final = 32 + zlib.MAX_WBITS  # zlib's sign for: gzip or deflate, see for yourself


def decompress(encoding: str, body: bytes, limit: int) -> bytes:
    """Undo a `Content-Encoding`; the result is at most `limit` bytes.

    Raises RequestError: 501 for other encodings, 413 over the limit, 400 for a broken body.
    """
    if encoding.lower() in ("", "identity"):
        return body
    if encoding.lower() not in ("gzip", "deflate"):
        raise RequestError("Unsupported compression type", 501)
    inflater = zlib.decompressobj(_DETECT)
    try:
        plain = inflater.decompress(body, limit + 1)
    except zlib.error as error:
        raise RequestError(f"failed to decompress the body: {error}") from None
    if len(plain) > limit:
        raise too_large(limit)
    if not inflater.eof:
        raise RequestError("failed to decompress the body: it ends too early")
    return plain


def too_large(limit: int) -> RequestError:
    """Return the error for a body of more than `limit` bytes."""
    return RequestError(f"the body is larger than {limit} bytes", 413)
