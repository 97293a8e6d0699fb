"""The shared memory of an endpoint: registered with its server, and given to calls in slices.

A call never waits for it, and never fails for it: without a slice, its tensors go over the socket.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final
from urllib.parse import urlsplit

import orjson

from gateway.errors import (
    ErrorKind,
    GatewayError,
    bad_response,
    describe_error,
    read_server_error,
    strip_tracebacks,
)
from gateway.http1.head import ResponseHead
from gateway.sizes import MAX_PROBE_RESPONSE, MAX_SERVER_DOCUMENT
from gateway.system.shared_memory import (
    FOLDER,
    PREFIX,
    Owner,
    Region,
    Slice,
    dead_owners,
    owner_of,
    remove_mark,
    remove_region_files,
)
from gateway.upstream.address import TcpAddress, parse_server_url
from gateway.upstream.control_client import ControlResponse, send_control_request
from gateway.upstream.exchange import ResponseFuture
from gateway.upstream.grpc.endpoint import read_outcome
from gateway.upstream.transport import (
    CallCounter,
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
"""Seconds until the next attempt to register or unregister."""
_DEAD_INTERVAL: Final = 30.0
"""Seconds for which regions of a dead owner stay: its last requests may still run, and to
unregister a region in use ended Triton before 2.53."""
_SHRINK_INTERVAL: Final = 60.0
"""Seconds between two looks at memory that may be given back."""
_LIFETIME: Final = 60.0
"""Seconds after which the server may forget a region: it was restarted. If it forgets them sooner,
its address may lead to several servers, of which one has the region, and keeps it."""
_MAX_DOUBLINGS: Final = 8
"""Then another registration is tried after some 40 minutes."""
_CONNECT_TIMEOUT: Final = 1.0
_CLOSE_TIMEOUT: Final = 5.0
"""Seconds that ``close`` takes at most."""
_WAITING_SHARE: Final = 0.8
"""How much of them it waits for slices in use; in the rest, it unregisters what is free."""
_PATIENCE: Final = 300.0
"""Seconds after which a server is not expected to run a request any more that nobody waits for."""
MAX_ABANDONED: Final = 64
"""Responses that are waited for at a time although nobody wants them. Each keeps a task and a
connection for up to ``patience``. A server that works ends them soon, and few wait at a time; with
one that hangs, each call that is given up would add one, and lose its slices all the same."""
_MAY_RUN: Final = (499, 502, 503, 504)
"""Statuses of requests that may still run: a proxy before the server has given them up, or the
server itself over gRPC, as their time is over."""
_UNCERTAIN: Final = (400, 502, 503, 504)
"""Statuses of a registration that may have been done: Triton refuses a known name with 400."""
_NEVER_SENT: Final = (ErrorKind.UNREACHABLE, ErrorKind.EXHAUSTED)
"""Errors of requests of which the server has got nothing."""

NOT_SHARED: Final = sys.maxsize
"""The ``min_bytes`` of an upstream without shared memory: no tensors have so many."""

_NAME: Final = re.compile(rf"{PREFIX}[0-9a-f]+-[0-9]+")

_log = logging.getLogger("tensorgate.upstream")


@dataclass(frozen=True, slots=True)
class SharedMemoryPolicy:
    """How much memory an endpoint and a worker share at most, and for which tensors; in bytes.

    ``min_bytes`` are those of all inputs of a request, or of all its outputs.
    """

    size: int
    min_bytes: int
    dead_interval: float = _DEAD_INTERVAL
    patience: float = _PATIENCE
    """For so many seconds, a response is waited for that nobody wants. A region with lost slices
    stays registered for as long after its last call."""
    close_timeout: float = _CLOSE_TIMEOUT
    retry_interval: float = _RETRY_INTERVAL
    shrink_interval: float = _SHRINK_INTERVAL
    is_auto: bool = False
    """Whether nobody has asked for it: then a server without it is no news."""


class SharedMemoryLanes:
    """Tells the calls to an upstream whether there is shared memory, without asking each lane.

    ``count`` gets the bytes that lanes are about to allocate, or, negated, have given back; it
    raises OSError if they may not have them.
    """

    def __init__(
        self, policy: SharedMemoryPolicy, count: Callable[[int], None] = lambda _: None
    ) -> None:
        self.policy: Final = policy
        self.count: Final = count
        self.min_bytes = NOT_SHARED
        """Bytes from which on tensors are shared: the policy's while a lane has a region."""
        self.are_guarded = False
        """Whether a server may have regions of gateways, which clients may not name."""
        self._with_region: set[SharedMemoryLane] = set()
        self._guarded: set[SharedMemoryLane] = set()

    def set_shared(self, lane: SharedMemoryLane, has_region: bool) -> None:
        """Learn whether a lane has a region."""
        _set_member(self._with_region, lane, has_region)
        self.min_bytes = self.policy.min_bytes if self._with_region else NOT_SHARED

    def set_guarded(self, lane: SharedMemoryLane, is_guarded: bool) -> None:
        """Learn whether a lane's server may have regions of this gateway, or of another one."""
        _set_member(self._guarded, lane, is_guarded)
        self.are_guarded = bool(self._guarded)


