"""One HTTP/1.1 connection to a server, for one request after the other."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Protocol

from httptools import HttpResponseParser

from gateway.errors import ErrorKind, GatewayError, bad_response, strip_tracebacks
from gateway.http1.body import BodyDecoder, ChunkedDecoder, LengthDecoder, UntilCloseDecoder
from gateway.http1.connection import HEAD_COPIES, BodyStream, Connection
from gateway.http1.head import (
    MAX_CACHED_HEAD,
    HeadReader,
    MalformedError,
    ResponseHead,
    parse_response_head,
)
from gateway.system.buffers import BufferAccount
from gateway.upstream.http.connect_errors import describe_certificate_refusal

_WHOLE = 64 * 1024
"""Bytes of a body that is given as a whole: it is converted or written at once."""

MAX_INTERIM_RESPONSES = 100
"""Interim (1xx) responses to one request at most, as in Python's and Ruby's own HTTP clients."""

_SOON = 1.0
"""Seconds within which a server's close may have crossed the request on its way."""


class StaleConnectionError(GatewayError):
    """A kept connection was closed just as it was used again, before a byte of the answer.

    RFC 9112, section 9.3.1: the server had closed it for being idle, so that it never took up the
    request, which can be sent again.
    """


class HeadReceiver(Protocol):
    """Who waits for the head of an answer."""

    def on_complete(self, head: ResponseHead, body: bytes | memoryview) -> None:
        """Take a small head that came with all of a small body."""

    def on_headers(self, head: ResponseHead) -> None:
        """Take a head; the body is the connection's."""

    def on_error(self, error: Exception) -> None:
        """Take it that there will be no answer."""


class _ClosedTransport(asyncio.Transport):
    """The transport of a connection that was never made."""

    def is_closing(self) -> bool:
        return True

    def abort(self) -> None:
        pass


