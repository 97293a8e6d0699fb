"""The shared memory of an endpoint: registered with its server, and given to calls in slices.

A call never waits for it, and never fails for it: without a slice, its tensors go over the socket.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Final

import orjson

from gateway.errors import ErrorKind, GatewayError, describe_error, read_server_error
from gateway.http1.head import ResponseHead
from gateway.sizes import MAX_PROBE_RESPONSE, MAX_SERVER_DOCUMENT
from gateway.system.shared_memory import (
    FOLDER,
    PREFIX,
    Owner,
    Region,
    Slice,
    is_dead,
    owner_of,
    remove_dead_files,
    shared_memory_left,
)
from gateway.upstream.control_client import ControlResponse, send_control_request
from gateway.upstream.exchange import ResponseFuture
from gateway.upstream.grpc.endpoint import read_outcome
from gateway.upstream.transport import (
    FieldLines,
    RequestTemplate,
    ReservedConnection,
    ResponseReceiver,
    UpstreamEndpoint,
    UpstreamRequest,
    UpstreamResponse,
    WrappedResponse,
)

_PATH: Final = "/v2/systemsharedmemory"
_TIMEOUT: Final = 10.0
"""Seconds that the server has to register a region."""
_RETRY_INTERVAL: Final = 10.0
"""Seconds until the next attempt to register."""
_DEAD_INTERVAL: Final = 30.0
"""Seconds for which regions of a dead owner stay: its last requests may still run, and to
unregister a region in use ended Triton before 2.53."""
_CLOSE_TIMEOUT: Final = 5.0
"""Seconds that ``close`` waits for slices in use."""
_ORPHAN_TIMEOUT: Final = 300.0
"""Seconds for which a response that nobody wants is waited for."""
_MAY_RUN: Final = (499, 502, 503, 504)
"""Statuses of requests that may still run: a proxy before the server has given them up, or the
server itself over gRPC, as their time is over."""
_NEVER_SENT: Final = (ErrorKind.UNREACHABLE, ErrorKind.EXHAUSTED)
"""Errors of requests of which the server has got nothing."""

_log = logging.getLogger("tensorgate.upstream")


@dataclass(frozen=True, slots=True)
class SharedMemoryPolicy:
    """How much memory an endpoint and a worker share, and for which tensors; in bytes.

    ``min_bytes`` are those of all inputs of a request, or of all its outputs.
    """

    size: int
    min_bytes: int
    dead_interval: float = _DEAD_INTERVAL


class SharedMemoryLane:
    """Gives calls slices of a region that the server of an endpoint has mapped.

    ``why_not`` says why there is none, if that is known; empty once a region is registered.
    """

    def __init__(
        self, endpoint: UpstreamEndpoint, policy: SharedMemoryPolicy, why_not: str = ""
    ) -> None:
        self._endpoint: Final = endpoint
        self.min_bytes = policy.min_bytes
        self._policy: Final = policy
        self.why_not = why_not or "it is not registered yet"
        self._is_possible: Final = not why_not
        self._region: Region | None = None
        self._owner: Owner | None = None
        self._number = 0
        self._is_closed = False
        self._may_have_left = False
        """Whether the server may have a region that is not used."""
        self._wake = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._cleaner: asyncio.Task[None] | None = None
        self._orphans: set[asyncio.Task[None]] = set()
        self._uncertain: set[str] = set()
        """Models whose outputs were not as their metadata say."""

    def start(self) -> None:
        """Register a region, and another one after the server has forgotten it; once."""
        if self._supervisor is None and not self._is_closed:
            self._supervisor = asyncio.create_task(self._keep_registered())

    async def close(self) -> None:
        """Unregister the region once no call uses it, or leave it for the next start."""
        self._is_closed = True
        tasks = [each for each in (self._supervisor, self._cleaner) if each is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        region, owner = self._region, self._owner
        self._region = self._owner = None
        if region is not None and region.used:
            await self._wait_until_unused(region)
        for orphan in tuple(self._orphans):
            orphan.cancel()
        await asyncio.gather(*self._orphans, return_exceptions=True)
        is_registered = region is not None
        if region is not None and not region.used:
            is_registered = not await self._unregister(region.name)
        if owner is not None:
            owner.close(keeps_regions=is_registered or self._may_have_left)

    @property
    def size(self) -> int:
        """The bytes of the region; 0 without one."""
        return 0 if self._region is None else self._region.size

    @property
    def used(self) -> int:
        """The bytes of slices that calls or the server may use."""
        return 0 if self._region is None else self._region.used

    def describe(self) -> dict[str, int | str]:
        """Describe it for the admin address: bytes of the region, of calls and in quarantine."""
        quarantined = 0 if self._region is None else self._region.quarantined
        return {
            "size": self.size,
            "in_use": self.used - quarantined,
            "quarantined": quarantined,
            "why_not": self.why_not,
        }

    def take(self, size: int) -> Slice | None:
        """Return a slice; None without a region, and if it has no room."""
        self.start()
        return None if self._region is None else self._region.take(size)

    def is_certain(self, model: str) -> bool:
        """Tell whether the outputs of a model have been as its metadata say."""
        return model not in self._uncertain

    def distrust(self, model: str) -> None:
        """Remember that outputs of a model were larger than its metadata say."""
        self._uncertain.add(model)
        _log.warning(
            "%s: outputs of model '%s' are not as its metadata say; "
            "they do not go through shared memory any more",
            self._endpoint.url,
            model,
        )

    def forget_region(self, name: str) -> None:
        """Have another region registered, as the server does not know this one."""
        if self._region is not None and self._region.name == name:
            self._region = None
            self.why_not = "the server has forgotten it"
            self._wake.set()

    async def send(self, request: UpstreamRequest, slices: Sequence[Slice]) -> UpstreamResponse:
        """Send a request whose tensors are in slices, which are held until the server is done.

        That is when the whole response has come, even if nobody waits for it any more. If it never
        comes, they stay in quarantine: the server may still read and write them.
        """
        for each in slices:
            each.hold()
        sending = asyncio.ensure_future(self._endpoint.send(request))
        try:
            response = await asyncio.shield(sending)
        except asyncio.CancelledError:
            self.adopt(sending, slices)
            raise
        except GatewayError as error:
            if error.kind in _NEVER_SENT:
                _release(slices)
            raise
        return _SliceResponse(response, self, slices)

    def end_unread(self, response: UpstreamResponse, slices: Sequence[Slice]) -> None:
        """Read the rest of a response that its client does not want."""
        done: asyncio.Future[UpstreamResponse] = asyncio.get_running_loop().create_future()
        done.set_result(response)
        self.adopt(done, slices)

    def reserve(
        self, connection: ReservedConnection, slices: Sequence[Slice]
    ) -> ReservedConnection:
        """Return a connection for a request whose tensors are in slices, held as by ``send``."""
        return _SliceExchange(connection, self, slices)

    def adopt(self, sending: asyncio.Future[UpstreamResponse], slices: Sequence[Slice]) -> None:
        """Start to read what no call waits for; ``close`` ends it."""
        orphan = asyncio.create_task(_read_to_end(sending, slices))
        self._orphans.add(orphan)
        orphan.add_done_callback(self._orphans.discard)

    async def _keep_registered(self) -> None:
        told = ""
        if not self._is_possible:
            _log.info("%s: no shared memory: %s", self._endpoint.url, self.why_not)
            return
        while True:
            self._wake.clear()
            try:
                await self._register()
            except (OSError, GatewayError) as error:
                self.why_not = str(error)
                if isinstance(error, OSError):
                    self._clean_up()  # memory of the dead may be what there is no room for
                if told != self.why_not:
                    _log.info("%s: no shared memory: %s", self._endpoint.url, self.why_not)
            else:
                self.why_not = ""
                self._clean_up()
                size = self._policy.size
                _log.info("%s: %d MiB of shared memory", self._endpoint.url, size // 2**20)
            told = self.why_not
            try:
                async with asyncio.timeout(_RETRY_INTERVAL if told else None):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _register(self) -> None:
        """Make a region and register it; raises OSError and GatewayError."""
        if self._owner is None:
            self._owner = Owner(self._endpoint.url)
        self._number += 1
        name, size = f"{PREFIX}{self._owner.token}-{self._number}", self._policy.size
        region = await asyncio.to_thread(_make_region, name, size)
        try:
            body = orjson.dumps({"key": region.key, "offset": 0, "byte_size": size})
            await self._post(f"{_PATH}/region/{name}/register", body)
        except _RefusedError:
            raise
        except BaseException:
            # The server may have registered it, although its response did not come.
            self._may_have_left |= not await self._unregister(name)
            raise
        finally:
            region.unlink()
        self._region = region

    async def _unregister(self, name: str) -> bool:
        """Unregister a region; tell whether the server has done it."""
        try:
            await self._post(f"{_PATH}/region/{name}/unregister", b"")
        except GatewayError:
            return False
        return True

    async def _post(self, path: str, body: bytes) -> None:
        response = await send_control_request(
            self._endpoint, path, MAX_PROBE_RESPONSE, _TIMEOUT, body
        )
        _check(response)

    def _clean_up(self) -> None:
        if self._cleaner is None or self._cleaner.done():
            self._cleaner = asyncio.create_task(self._forget_dead())

    async def _forget_dead(self) -> None:
        """Unregister the regions of owners that have died, one by one, and remove their files."""
        try:
            dead = await self._dead_regions()
            await asyncio.sleep(self._policy.dead_interval if dead else 0)
            for name in dead:
                await self._unregister(name)
            left = {owner_of(name) or "" for name in await self._dead_regions()}
            remove_dead_files(self._endpoint.url, left)
        except (OSError, GatewayError) as error:
            _log.warning("%s: old shared memory stays: %s", self._endpoint.url, error)

    async def _dead_regions(self) -> list[str]:
        path = f"{_PATH}/status"
        response = await send_control_request(self._endpoint, path, MAX_SERVER_DOCUMENT, _TIMEOUT)
        _check(response)
        try:
            names = [str(each["name"]) for each in orjson.loads(response.body)]
        except (ValueError, TypeError, KeyError):
            return []
        found = [(name, owner_of(name)) for name in names]
        return [name for name, token in found if token is not None and is_dead(token)]

    async def _wait_until_unused(self, region: Region) -> None:
        deadline = asyncio.get_running_loop().time() + _CLOSE_TIMEOUT
        while region.used and self._orphans and asyncio.get_running_loop().time() < deadline:
            await asyncio.wait(self._orphans, timeout=_CLOSE_TIMEOUT)


def _check(response: ControlResponse) -> None:
    if response.status != 200:
        message = describe_error(response.status, read_server_error(response.body))
        raise _RefusedError(ErrorKind.BAD_RESPONSE, f"the server returned {message}")


class _RefusedError(GatewayError):
    """The server has not done what it was asked for."""


def _make_region(name: str, size: int) -> Region:
    left = shared_memory_left()
    if left < size:
        raise OSError(f"{FOLDER} has {left // 2**20} MiB left, and {size // 2**20} MiB are needed")
    return Region(name, size)


def _release(slices: Sequence[Slice]) -> None:
    for each in slices:
        each.release()


async def _read_to_end(sending: asyncio.Future[UpstreamResponse], slices: Sequence[Slice]) -> None:
    """Wait for a response and read it; the slices stay in quarantine if it does not end well."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_ORPHAN_TIMEOUT):
            try:
                response = await sending
            except GatewayError as error:
                if error.kind in _NEVER_SENT:
                    _release(slices)
                return
            with closing(response), suppress(GatewayError):
                while await response.read():
                    pass
                if response.final_status not in _MAY_RUN:
                    _release(slices)


