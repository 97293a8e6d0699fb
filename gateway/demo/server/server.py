"""The demo server: serves the API over HTTP with aiohttp."""

import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from aiohttp import web
from aiohttp.typedefs import Handler

from gateway.demo.server.api import BODY, Api
from gateway.demo.server.tensors import RequestError
from gateway.demo.server.wire import json_response, stated_header_length

MAX_BODY: Final = 256 * 1024 * 1024  # bytes
EVENT_DELAY: Final = 0.15  # seconds between two server-sent events
_STOP_TIMEOUT: Final = 1.0  # seconds for the calls in progress when the server stops
_AUTO_DETECT: Final = 32 + zlib.MAX_WBITS  # makes zlib recognize gzip and deflate by itself


_TRACKED_ENDINGS: Final = ("/infer", "/trace", "/trace/setting")


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """The headers and the body of a request or response."""

    headers: Mapping[str, str]
    body: bytes

    @property
    def header_length(self) -> int | None:
        """The value of the HTTP header, None if it is not a number."""
        return stated_header_length(self.headers)

    @property
    def text(self) -> str:
        """The JSON part of the body."""
        return self.body[: self.header_length].decode(errors="replace")

    @property
    def form(self) -> str:
        """Name the form: empty, JSON, raw binary, or binary (also if some tensors are JSON)."""
        if self.header_length is None:
            return "JSON" if self.body else "empty"
        return "binary" if self.header_length else "raw binary"


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A request with its response; `seconds` is the time in the API, without any transfer."""

    method: str
    path: str
    request: RecordedMessage
    status: int
    response: RecordedMessage
    seconds: float


@dataclass(eq=False)
class DemoServer:
    """Serves the demo models over HTTP while its context is open.

    Port 0 takes any free port. A body of more than `max_body` bytes gets 413. `event_delay` is
    the time between two server-sent events, in seconds.
    """

    host: str = "127.0.0.1"
    port: int = 0
    max_body: int = MAX_BODY
    event_delay: float = EVENT_DELAY
    last_call: RecordedCall | None = field(default=None, init=False)
    """The last inference call, or call for trace settings."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start to listen; raises OSError when the address is not available."""
        app = web.Application(client_max_size=self.max_body, middlewares=[self._respond])
        app.add_routes(Api(self.event_delay).routes())
        self._runner = web.AppRunner(
            app, access_log=None, auto_decompress=False, shutdown_timeout=_STOP_TIMEOUT
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self.host, self.port).start()
        except OSError:
            await self._runner.cleanup()
            raise
        self.url = f"http://{self.host}:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Stop listening and close all connections."""
        await self._runner.cleanup()

    @web.middleware
    async def _respond(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Make an error a response, too, and record the call."""
        path, started, body = request.rel_url.raw_path, time.perf_counter(), b""
        try:
            if "%" in path:  # Triton decodes no percent signs
                raise RequestError("Not Found", 404)
            request[BODY] = body = await self._read(request)
            started = time.perf_counter()
            response = await handler(request)
        except RequestError as error:
            response = json_response({"error": error.message}, error.status)
        except web.HTTPException as error:
            response = json_response({"error": error.reason}, error.status)
        if path.endswith(_TRACKED_ENDINGS) and isinstance(response, web.Response):
            assert isinstance(response.body, bytes)
            self.last_call = RecordedCall(
                request.method,
                path,
                RecordedMessage(request.headers, body),
                response.status,
                RecordedMessage(response.headers, response.body),
                time.perf_counter() - started,
            )
        return response

    async def _read(self, request: web.Request) -> bytes:
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise too_large_error(self.max_body) from None
        except (ConnectionResetError, web.RequestPayloadError):
            raise RequestError("the request body is incomplete") from None
        encoding = request.headers.get("Content-Encoding", "")
        return decompress(encoding, body, self.max_body)


def decompress(encoding: str, body: bytes, limit: int) -> bytes:
    """Decompress a request body by its `Content-Encoding`: gzip or deflate, as Triton does.

    Raises RequestError: 501 for another encoding, 413 for a result of more than `limit` bytes,
    400 for a broken body.
    """
    if encoding.lower() in ("", "identity"):
        return body
    if encoding.lower() not in ("gzip", "deflate"):
        raise RequestError("Unsupported compression type", 501)
    decompressor = zlib.decompressobj(_AUTO_DETECT)
    try:
        plain = decompressor.decompress(body, limit + 1)
    except zlib.error as error:
        raise RequestError(f"failed to decompress the body: {error}") from None
    if len(plain) > limit:
        raise too_large_error(limit)
    if not decompressor.eof:
        raise RequestError("failed to decompress the body: it is incomplete")
    return plain


def too_large_error(limit: int) -> RequestError:
    """Return the error for a body of more than `limit` bytes."""
    return RequestError(f"the body is larger than {limit} bytes", 413)