class ServerConnection(Connection):
    """Reads the answers of the server at ``url``; its user writes the requests."""

    def __init__(self, url: str, buffers: BufferAccount | None = None) -> None:
        super().__init__(buffers)
        self._url = url
        self._reader = HeadReader(HttpResponseParser)
        self._method = ""
        self._receiver: HeadReceiver | None = None
        self._keep = False
        self._ended = False
        self._is_kept = False
        self._asked_at = 0.0
        self._silent = True
        self._interim = 0
        self._decoder: BodyDecoder | None = None
        self.body: BodyStream | None = None
        """That of the answer, once its head is there."""

    @property
    def reusable(self) -> bool:
        """Tell whether another request may follow: the answer was whole, and nothing beyond it."""
        return self._keep and self._ended and not self.closed

    def begin_request(self, method: str, receiver: HeadReceiver) -> None:
        """Begin to wait for the answer to a request of this method.

        It fails with a GatewayError (502) where the server closes or what it sends is no answer.
        """
        self._is_kept = self._ended
        self._asked_at = self.loop.time()
        self._silent = True
        self._interim = 0
        self._method = method
        self._receiver = receiver
        self._keep = self._ended = False
        self._decoder = self.body = None
        if self.closed:
            self.fail(self._closed_too_early())

    def expect_response(self, method: str) -> asyncio.Future[ResponseHead]:
        """Begin to wait for an answer as ``ask`` does; give its head to come."""
        waiting = _Waiting(self)
        self.begin_request(method, waiting)
        return waiting.head

    def buffer_body(self, body: bytes | memoryview) -> None:
        """Keep a body that came as a whole for its reader."""
        self.body = BodyStream(self.read_flow, self.buffers)
        self.body.feed(body, last=True)
        self.body.end()

    def fail(self, error: Exception) -> None:
        """Let whoever waits for the answer have this error, and drop the connection."""
        self._keep = False
        strip_tracebacks(error)  # it may never be raised
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.on_error(error)
            self.discard_body()  # nobody reads what came of it
        elif self.body is not None:
            self.body.fail(error)
        self._abort()

    def detach_transport(self) -> None:
        """Let go of the transport where connecting was cancelled: uvloop does not end it then.

        It and the connection would keep each other.
        """
        self.connection_made(_ClosedTransport())

    def drop(self) -> None:
        """Close at once; nobody waits any more, nor reads what came of a body."""
        self.discard_body()
        self._abort()

    def discard_body(self) -> None:
        """Drop what nobody has read of an answer's body, as its call is over."""
        if self._head_size:
            self._count_head(0)
        if self.body is not None:
            self.body.discard()

    def _abort(self) -> None:
        self.discard_read_ahead()
        self._keep = False
        self._receiver = None
        self.transport.abort()

    def data_received(self, data: bytes | memoryview) -> None:
        """Take what the server sends."""
        self._silent = False
        if self._read_ahead:
            self.buffer_read_ahead(data)
            return
        try:
            if self.body is None:
                self._take_head(data)
            else:
                self._take_body(data)
        except GatewayError as error:
            self.fail(error)
        except MalformedError as error:
            self.fail(bad_response(f"{self._url} answered what is not HTTP: {error}"))

    def eof_received(self) -> None:
        """Take the end of what the server sends; the transport then closes itself."""
        self._keep = False
        until_close = isinstance(self._decoder, UntilCloseDecoder)
        if self.body is not None and until_close and self.is_clean_eof():
            self._end_body(self.body)

    def connection_lost(self, exc: Exception | None) -> None:
        """Let whoever waits for the answer know."""
        super().connection_lost(exc)
        while self._read_ahead:
            self.process_read_ahead()
        # By TLS 1.3 the server looks at the gateway's certificate once the connection is made.
        if refused := describe_certificate_refusal(exc):
            message = f"cannot connect to {self._url}: {refused}"
            self.fail(GatewayError(ErrorKind.UNREACHABLE, message))
        else:
            self.fail(self._closed_too_early())

    def _take_head(self, data: bytes | memoryview) -> None:
        if self._receiver is None:
            # More than it was asked for would be taken for the answer to the next request.
            self.drop()
            return
        while (found := self._reader.feed(data)) is not None:
            text, data = found
            head = parse_response_head(text, self._method)
            if head.status >= 200:
                is_small = len(text) <= MAX_CACHED_HEAD
                if self._head_size or not is_small:
                    self._count_head(0 if is_small else HEAD_COPIES * len(text))
                self._take_final(head, self._receiver, data, is_small)
                return
            self._check_interim(head.status)
        self._count_head(self._reader.size)

    def _check_interim(self, status: int) -> None:
        """Ignore an interim response; raises GatewayError (502) where it cannot be ignored."""
        if status == HTTPStatus.SWITCHING_PROTOCOLS:
            raise bad_response(
                f"{self._url} answered 101 Switching Protocols, for which it was not asked"
            )
        self._interim += 1
        if self._interim > MAX_INTERIM_RESPONSES:
            raise bad_response(
                f"{self._url} sent more than {MAX_INTERIM_RESPONSES} interim (1xx) responses "
                "to one request"
            )

    def _take_final(
        self,
        head: ResponseHead,
        receiver: HeadReceiver,
        data: bytes | memoryview,
        is_small: bool,
    ) -> None:
        # Some servers answer HEAD with a body, which may come when the next answer is awaited.
        self._keep = head.keep_alive and self._method != "HEAD"
        if len(data) == head.length and len(data) <= _WHOLE and is_small:
            self._ended = True
            self._receiver = None
            receiver.on_complete(head, data)
            return
        self._begin_body(head, data)
        # Not before: a body that is broken from its start is an answer that failed.
        self._receiver = None
        receiver.on_headers(head)

    def _begin_body(self, head: ResponseHead, data: bytes | memoryview) -> None:
        self.body = BodyStream(self.read_flow, self.buffers)
        if head.length is not None:
            self._decoder = LengthDecoder(head.length)
        else:
            self._decoder = ChunkedDecoder() if head.chunked else UntilCloseDecoder()
        self._take_body(data)

    def _take_body(self, data: bytes | memoryview) -> None:
        assert self.body is not None
        decoder = self._decoder
        if decoder is None or self._ended:
            self._keep = self._keep and not data
            return
        if piece := decoder.feed(data):
            self.body.feed(piece, last=decoder.ended)
        if decoder.ended:
            self._end_body(self.body)
            self._keep = self._keep and not decoder.rest
        elif decoder.rest:
            self.defer_read_ahead(decoder.rest)

    def _end_body(self, body: BodyStream) -> None:
        body.end()
        self._ended = True

    def _closed_too_early(self) -> GatewayError:
        if self._silent and self._is_kept and self.loop.time() - self._asked_at < _SOON:
            message = f"{self._url} closed a kept connection as it was used again"
            return StaleConnectionError(ErrorKind.BAD_RESPONSE, message)
        when = "before it answered" if self.body is None else "before the end of its answer"
        kind = ErrorKind.NO_RESPONSE if self._silent else ErrorKind.BAD_RESPONSE
        return GatewayError(kind, f"{self._url} closed the connection {when}")


class _Waiting:
    """Makes a future of a head: a HeadReceiver."""

    def __init__(self, connection: ServerConnection) -> None:
        self.head: asyncio.Future[ResponseHead] = connection.loop.create_future()
        self._connection = connection

    def on_complete(self, head: ResponseHead, body: bytes | memoryview) -> None:
        if not self.head.done():
            self._connection.buffer_body(body)
        self.on_headers(head)

    def on_headers(self, head: ResponseHead) -> None:
        if self.head.done():  # nobody waits any more
            self._connection.drop()
        else:
            self.head.set_result(head)

    def on_error(self, error: Exception) -> None:
        if not self.head.done():
            self.head.set_exception(error)
