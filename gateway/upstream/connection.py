"""One HTTP/1.1 connection to a server, for one request after the other."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from httptools import HttpResponseParser

from gateway.errors import GatewayError, bad_answer
from gateway.http1.body import BodyDecoder, ChunkedDecoder, LengthDecoder, UntilCloseDecoder
from gateway.http1.connection import BodyStream, Connection
from gateway.http1.head import HeadReader, MalformedError, ResponseHead, parse_response_head


class ServerConnection(Connection):
    """Reads the answers of the server at ``url``; its user writes the requests."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._reader = HeadReader(HttpResponseParser)
        self._method = ""
        self._head: asyncio.Future[ResponseHead] | None = None
        self._keep = False
        self._decoder: BodyDecoder | None = None
        self.body: BodyStream | None = None
        """That of the answer, once its head is there."""

    @property
    def reusable(self) -> bool:
        """Tell whether another request may follow: the answer was whole, and nothing beyond it."""
        return self._keep and self.body is not None and self.body.ended and not self.closed

    def expect(self, method: str) -> asyncio.Future[ResponseHead]:
        """Begin to wait for the answer to a request of this method; give its head to come.

        Raises GatewayError (502) where the server closes or what it sends is no answer.
        """
        self._method = method
        self._keep = False
        self._decoder = self.body = None
        self._head = asyncio.get_running_loop().create_future()
        if self.closed:
            self.fail(self._closed_too_early())
        return self._head

    def fail(self, error: Exception) -> None:
        """Let whoever waits for the answer have this error, and drop the connection."""
        self._keep = False
        if self.body is not None:
            self.body.fail(error)
        elif self._head is not None and not self._head.done():
            self._head.set_exception(error)
        self.drop()

    def drop(self) -> None:
        """Close at once."""
        self._keep = False
        self.transport.abort()

    def data_received(self, data: bytes | memoryview) -> None:
        """Take what the server sends."""
        try:
            if self.body is None:
                self._take_head(data)
            else:
                self._take_body(data)
        except GatewayError as error:
            self.fail(error)
        except MalformedError as error:
            self.fail(bad_answer(f"{self._url} answered what is not HTTP: {error}"))

    def eof_received(self) -> None:
        """Take the end of what the server sends; the transport then closes itself."""
        self._keep = False
        if self.body is not None and isinstance(self._decoder, UntilCloseDecoder):
            self.body.end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let whoever waits for the answer know."""
        super().connection_lost(exc)
        self.fail(self._closed_too_early())

    def _take_head(self, data: bytes | memoryview) -> None:
        if self._head is None or self._head.done():
            # More than it was asked for would be taken for the answer to the next request.
            self.drop()
            return
        while (found := self._reader.feed(data)) is not None:
            text, data = found
            head = parse_response_head(text, self._method)
            if head.status == HTTPStatus.SWITCHING_PROTOCOLS:
                raise bad_answer(
                    f"{self._url} answered 101 Switching Protocols, for which it was not asked"
                )
            if head.status >= 200:
                self._begin_body(head, data)
                return

    def _begin_body(self, head: ResponseHead, data: bytes | memoryview) -> None:
        assert self._head is not None
        # Some servers answer HEAD with a body, which may come when the next answer is awaited.
        self._keep = head.keep_alive and self._method != "HEAD"
        self.body = BodyStream(self.transport)
        if head.length is not None:
            self._decoder = LengthDecoder(head.length)
        else:
            self._decoder = ChunkedDecoder() if head.chunked else UntilCloseDecoder()
        self._head.set_result(head)
        self._take_body(data)

    def _take_body(self, data: bytes | memoryview) -> None:
        assert self.body is not None
        decoder = self._decoder
        if decoder is None or self.body.ended:
            self._keep = self._keep and not data
            return
        if piece := decoder.feed(data):
            self.body.feed(piece)
        if decoder.ended:
            self.body.end()
            self._keep = self._keep and not (decoder.rest or decoder.rest_is_lost)

    def _closed_too_early(self) -> GatewayError:
        when = "before it answered" if self.body is None else "before the end of its answer"
        return bad_answer(f"{self._url} closed the connection {when}")