class _SliceResponse(WrappedResponse):
    """A response at whose end the server is done with slices."""

    def __init__(
        self, response: UpstreamResponse, lane: SharedMemoryLane, slices: Sequence[Slice]
    ) -> None:
        super().__init__(response)
        self._lane = lane
        self._slices = slices
        self._received = 0
        self._ended = False
        self._is_left = False
        """Whether somebody else reads its rest."""

    async def read(self) -> bytes | memoryview:
        """Return the next piece of the body."""
        piece = await self._response.read()
        self._received += len(piece)
        if not self._ended and (not piece or self._received == self.content_length):
            self._ended = True
            if self.final_status not in _MAY_RUN:
                _release(self._slices)
        return piece

    def close(self) -> None:
        """Close the response, or have its rest read."""
        if self._ended:
            self._response.close()
        elif not self._is_left:
            self._is_left = True
            self._lane.end_unread(self._response, self._slices)


class _SliceExchange(ReservedConnection):
    """A reserved connection, and the slices that are the server's until its response has come.

    It stands between the connection and the receiver of the response. If the call ends before the
    response, that is waited for.
    """

    def __init__(
        self, connection: ReservedConnection, lane: SharedMemoryLane, slices: Sequence[Slice]
    ) -> None:
        self._connection = connection
        self._lane = lane
        self._slices = slices
        self._receiver: ResponseReceiver | None = None
        self._response: UpstreamResponse | None = None
        self._is_over = True
        """Whether nothing more will be heard of the request."""
        self.waits_for_chunks = True

    def send(
        self,
        template: RequestTemplate,
        lines: bytes,
        body: Sequence[bytes | memoryview],
        receiver: ResponseReceiver,
    ) -> None:
        """Send a request; see ReservedConnection."""
        self._receiver = receiver
        self._is_over = False
        for each in self._slices:
            each.hold()
        self._connection.send(template, lines, body, self)

    def is_idempotent(self) -> bool:
        """Tell that the connection may not send it again: the first one may use the slices."""
        return False

    def passes_untouched(self, head: ResponseHead) -> bool:
        """Tell whether the body is not converted; see ResponseReceiver."""
        return self._receiver is not None and self._receiver.passes_untouched(head)

    def on_complete(
        self, head: ResponseHead, body: bytes | memoryview, trailers: FieldLines = ()
    ) -> bool:
        """Release the slices; then the receiver has the response."""
        self._is_over = True
        if read_outcome(head, trailers)[0] not in _MAY_RUN:
            _release(self._slices)
        self.head_delay = self._connection.head_delay
        assert self._receiver is not None
        return self._receiver.on_complete(head, body, trailers)

    def on_headers(self, response: UpstreamResponse) -> None:
        """Give the receiver a response at whose end the slices are released."""
        if not self._is_over:
            self._is_over = True
            response = self._response = _SliceResponse(response, self._lane, self._slices)
        self.head_delay = self._connection.head_delay
        assert self._receiver is not None
        self._receiver.on_headers(response)

    def on_error(self, error: Exception) -> None:
        """Release the slices if the server has never got the request."""
        self._is_over = True
        if isinstance(error, GatewayError) and error.kind in _NEVER_SENT:
            _release(self._slices)
        assert self._receiver is not None
        self._receiver.on_error(error)

    def close(self) -> None:
        """Close the connection, or wait for the response that nobody wants."""
        if self._response is not None:
            self._response.close()
        elif self._is_over:
            self._connection.close()
        else:
            slices, self._slices, self._is_over = self._slices, (), True
            self._receiver = unwanted = ResponseFuture()
            unwanted.response.add_done_callback(self._close_without_response)
            self._lane.adopt(unwanted.response, slices)

    def _close_without_response(self, response: asyncio.Future[UpstreamResponse]) -> None:
        if response.cancelled() or response.exception() is not None:
            self._connection.close()
