"""A receiver of responses that records its calls."""

import asyncio
from collections.abc import Callable

from gateway.http1.head import ResponseHead
from gateway.upstream.transport import (
    FieldLines,
    HeaderLines,
    RequestTemplate,
    ReservedConnection,
    ResponseReceiver,
    UpstreamEndpoint,
    UpstreamResponse,
)


class RecordingReceiver:
    """Records its calls; each of them runs ``then`` and sets ``done``.

    Unless it ``handles`` complete responses, its ``response`` is read as it arrives, or fails.
    """

    def __init__(
        self,
        *,
        waits_for_chunks: bool = False,
        untouched: bool = False,
        idempotent: bool = False,
        handles: bool = True,
    ) -> None:
        self.idempotent = idempotent
        self.waits_for_chunks = waits_for_chunks
        self.untouched = untouched
        self.handles = handles
        self.calls: list[str] = []
        self.complete: list[tuple[ResponseHead, bytes]] = []
        self.responses: list[UpstreamResponse] = []
        self.errors: list[Exception] = []
        self.response: asyncio.Future[UpstreamResponse]
        self.response = asyncio.get_running_loop().create_future()
        self.done = asyncio.Event()
        self.then: Callable[[], object] = lambda: None

    def is_idempotent(self) -> bool:
        return self.idempotent

    def passes_untouched(self, head: ResponseHead) -> bool:
        return self.untouched

    def on_complete(
        self, head: ResponseHead, body: bytes | memoryview, trailers: FieldLines = ()
    ) -> bool:
        if self.handles:
            self.complete.append((head, bytes(body)))
            self._note(f"whole {head.status}")
        return self.handles

    def on_headers(self, response: UpstreamResponse) -> None:
        self.responses.append(response)
        if not self.response.done():
            self.response.set_result(response)
        self._note(f"begun {response.status}")

    def on_error(self, error: Exception) -> None:
        self.errors.append(error)
        if not self.handles:
            self.response.set_exception(error)
        self._note("failed")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.then()
        self.done.set()

    async def wait(self) -> None:
        async with asyncio.timeout(5):
            await self.done.wait()
        self.done.clear()

    @property
    def body(self) -> bytes:
        return self.complete[-1][1]


def send_reserved(
    endpoint: UpstreamEndpoint,
    receiver: ResponseReceiver,
    template: RequestTemplate,
    body: bytes = b"",
    headers: HeaderLines = (),
) -> ReservedConnection:
    """Send a request over a reserved connection."""
    connection = endpoint.try_reserve()
    assert connection is not None
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers).encode("latin-1")
    connection.send(template, lines, (body,), receiver)
    return connection
