"""The demo server: the HTTP around the API."""

import asyncio
import contextlib
import time
from types import TracebackType
from typing import Final, Self

from aiohttp import web

from gateway.demo.server.api import Api, Call
from gateway.demo.server.compression import decompress, too_large
from gateway.demo.server.errors import RequestError
from gateway.demo.server.recorder import Exchange, Recorder
from gateway.demo.server.wire import Answer, error_answer

MAX_BODY: Final = 256 * 1024 * 1024  # bytes
EVENT_DELAY: Final = 0.15  # seconds between two server-sent events
_STOP_TIMEOUT: Final = 1.0  # seconds that calls under way are given when the server stops


class DemoServer:
    """Serve the demo models over HTTP; an async context manager that starts and stops itself.

    `port` 0 takes any free one. Bodies over `max_body` bytes get 413. `event_delay` is in
    seconds.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        max_body: int = MAX_BODY,
        event_delay: float = EVENT_DELAY,
    ) -> None:
        self._host = host
        self._port = port
        self._max_body = max_body
        self._event_delay = event_delay
        self._api = Api()
        self._recorder = Recorder()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen; raises OSError when the address cannot be had."""
        app = web.Application(client_max_size=self._max_body)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(
            app, access_log=None, auto_decompress=False, shutdown_timeout=_STOP_TIMEOUT
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port).start()
        except OSError:
            await runner.cleanup()
            raise
        self._runner = runner

    async def stop(self) -> None:
        """Stop listening and close all connections."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        """Return `http://host:port`; raises RuntimeError unless the server has started."""
        if self._runner is None:
            raise RuntimeError("the demo server is not running")
        host, port = self._runner.addresses[0][:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def last_exchange(self) -> Exchange | None:
        """Return the last exchange of inference or trace settings."""
        return self._recorder.last

    def exchange_at(self, path: str) -> Exchange | None:
        """Return the last exchange of a path."""
        return self._recorder.at(path)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await self._read(request)
        except RequestError as error:
            return _response(error_answer(error))
        call = Call(request.method, request.rel_url.raw_path, request.headers, body)
        started = time.perf_counter()
        answer = self._api.answer(call)
        self._recorder.add(call, answer, time.perf_counter() - started)
        return await self._stream(request, answer) if answer.events else _response(answer)

    async def _read(self, request: web.Request) -> bytes:
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise too_large(self._max_body) from None
        except (ConnectionResetError, web.RequestPayloadError):
            raise RequestError("the body broke off") from None
        encoding = request.headers.get("Content-Encoding", "")
        return decompress(encoding, body, self._max_body)

    async def _stream(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):  # the client may leave at any time
            for number, event in enumerate(answer.events):
                if number > 0:
                    await asyncio.sleep(self._event_delay)
                await response.write(event)
        return response


def _response(answer: Answer) -> web.Response:
    return web.Response(status=answer.status, headers=answer.headers, body=answer.body)
