"""RPCs beside pass-through: the request and the response as the same call has them over HTTP.

So one handler serves both kinds of clients.
"""

from __future__ import annotations

from collections.abc import Callable

import orjson
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.errors import ErrorKind, GatewayError, bad_response, read_server_error
from gateway.observe.call_record import CallRecord
from gateway.protocol.error_vocabulary import RESPONSE
from gateway.protocol.grpc.headers import ACCEPT_ENCODING, ENCODING, TIMEOUT
from gateway.protocol.grpc.status import status_of_error
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.body_io import convert_message
from gateway.proxy.errors import send_status
from gateway.proxy.grpc.response import finish, start_response, write_message
from gateway.proxy.interfaces import ClientRequest, ClientResponse, HeaderLines

Chunks = list[bytes | memoryview]

ConvertResponse = Callable[[int, CIMultiDict[str], bytes], Chunks]
"""Makes the message of a response from its status, headers and body.

Raises HttpError for an error of the server, GatewayError for what is invalid.
"""

_OWN_HEADERS = frozenset(
    (
        "accept-encoding",
        "content-encoding",
        "content-length",
        "content-type",
        "te",
        ACCEPT_ENCODING,
        ENCODING,
        TIMEOUT,
    )
)
"""What says how a gRPC call is sent; it would say something else of a request over HTTP."""


def http_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return what passes to a server over HTTP of the headers of a gRPC call."""
    return CIMultiDict(
        (name, value) for name, value in headers.items() if name.lower() not in _OWN_HEADERS
    )


class HttpFormRequest(ClientRequest):
    """A gRPC call's request as it is over HTTP, with its body complete."""

    def __init__(
        self,
        request: ClientRequest,
        method: str,
        target: str,
        headers: CIMultiDict[str],
        body: bytes,
    ) -> None:
        passed = http_headers(request.headers)
        passed.update(headers)
        self.method = method
        self.target = target
        self.headers = CIMultiDictProxy(passed)
        self.added_headers = request.added_headers
        self.content_length = len(body)
        self._body = body

    async def read(self) -> bytes | memoryview:
        """Return the body, then nothing."""
        body, self._body = self._body, b""
        return body


class HttpFormResponse(ClientResponse):
    """Takes a response over HTTP, and sends it as a gRPC client gets it.

    ``convert`` makes the message of a response with its status, headers and body; it may raise
    GatewayError. A response may have ``cap`` bytes, which are reserved as they come.
    """

    def __init__(
        self,
        response: ClientResponse,
        convert: ConvertResponse,
        cap: int,
        reservation: Reservation,
    ) -> None:
        self.record = response.record
        self.is_grpc = True
        self._response = response
        self._convert = convert
        self._cap = cap
        self._reservation = reservation
        self._status = 0
        self._headers = CIMultiDict[str]()
        self._body = bytearray()

    @property
    def unwrapped(self) -> ClientResponse:
        """Return the response that is sent."""
        return self._response

    async def start(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:
        """Keep the head."""
        self._status = status
        self._headers = headers

    async def write(self, data: bytes | memoryview) -> None:
        """Keep a part of the body.

        Raises GatewayError: 502 if it is too much, 503 if too much is buffered.
        """
        self._reservation.grow(len(data))
        self._body += data
        if len(self._body) > self._cap:
            raise GatewayError(
                ErrorKind.BAD_RESPONSE, f"the response is larger than {self._cap} bytes"
            )

    async def finish(self, trailers: HeaderLines = ()) -> None:
        """Send the response as a message with a status, or as the status of an error."""
        response, body = self._response, bytes(self._body)
        self._body.clear()
        try:
            message = await convert_message(
                len(body), self._convert, self._status, self._headers, body
            )
        except HttpError as error:
            await send_status(response, error.code, error.text)
            return
        self.started = True
        await start_response(response)
        await write_message(response, message)
        await finish(response)

    def abort(self) -> None:
        """Drop the response."""
        self._response.abort()


class CollectedResponse(HttpFormResponse):
    """Keeps the message of a response, or the error instead of it; ``record`` is its own."""

    def __init__(
        self,
        response: ClientResponse,
        record: CallRecord,
        convert: ConvertResponse,
        cap: int,
        reservation: Reservation,
    ) -> None:
        super().__init__(response, convert, cap, reservation)
        self.record = record
        self.message: Chunks = []
        self.error: HttpError | None = None

    async def finish(self, trailers: HeaderLines = ()) -> None:
        """Convert the response."""
        try:
            self.message = self._convert(self._status, self._headers, bytes(self._body))
        except HttpError as error:
            self.error = error
        self._body.clear()


class HttpError(Exception):
    """An error of the server, or of the gateway as it writes them over HTTP."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.code = status_of_error(status)
        self.text = read_server_error(body) or f"the server returned {status}"


def parse_json(body: bytes) -> object:
    """Parse the JSON of a server's response; raises GatewayError (502)."""
    if not body:
        return None
    try:
        return orjson.loads(body)
    except ValueError as error:
        raise bad_response(f"{RESPONSE.name} is no JSON: {error}") from None
