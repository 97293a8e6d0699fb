"""The response on a stream of HTTP/2."""

from __future__ import annotations

from typing import Protocol

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.http2.header_table import Header
from gateway.http2.hpack import HeaderList
from gateway.upstream.http2.connection import ServerStream
from gateway.upstream.transport import HeaderLines, UpstreamResponse


class Closing(Protocol):
    """The request of a response."""

    def close(self) -> None:
        """Release the stream, or reset it if the call is not complete."""


class Http2Response(UpstreamResponse):
    """A response whose body is read from its stream; ``call`` is closed with it."""

    def __init__(self, headers: HeaderList, stream: ServerStream, call: Closing) -> None:
        fields = headers.fields
        self.status = int(fields[0][1])
        self.reason = ""
        self.headers = CIMultiDictProxy(CIMultiDict(_decode(fields[1:])))
        self._stream = stream
        self._call = call
        self._received = 0

    @property
    def received_bytes(self) -> int:
        """Return the bytes of the body that were read so far."""
        return self._received

    @property
    def trailers(self) -> HeaderLines:
        """Return the trailers; they are complete once ``read`` has returned the end."""
        trailers = self._stream.trailers
        return () if trailers is None else tuple(_decode(trailers.fields))

    async def read(self) -> bytes | memoryview:
        """Return the next piece of the body; see UpstreamResponse."""
        data = await self._stream.read()
        self._received += len(data)
        return data

    def close(self) -> None:
        """Release the stream; see UpstreamResponse."""
        self._call.close()


def _decode(fields: tuple[Header, ...]) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in fields]
