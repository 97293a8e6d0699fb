"""The question at the end of each test of a gateway: is anything left of its peers?

When all clients are gone, no call, stream, slot, lease or buffered byte of theirs is counted any
more, no task of theirs runs, the log has no traceback, and the next client is served.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from gateway.app.gateway import ActiveConfig, Gateway
from gateway.app.standalone import StandaloneGateway
from gateway.listener.server import HttpListener
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.destination import Upstream
from gateway.system.buffers import BufferAccount
from gateway.upstream.grpc.endpoint import GrpcEndpoint
from gateway.upstream.http.endpoint import HttpEndpoint
from gateway.upstream.http2.endpoint import Http2Endpoint
from gateway.upstream.transport import UpstreamEndpoint
from tests.support.checks.garbage import name_of_gateway
from tests.support.checks.nothing_left_in_process import check_alive

PATIENCE = 5.0
"""Seconds in which what the gateway held of its peers must be given back."""


class Remains:
    """Tells what is left of the peers of a gateway in this process."""

    def __init__(self, gateway: Gateway, faults: FaultsLogged) -> None:
        self._gateway = gateway
        self._faults = faults

    async def until_nothing(self) -> None:
        """Wait until the gateway holds nothing of its peers; fails with what it holds."""
        await _until_none(lambda: find_left(self._gateway))
        self._faults.check()

    def forget_faults(self) -> None:
        """Forget the faults logged so far, which the test has caused on purpose."""
        self._faults.forget()


@asynccontextmanager
async def nothing_left(gateway: Gateway, unchecked: str = "") -> AsyncIterator[Remains]:
    """Run a gateway in this process; check that it keeps nothing of its peers, and still serves.

    All clients and calls must be gone at the end. Which server could serve the next client is not
    known here, so that one asks whether the gateway is alive. ``unchecked`` says why a gateway may
    keep something while it runs.
    """
    before = asyncio.all_tasks()
    with FaultsLogged() as faults:
        async with gateway:
            remains = Remains(gateway, faults)
            yield remains
            if not unchecked:
                await remains.until_nothing()
                # What the test counts of its own calls, it may look at later.
                gateway.listener.observers = ()
                if isinstance(gateway, StandaloneGateway) and _serves_anybody(gateway):
                    await check_alive(gateway.addresses[0])
                    await remains.until_nothing()
        await _until_none(lambda: dict.fromkeys(_tasks_of_gateways() - before, 1))
        faults.check()


def _serves_anybody(gateway: Gateway) -> bool:
    """Whether a client without a certificate is served: not after a stop that the test wanted."""
    tls = gateway.settings.tls
    wants_certificates = tls is not None and tls.client_ca is not None
    return not (gateway.listener.draining or wants_certificates)


def find_left(gateway: Gateway) -> dict[str, int]:
    """Return what a gateway holds of its peers, by name, without what is 0."""
    found = {**find_left_in_listener(gateway.listener), **_of_config(gateway.active_config)}
    found["retired configurations"] = len(gateway._retired)
    return {name: count for name, count in found.items() if count}


def find_left_in_listener(listener: HttpListener) -> dict[str, int]:
    """Return what a listener holds of its clients, by name."""
    records = [call.record for call in listener._active_calls]
    one = f", one is {records[0].method} {records[0].target}" if records else ""
    return {
        "connections": listener.connections,
        "handshakes": len(listener._handshaking),
        "connections to adopt": len(listener._adoptions),
        f"active calls{one}": len(records),
        "calls that wait for their body": listener.deferrals.size,
        "connections watched for hangups": len(listener.hangups._watched),
        **_of_buffers(listener.buffers),
    }


def _of_buffers(buffers: BufferAccount) -> dict[str, int]:
    return {
        "reserved bytes": buffers.reserved,
        "buffered bytes": buffers.buffered,
        "bytes of heads": buffers.heads,
        "connections with such bytes": len(buffers.holders_of_heads),
        "bodies in transit": buffers.streams,
        "clients with such bodies": len(buffers._clients),
        "streams of these": buffers._of_clients.streams,
        "bytes that these have reserved": buffers._of_clients.reserved,
        "bodies that may make room": len(buffers._slow)
        + len(buffers._silent)
        + len(buffers._leaving),
    }


def _of_config(config: ActiveConfig) -> dict[str, int]:
    limits = config.limits
    found = {
        "calls on the fast path": config.planner.in_flight,
        "calls on the streaming path": config._calls,
        **_of_concurrency("the gateway", limits.concurrency_limit),
    }
    for name, count in _of_buffers(limits.mirror_memory_budget.buffers).items():
        found[f"{name} of mirrors"] = count
    messages: Any = config.router.message_scheduler._waiting
    found["messages that wait to be scanned"] = sum(not each.done() for each in messages)
    for route in config.router.routes:
        if route.mirror is not None:
            found[f"mirrored copies of route {route.name}"] = route.mirror.in_flight
        for destination in route.destinations:
            waiting: Any = destination.scheduler._waiting
            found["conversions that wait"] = sum(not each.done() for each in waiting)
    for name, upstream in config.upstreams.items():
        found |= _of_upstream(name, upstream)
    return found


def _of_upstream(name: str, upstream: Upstream) -> dict[str, int]:
    pool = upstream.pool
    found = _of_concurrency(f"upstream {name}", upstream.concurrency_limit)
    for member in (*pool.members, *pool._leaving):
        found[f"leases of {member.endpoint.url}"] = member.outstanding
        for transport in transports(member.endpoint):
            found |= _of_transport(transport)
    return found


def _of_transport(transport: HttpEndpoint | Http2Endpoint) -> dict[str, int]:
    url = transport.url
    found = {f"bodies on their way to {url}": len(transport._senders)}
    if isinstance(transport, HttpEndpoint):
        return found | {f"requests that wait for {url}": len(transport.connections.waiting)}
    streams = sum(len(session.handlers) for session in transport.connections.sessions)
    return found | {
        f"streams to {url}": streams,
        f"open streams to {url}": sum(
            len(each.http2.streams) for each in transport.connections.sessions
        ),
        f"requests that wait for {url}": len(transport.connections.waiting),
        f"responses to {url} held back": transport.deferrals.size,
    }


def transports(endpoint: UpstreamEndpoint) -> Iterator[HttpEndpoint | Http2Endpoint]:
    """Yield what keeps the connections of an endpoint, which may have two addresses."""
    for address in endpoint.addresses:
        transport = address._transport if isinstance(address, GrpcEndpoint) else address
        assert isinstance(transport, HttpEndpoint | Http2Endpoint)
        yield transport


def _of_concurrency(whose: str, limit: ConcurrencyLimit | None) -> dict[str, int]:
    if limit is None:
        return {}
    return {f"slots of {whose}": limit.active, f"calls queued for {whose}": limit.queued}


def _tasks_of_gateways() -> set[asyncio.Task[Any]]:
    """Return the tasks that run code of the gateway's, whoever started them."""
    own = asyncio.current_task()
    tasks = (task for task in asyncio.all_tasks() if task is not own)
    return {task for task in tasks if name_of_gateway(task.get_coro())}


async def _until_none(find: Callable[[], dict[Any, int]]) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + PATIENCE
    while left := find():
        assert loop.time() < end, f"the gateway still has: {left}"
        await asyncio.sleep(0.002)


class FaultsLogged(logging.Handler):
    """Collects tracebacks, and what asyncio's exception handler logs.

    Other errors tell operators what they have to mend.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found: list[str] = []
        self._formatter = logging.Formatter("%(name)s: %(message)s")

    def __enter__(self) -> FaultsLogged:
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Note a record, if it tells of a fault of the gateway's own."""
        is_of_gateway = record.name.startswith("tensorgate") and record.exc_info
        if is_of_gateway or (record.name == "asyncio" and record.levelno >= logging.ERROR):
            self._found.append(self._formatter.format(record))

    def forget(self) -> None:
        """Forget the faults logged so far."""
        self._found.clear()

    def check(self) -> None:
        """Fail if a fault was logged."""
        more = f"\nand {len(self._found) - 1} more" if len(self._found) > 1 else ""
        assert not self._found, f"the gateway logs {self._found[0]}{more}"
