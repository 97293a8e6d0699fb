"""Decompresses messages: "Compression" of PROTOCOL-HTTP2.md. The gateway compresses none itself."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

from multidict import CIMultiDictProxy

from gateway.errors import ErrorKind, GatewayError, bad_request
from gateway.protocol.grpc.headers import ENCODING
from gateway.protocol.json_errors import quote_value
from gateway.sizes import CONVERT_CHUNK

_WINDOWS: Final = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


class MessageDecompressor:
    """Decompresses one message as it arrives; ``cap`` limits what it becomes, in bytes.

    Raises GatewayError: 501 for an unknown grpc-encoding, which the message names.
    """

    def __init__(self, headers: CIMultiDictProxy[str], cap: int, cap_name: str) -> None:
        encoding = headers.get(ENCODING, "identity")
        window = _WINDOWS.get(encoding)
        if window is None:
            raise GatewayError(
                ErrorKind.UNSUPPORTED,
                f"a compressed message with grpc-encoding {quote_value(encoding)}; "
                f"the gateway reads {' and '.join(_WINDOWS)}",
            )
        self._zlib = zlib.decompressobj(window)
        self._left = cap
        self._cap = cap
        self._cap_name = cap_name

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what the next bytes decompress to, in chunks; iterate to the end.

        Raises GatewayError: 400 for broken data, 413 above the cap.
        """
        while data and not self._zlib.eof:
            try:
                chunk = self._zlib.decompress(data, CONVERT_CHUNK)
            except zlib.error as error:
                raise bad_request(f"the request has a broken compressed message: {error}") from None
            self._left -= len(chunk)
            if self._left < 0:
                raise GatewayError(
                    ErrorKind.TOO_LARGE,
                    f"the request has a compressed message that becomes larger than {self._cap} "
                    f"bytes ({self._cap_name})",
                )
            yield chunk
            data = self._zlib.unconsumed_tail

    def end(self) -> None:
        """Check that the message was complete; raises GatewayError (400)."""
        if not self._zlib.eof:
            raise bad_request("the request has a compressed message that is cut short")
