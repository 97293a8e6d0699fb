"""Decompresses messages: "Compression" of PROTOCOL-HTTP2.md. The gateway compresses none itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from multidict import CIMultiDictProxy

from gateway.codec.decompress import Decompressor
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.grpc.headers import ENCODING
from gateway.protocol.json_errors import quote_value

_ENCODINGS: Final = ("gzip", "deflate")


class MessageDecompressor:
    """Decompresses one message as it arrives; ``cap`` limits what it becomes, in bytes.

    Beyond the first MiB it may grow to ``max_ratio`` times its size. Gzip may have several members,
    as some servers read all of them. Raises GatewayError: 501 for an unknown grpc-encoding, which
    the message names.
    """

    def __init__(
        self, headers: CIMultiDictProxy[str], cap: int, cap_name: str, max_ratio: int
    ) -> None:
        encoding = headers.get(ENCODING, "identity")
        if encoding not in _ENCODINGS:
            raise GatewayError(
                ErrorKind.UNSUPPORTED,
                f"a compressed message with grpc-encoding {quote_value(encoding)}; "
                f"the gateway reads {' and '.join(_ENCODINGS)}",
            )
        self._decompressor = Decompressor(encoding, max_ratio)
        self._left = cap
        self._cap = cap
        self._cap_name = cap_name

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes that wait to be decompressed, and the memory of zlib."""
        return self._decompressor.buffered_bytes

    def feed(self, data: bytes | memoryview, *, last: bool = False) -> Iterator[bytes]:
        """Yield what the next bytes decompress to, in chunks; iterate to the end.

        ``last`` marks the end of the message. Raises GatewayError: 400 for broken data, 413 above
        the cap, or the ratio.
        """
        self._decompressor.feed(data, last=last)
        while (chunk := self._decompressor.step()) is not None:
            self._left -= len(chunk)
            if self._left < 0:
                raise GatewayError(
                    ErrorKind.TOO_LARGE,
                    f"the request has a compressed message that becomes larger than {self._cap} "
                    f"bytes ({self._cap_name})",
                )
            yield chunk