def _set_member(lanes: set[SharedMemoryLane], lane: SharedMemoryLane, is_member: bool) -> None:
    if is_member:
        lanes.add(lane)
    else:
        lanes.discard(lane)


class SharedMemoryLane:
    """Gives calls slices of a region that the server of an endpoint has mapped.

    ``why_not`` says why there is none, if that is known; empty once a region is registered. Only a
    server that ``is_supported`` is asked to register one. A server on this machine ``is_guarded``:
    it may have regions of another gateway even where this one has none.
    """

    def __init__(
        self,
        endpoint: UpstreamEndpoint,
        lanes: SharedMemoryLanes,
        why_not: str = "",
        is_supported: bool = True,
        is_guarded: bool = True,
    ) -> None:
        self._endpoint: Final = endpoint
        self._lanes: Final = lanes
        self._is_guarded: Final = is_guarded
        lanes.set_guarded(self, is_guarded)  # until its server says otherwise
        self._policy: Final = lanes.policy
        self.min_bytes = lanes.policy.min_bytes
        self.why_not = why_not or "it is not registered yet"
        self._is_possible: Final = not why_not
        self._is_supported = is_supported
        self._region: Region | None = None
        self._old: dict[Region, asyncio.Task[None]] = {}
        """Regions whose calls end, and what drops them."""
        self._owner: Owner | None = None
        self._number = 0
        self._counted = 0
        """The bytes of all its regions, as ``lanes`` have counted them."""
        self._is_closed = False
        self._registered: set[str] = set()
        """The names of all regions that the server may have."""
        self._forgotten = 0
        """Regions in a row that the server has forgotten soon."""
        self._registered_at = 0.0
        self._leftovers: set[str] = set()
        """Those of them that never came into use."""
        self._told = ""
        self._wake = asyncio.Event()
        self._full = asyncio.Event()
        """Set once a call has found no room in the region, which may grow."""
        self._supervisor: asyncio.Task[None] | None = None
        self._sizer: asyncio.Task[None] | None = None
        self._cleaner: asyncio.Task[None] | None = None
        self._patience = lanes.policy.patience
        """Seconds for which a response is waited for that nobody wants."""
        self._orphans: set[asyncio.Task[None]] = set()
        self._uncertain: set[str] = set()
        """Models whose outputs were not as their metadata say."""

    def start(self) -> None:
        """Register a region, and another one after the server has forgotten it; once."""
        if self._supervisor is None and not self._is_closed:
            self._supervisor = asyncio.create_task(self._keep_registered())
            self._sizer = asyncio.create_task(self._keep_sized())

    def set_supported(self, is_supported: bool) -> None:
        """Learn from the server's metadata whether it takes a registration."""
        self._is_supported = is_supported
        # A server that lists it no more may be another one behind the address: regions stay.
        may_have_regions = is_supported or bool(self._registered)
        self._lanes.set_guarded(self, may_have_regions and self._is_guarded)
        if not is_supported and self._is_possible and self._region is None:
            self._tell_why_not("the server does not list the extension system_shared_memory")
        self._wake.set()

    async def close(self) -> None:
        """Unregister the regions that no call uses, and leave others for the next start."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            await _end(self._supervisor, self._sizer, self._cleaner)
            regions = [*self._old] if self._region is None else [self._region, *self._old]
            self._use(None)
            await _end(*self._old.values())
            with suppress(TimeoutError):
                async with asyncio.timeout(self._policy.close_timeout):
                    await self._unregister_unused(regions)
            self._patience = 0.0
            await asyncio.sleep(0)  # a task that has not begun could not end what it waits for
            await _end(*self._orphans)
            await asyncio.gather(*map(_unmap, regions))
        finally:
            self._use(None)
            self._lanes.set_guarded(self, False)
            self._count(-self._counted)
            self._patience = 0.0
            for task in (*self._old.values(), *self._orphans):
                task.cancel()
            if self._owner is not None:
                with suppress(OSError):  # the folder may be read-only by now
                    self._owner.close(keeps_regions=bool(self._registered))
                self._owner = None

    async def _unregister_unused(self, regions: Sequence[Region]) -> None:
        """Wait for slices in use, then unregister what nobody uses."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_WAITING_SHARE * self._policy.close_timeout):
                while self._orphans and not all(each.is_idle for each in regions):
                    await asyncio.wait(self._orphans, return_when=asyncio.FIRST_COMPLETED)
        unused = self._registered - {each.name for each in regions if each.used}
        await asyncio.gather(*map(self._unregister, unused))

    @property
    def size(self) -> int:
        """The bytes of the region, and of one that it has replaced; 0 without any."""
        return sum(each.size for each in self._shared())

    @property
    def used(self) -> int:
        """The bytes of slices that calls or the server may use."""
        return sum(each.used for each in self._shared())

    def describe(self) -> dict[str, int | str] | None:
        """Describe it for the admin address: bytes of the region, of calls and in quarantine.

        None if nobody has asked for it, and the server does not have it.
        """
        if self._region is None and self._is_no_news:
            return None
        quarantined = sum(each.quarantined for each in self._shared())
        return {
            "size": self.size,
            "allocated": sum(each.allocated for each in self._shared()),
            "in_use": self.used - quarantined,
            "quarantined": quarantined,
            "why_not": self.why_not,
        }

    def _shared(self) -> list[Region]:
        """Return the regions that the server has: that of new calls, and those before it."""
        old = [each for each in self._old if each.name in self._registered]
        return old if self._region is None else [self._region, *old]

    def take(self, size: int) -> Slice | None:
        """Return a slice; None without a region, and if it has no room."""
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
        self._registered.discard(name)
        if self._region is not None and self._region.name == name:
            is_early = asyncio.get_running_loop().time() < self._registered_at + _LIFETIME
            self._forgotten = self._forgotten + 1 if is_early else 0
            self._retire()
            self.why_not = "the server has forgotten it"
            self._wake.set()

    async def send(self, request: UpstreamRequest, slices: Sequence[Slice]) -> UpstreamResponse:
        """Send a request whose tensors are in slices, which are held until the server is done.

        That is when the whole response has come, even if nobody waits for it any more. If it never
        comes, they are lost: the server may still read and write them.
        """
        for each in slices:
            each.hold()
        sending = asyncio.ensure_future(self._endpoint.send(request))
        try:
            response = await asyncio.shield(sending)
        except asyncio.CancelledError:
            self.adopt(sending, slices)
            raise
        except Exception as error:
            self.end_failed(error, slices)
            raise
        return _SliceResponse(response, self, slices)

    def end_failed(self, error: Exception, slices: Sequence[Slice]) -> None:
        """Release the slices of a request to which no response will come, or lose them."""
        if isinstance(error, GatewayError) and error.kind in _NEVER_SENT:
            _release(slices)
        else:
            self._lose(slices)

    def end_complete(
        self, status: int, headers: Mapping[str, str], slices: Sequence[Slice]
    ) -> None:
        """Release the slices of a request whose whole response has come."""
        # Triton's own errors over HTTP are JSON; proxies send text and pages.
        is_json = headers.get("Content-Type", "").startswith("application/json")
        if status in _MAY_RUN and not is_json:
            self._lose(slices)
        else:
            _release(slices)

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
        """Start to read what no call waits for; ``close`` ends it.

        If too many are waited for already, the connection is closed at once.
        """
        patience = self._patience if len(self._orphans) < MAX_ABANDONED else 0
        orphan = asyncio.create_task(self._read_to_end(sending, slices, patience))
        self._orphans.add(orphan)
        orphan.add_done_callback(self._orphans.discard)
        for counter in self._endpoint.drain_counters or ():
            counter.count_call()
            orphan.add_done_callback(partial(_uncount, counter))

    async def _read_to_end(
        self, sending: asyncio.Future[UpstreamResponse], slices: Sequence[Slice], patience: float
    ) -> None:
        """Wait for a response and read it; the slices are lost if it does not end well."""
        try:
            async with asyncio.timeout(patience):
                response = await sending
                with closing(response):
                    while await response.read():
                        pass
        except (TimeoutError, GatewayError) as error:
            self.end_failed(strip_tracebacks(error), slices)
        except BaseException:
            self._lose(slices)
            raise
        else:
            self.end_complete(response.final_status, response.headers, slices)

    def _lose(self, slices: Sequence[Slice]) -> None:
        for each in slices:
            each.lose()
        self._wake.set()

    async def _keep_registered(self) -> None:
        if not self._is_possible:
            self._tell_why_not(self.why_not)
            return
        while True:
            self._wake.clear()
            if not self._needs_region():
                await self._wake.wait()
                continue
            if self._region is None and self._forgotten > 1:
                self._tell_why_not("its address may lead to several servers: one does not know it")
                doublings = min(self._forgotten - 2, _MAX_DOUBLINGS)
                await asyncio.sleep(self._policy.retry_interval * 2**doublings)
            if not await self._try_register():
                await asyncio.sleep(self._policy.retry_interval)

    def _needs_region(self) -> bool:
        """Tell whether there is none, or half of what it can have is lost.

        At most two may live at a time.
        """
        region = self._region
        if region is None:
            return self._is_supported and len(self._old) < 2
        return not self._old and 2 * region.lost >= region.possible

    def _is_useless(self) -> bool:
        """Tell whether so much of the region is lost that the rest has room for no call."""
        region = self._region
        return region is not None and region.possible - region.lost < self.min_bytes

    async def _try_register(self) -> bool:
        try:
            region = await self._register()
        except (OSError, RuntimeError, GatewayError) as error:  # there may be no thread for it
            if isinstance(error, OSError):
                if self._is_useless():
                    self._retire()  # there is no room for two at a time
                self._clean_up()  # memory of the dead may be what there is no room for
            strerror = error.strerror if isinstance(error, OSError) else None
            # Without the name of a file or region, which is another one each time.
            self._tell_why_not(f"{FOLDER}: {strerror}" if strerror else _NAME.sub("…", str(error)))
            strip_tracebacks(error)  # its frames hold the region
            return False
        self._retire()
        self._use(region)
        region.on_full = self._full.set
        self._registered_at = asyncio.get_running_loop().time()
        self.why_not = self._told = ""
        self._clean_up()
        _log.info("%s: up to %d MiB of shared memory", self._endpoint.url, region.size // 2**20)
        return True

    def _count(self, size: int) -> None:
        self._lanes.count(size)
        self._counted += size

    def _use(self, region: Region | None) -> None:
        """Give slices of this region from now on."""
        self._region = region
        self._lanes.set_shared(self, region is not None)

    def _tell_why_not(self, reason: str) -> None:
        what = "lost shared memory is not replaced"
        if self._region is None:
            what, self.why_not = "no shared memory", reason
        if reason != self._told:
            level = logging.DEBUG if self._is_no_news else logging.INFO
            _log.log(level, "%s: %s: %s", self._endpoint.url, what, reason)
        self._told = reason

    @property
    def _is_no_news(self) -> bool:
        return self._policy.is_auto and not (self._is_possible and self._is_supported)

    def _retire(self) -> None:
        """Give no more slices of the region, and drop it when nobody uses it any more."""
        region = self._region
        if region is None:
            return
        self._use(None)
        region.stop_growing()
        self._old[region] = ending = asyncio.create_task(self._drop_unused(region))

        def forget(_: asyncio.Task[None]) -> None:
            del self._old[region]
            self._wake.set()

        ending.add_done_callback(forget)

    async def _keep_sized(self) -> None:
        """Allocate more of the region when calls find no room in it, and less when few use it."""
        told, loop = "", asyncio.get_running_loop()
        due = loop.time() + self._policy.shrink_interval
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._full.wait()
            is_full, region = self._full.is_set(), self._region
            self._full.clear()
            is_due = loop.time() >= due
            if is_due:
                due = loop.time() + self._policy.shrink_interval
            try:
                if region is not None and is_due:
                    await region.shrink()
                if region is not None and is_full:
                    await region.grow()
            except (OSError, RuntimeError) as error:  # there may be no thread for it
                if str(error) != told:
                    told = str(error)
                    _log.info("%s: shared memory stays as it is: %s", self._endpoint.url, told)
                self._wake.set()  # the lost part may be half of it now
            else:
                continue
            await asyncio.sleep(self._policy.retry_interval)

    async def _drop_unused(self, region: Region) -> None:
        """Unregister a region long after its last call, and unmap it.

        The server may still use what is lost for as long as it may run any request.
        """
        idle = asyncio.Event()
        region.on_idle = idle.set
        if not region.is_idle:
            await idle.wait()
        delay = self._policy.patience if region.name in self._registered else 0.0
        is_dropped = False
        while not is_dropped:
            await asyncio.sleep(delay)
            is_dropped = await self._try_drop(region)
            delay = self._policy.retry_interval

    async def _try_drop(self, region: Region) -> bool:
        if region.name in self._registered:
            await self._unregister(region.name)
        return region.name not in self._registered and await _unmap(region)

    async def _register(self) -> Region:
        """Make a region and register it; raises OSError and GatewayError."""
        if self._owner is None:
            self._owner = Owner(self._endpoint.url)
        self._number += 1
        name, size = f"{PREFIX}{self._owner.token}-{self._number}", self._policy.size
        region = await Region.make(name, size, self._count)
        self._registered.add(name)
        try:
            body = orjson.dumps({"key": region.key, "offset": 0, "byte_size": size})
            error = await self._post(f"{_PATH}/region/{name}/register", body)
        finally:
            region.unlink()
        if error is None:
            return region
        await _unmap(region)
        if isinstance(error, _RefusedError) and error.status not in _UNCERTAIN:
            self._registered.discard(name)
        elif not await self._unregister(name):
            # The server may have registered it: no response came, or it refuses a request that
            # was sent again over another connection, as it has done the first one.
            self._leftovers.add(name)
        raise error

    async def _unregister(self, name: str) -> bool:
        """Unregister a region; tell whether the server has done it."""
        if await self._post(f"{_PATH}/region/{name}/unregister", b"") is not None:
            return False
        self._registered.discard(name)
        self._leftovers.discard(name)
        return True

    async def _post(self, path: str, body: bytes) -> GatewayError | None:
        """Send a request; return its error, after which more is awaited: not in an ``except``."""
        try:
            response = await send_control_request(
                self._endpoint, path, MAX_PROBE_RESPONSE, _TIMEOUT, body
            )
            _check(response)
        except GatewayError as error:
            return strip_tracebacks(error)
        return None

    def _clean_up(self) -> None:
        if self._cleaner is None or self._cleaner.done():
            self._cleaner = asyncio.create_task(self._forget_dead())

    async def _forget_dead(self) -> None:
        """Unregister the regions of owners that have died, one by one, and remove their files."""
        try:
            for name in tuple(self._leftovers):
                await self._unregister(name)
            owners = dead_owners()  # before the server is asked: it gets no more of theirs
            names = await self._list_regions()
            dead = {name: owner for name in names if (owner := owner_of(name)) in owners}
            await asyncio.sleep(self._policy.dead_interval if dead else 0)
            for name in dead:
                await self._unregister(name)
            left = {owner_of(name) for name in await self._list_regions()}
        except (OSError, GatewayError) as error:
            _log.warning("%s: old shared memory stays: %s", self._endpoint.url, error)
            return
        known = {self._endpoint.url: True}
        for token, server in owners.items():
            if token in left:
                continue
            if server not in known:
                known[server] = await asyncio.to_thread(_is_gone, server)
            if known[server] or token in dead.values():
                remove_mark(token)
        remove_region_files()

    async def _list_regions(self) -> list[str]:
        path = f"{_PATH}/status"
        response = await send_control_request(self._endpoint, path, MAX_SERVER_DOCUMENT, _TIMEOUT)
        _check(response)
        with suppress(ValueError, TypeError, KeyError):
            if isinstance(listed := orjson.loads(response.body), list):
                return [str(each["name"]) for each in listed]
        raise bad_response("the server sent no list of shared memory regions")


def _is_gone(server: str) -> bool:
    """Tell whether nobody listens at the address of a server on this machine.

    Then its process has ended, or is about to; a region lives no longer than the process that has
    mapped it. One that has started there since then has none of a dead owner.
    """
    url, _, resolved = server.partition(" ")  # see TcpAddress.url
    try:
        address = parse_server_url(f"http://{urlsplit(url).netloc}")
        if isinstance(address, TcpAddress):
            address = replace(address, host=resolved.strip("()") or address.host)
            if address.is_local:
                socket.create_connection((address.host, address.port), _CONNECT_TIMEOUT).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        pass
    return False


def _check(response: ControlResponse) -> None:
    if response.status != 200:
        message = describe_error(response.status, read_server_error(response.body))
        raise _RefusedError(response.status, f"the server returned {message}")


class _RefusedError(GatewayError):
    """The server says that it has not done what it was asked for."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(ErrorKind.BAD_RESPONSE, message)
        self.status: Final = status


async def _end(*tasks: asyncio.Task[None] | None) -> None:
    """Cancel tasks, and wait for their ends."""
    running = [each for each in tasks if each is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def _unmap(region: Region) -> bool:
    """Unmap a region; tell whether it could be."""
    return region.is_idle and await region.unmap()


def _uncount(counter: CallCounter, _: asyncio.Task[None]) -> None:
    counter.uncount_call()


def _release(slices: Sequence[Slice]) -> None:
    for each in slices:
        each.release()


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
            self._lane.end_complete(self.final_status, self.headers, self._slices)
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
        status, _ = read_outcome(head, trailers)
        self._lane.end_complete(status, head.headers, self._slices)
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
        """Release the slices if the server has never got the request, else lose them."""
        self._is_over = True
        self._lane.end_failed(error, self._slices)
        assert self._receiver is not None
        self._receiver.on_error(error)

    def close(self) -> None:
        """Close the connection, or wait for the response that nobody wants."""
        if self._response is not None:
            self._response.close()
        elif self._is_over or self._connection.is_waiting:
            if not self._is_over:
                self._is_over = True
                _release(self._slices)
            self._connection.close()
        else:
            slices, self._slices, self._is_over = self._slices, (), True
            self._receiver = unwanted = ResponseFuture()
            unwanted.response.add_done_callback(self._close_without_response)
            self._lane.adopt(unwanted.response, slices)

    def _close_without_response(self, response: asyncio.Future[UpstreamResponse]) -> None:
        if response.cancelled() or response.exception() is not None:
            self._connection.close()
