"""The JSON documents of the admin address, for the page and other programs.

They are responses, and server-sent events each second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

import orjson
from aiohttp import web

from gateway.admin.view import Document, GatewayView

MAX_STREAMS = 32
"""Streams at a time."""
_INTERVAL = 1.0
_SEND_TIMEOUT = 15.0
"""Seconds for a client to read an event; one that is slower is cut off and comes again."""
_RECONNECT_MS = 2000
_FOLLOWED_CALLS = "100"
"""Calls of a second that are sent at most."""
_TOPICS = ("overview", "topology", "models", "calls", "journal")

_log = logging.getLogger("tensorgate.admin")

Describe = Callable[[], Awaitable[Document | None]]
"""Returns the document of a topic; None if there is nothing new in it."""


class Api:
    """The handlers of the documents; a query that cannot be read is a 400.

    Events are sent to pages until these leave, or the gateway stops.
    """

    def __init__(self, view: GatewayView) -> None:
        self._view = view
        self._stopping = asyncio.Event()
        self._streams = 0

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the documents and of the streams."""
        view = self._view
        return [
            *(
                _get(f"/api/{describe.__name__}", describe)
                for describe in (
                    *(view.overview, view.history, view.curves, view.topology),
                    *(view.models, view.model, view.calls, view.journal),
                )
            ),
            web.get("/api/events", self.stream, allow_head=False),
        ]

    async def end(self, _: web.Application) -> None:
        """End all streams: the pages connect again when the gateway is back."""
        self._stopping.set()

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Send the topics of a query each second."""
        topics = list(dict.fromkeys(request.query.get("topics", "overview").split(",")))
        if unknown := [each for each in topics if each not in _TOPICS]:
            known = ", ".join(_TOPICS)
            raise web.HTTPBadRequest(text=f"topics: expected {known}, got {unknown[0][:100]!r}")
        if self._streams >= MAX_STREAMS:
            raise web.HTTPServiceUnavailable(text=f"there are {MAX_STREAMS} event streams already")
        self._streams += 1
        try:
            return await self._stream(request, topics)
        finally:
            self._streams -= 1

    async def _stream(self, request: web.Request, topics: Sequence[str]) -> web.StreamResponse:
        try:
            describes = [(topic, self._describe(topic, request.query)) for topic in topics]
            first = [(topic, await describe()) for topic, describe in describes]
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.headers["X-Accel-Buffering"] = "no"  # a proxy between must not collect events
        await response.prepare(request)
        try:
            await self._send(response, f"retry: {_RECONNECT_MS}\n\n".encode())
            await self._send_events(response, describes, first)
        except ConnectionError:
            pass  # the page is gone
        except Exception as error:
            if not isinstance(error, TimeoutError):
                _log.exception("an event stream failed")
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _send_events(
        self,
        response: web.StreamResponse,
        describes: Sequence[tuple[str, Describe]],
        first: Sequence[tuple[str, Document | None]],
    ) -> None:
        documents = first
        while True:
            for topic, document in documents:
                if document is None:
                    await self._send(response, b": nothing new\n\n")  # tells whether it reads
                    continue
                data = b"event: %b\ndata: %b\n\n" % (topic.encode(), orjson.dumps(document))
                await self._send(response, data)
            try:
                async with asyncio.timeout(_INTERVAL):
                    await self._stopping.wait()
            except TimeoutError:
                documents = [(topic, await describe()) for topic, describe in describes]
            else:
                await self._send(response, b"event: end\ndata: {}\n\n")
                return

    def _describe(self, topic: str, query: Mapping[str, str]) -> Describe:
        """Return what describes a topic; parameters of its own begin with its name and a dot."""
        prefix = f"{topic}."
        own = {
            name.removeprefix(prefix): value
            for name, value in query.items()
            if name.startswith(prefix)
        }
        if topic in ("calls", "journal"):
            follower = _Follower(self._view, own)
            return follower.next_calls if topic == "calls" else follower.next_journal
        describe: Callable[[Mapping[str, str]], Awaitable[Document]] = getattr(self._view, topic)
        return lambda: describe(own)

    @staticmethod
    async def _send(response: web.StreamResponse, data: bytes) -> None:
        async with asyncio.timeout(_SEND_TIMEOUT):
            await response.write(data)


class _Follower:
    """Describes calls and events if new ones came since the last time; the first time, all."""

    def __init__(self, view: GatewayView, query: Mapping[str, str]) -> None:
        self._view = view
        self._query = query
        self._positions: Sequence[int] = ()
        self._events: Sequence[Document] | None = None

    async def next_calls(self) -> Document | None:
        query = {"limit": _FOLLOWED_CALLS, **self._query}
        document, self._positions = await self._view.calls_since(self._positions, query)
        return document if document["calls"] else None

    async def next_journal(self) -> Document | None:
        document = await self._view.journal(self._query)
        if document["events"] == self._events:
            return None
        self._events = document["events"]
        return document


def _get(path: str, describe: Callable[[Mapping[str, str]], Awaitable[Document]]) -> web.RouteDef:
    async def respond(request: web.Request) -> web.Response:
        try:
            document = await describe(request.query)
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        return web.Response(body=orjson.dumps(document), content_type="application/json")

    return web.get(path, respond)
