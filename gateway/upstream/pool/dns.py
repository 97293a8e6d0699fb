"""DNS of upstreams: resolves host names again and again; each address is an endpoint."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from gateway.upstream.address import ServerAddress, TcpAddress, describe_connect_error
from gateway.upstream.pool.watch import Watch
from gateway.upstream.transport import UpstreamEndpoint

_MAX_ADDRESSES = 256
"""Addresses of one name that are used."""

_log = logging.getLogger("tensorgate.upstream")

Lookup = Callable[[str], Awaitable[Sequence[str]]]
"""Resolves a host name to addresses. Raises OSError, or UnicodeError for an invalid name."""


async def resolve_host(host: str) -> list[str]:
    """Resolve a host name to the addresses of the families that this machine can reach."""
    loop = asyncio.get_running_loop()
    flags = socket.AI_ADDRCONFIG
    results = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    return [str(result[4][0]) for result in results]


class Resolver(Watch["_Name"]):
    """Turns servers into endpoints, and keeps those of host names up to date.

    Names are resolved every ``interval`` seconds; a look-up fails after ``timeout`` seconds. If one
    fails, or finds no address, the previous addresses stay. ``connect`` makes the endpoint at an
    address.
    """

    def __init__(
        self,
        servers: Sequence[ServerAddress],
        interval: float,
        connect: Callable[[ServerAddress], UpstreamEndpoint],
        lookup: Lookup,
        timeout: float = 5.0,
        random: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(random=random)
        self._interval = interval
        self._connect = connect
        self._servers = tuple(dict.fromkeys(servers))
        self._names = {
            server: _Name(server, lookup, timeout)
            for server in self._servers
            if isinstance(server, TcpAddress) and server.has_host_name
        }
        for name in self._names.values():
            self.add(name)
        self._by_address: dict[ServerAddress, UpstreamEndpoint] = {}
        self.all_resolved = asyncio.Event()
        """Every name was looked up once, successfully or not."""
        self.endpoints: tuple[UpstreamEndpoint, ...] = ()
        """The current endpoints; an address keeps its object."""
        self.on_change: Callable[[Sequence[UpstreamEndpoint]], None] = lambda endpoints: None
        """Called when the endpoints change."""
        self._update_endpoints()

    @property
    def error(self) -> str:
        """Return why there is no endpoint; valid only if there is none."""
        errors = (f"{server.url}: {name.error}" for server, name in self._names.items())
        return "cannot connect to " + "; ".join(errors)

    def adopt_state(self, before: Resolver) -> None:
        """Start with the addresses that another resolver found for the same hosts."""
        known = {server.host: name.addresses for server, name in before._names.items()}
        for server, name in self._names.items():
            name.start_with(known.get(server.host, ()))
        self._update_endpoints()

    async def run(self, target: _Name) -> None:
        """Keep the addresses of a name up to date until cancelled."""
        try:
            await super().run(target)
        finally:
            await target.close()

    async def probe(self, target: _Name) -> float:
        """Look a name up."""
        if await target.look_up():
            self._update_endpoints()
            self.on_change(self.endpoints)
        target.was_looked_up = True
        if all(name.was_looked_up for name in self.wakes):
            self.all_resolved.set()
        return self._interval

    def _update_endpoints(self) -> None:
        addresses: list[ServerAddress] = []
        for server in self._servers:
            name = self._names.get(server) if isinstance(server, TcpAddress) else None
            addresses += (server,) if name is None else name.addresses
        self._by_address = {
            address: self._by_address.get(address) or self._connect(address)
            for address in addresses
        }
        self.endpoints = tuple(self._by_address.values())


@dataclass(eq=False)
class _Name:
    """A server's host name and its current addresses."""

    server: TcpAddress
    lookup: Lookup
    timeout: float
    addresses: tuple[TcpAddress, ...] = ()
    error: str = "its name has not been looked up yet"
    """Why the last look-up found nothing."""
    was_looked_up: bool = False
    _pending: asyncio.Future[Sequence[str]] | None = None
    _failing: bool = False

    def start_with(self, known: Iterable[TcpAddress]) -> None:
        """Use known addresses of the same host until a look-up finds others."""
        self.addresses = tuple(replace(self.server, address=each.address) for each in known)

    async def look_up(self) -> bool:
        """Look the name up; tell whether its addresses changed."""
        try:
            addresses = await self._resolve()
        except TimeoutError:
            self._record_failure(f"no response of the name service within {self.timeout:g} s")
        except (OSError, UnicodeError) as error:
            self._record_failure(describe_connect_error(error))
        else:
            if addresses:
                return self._use(addresses)
            self._record_failure("its name has no address")
        return False

    async def close(self) -> None:
        """Cancel a pending look-up."""
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.gather(self._pending, return_exceptions=True)

    async def _resolve(self) -> Sequence[str]:
        # One look-up at a time: getaddrinfo runs in a thread, which cannot be cancelled.
        if self._pending is None:
            self._pending = asyncio.ensure_future(self.lookup(self.server.host))
        done, _ = await asyncio.wait((self._pending,), timeout=self.timeout)
        if not done:
            raise TimeoutError
        self._pending = None
        return done.pop().result()

    def _record_failure(self, why: str) -> None:
        self.error = why
        if not self._failing:
            self._failing = True
            kept = f"; keeping the previous {len(self.addresses)} addresses"
            _log.warning(
                "%s: DNS lookup failed: %s%s", self.server.url, why, kept if self.addresses else ""
            )

    def _use(self, addresses: Sequence[str]) -> bool:
        """Use these addresses; known ones keep their order, new ones follow."""
        wanted = set(addresses)
        before = [server.address for server in self.addresses if server.address in wanted]
        after = [*before, *sorted(wanted.difference(before))][:_MAX_ADDRESSES]
        changed = len(before) < len(self.addresses) or len(after) > len(before)
        if changed or self._failing:
            all_of = "" if len(after) == len(wanted) else f", {len(after)} of {len(wanted)}"
            _log.info("%s resolves to %s%s", self.server.url, ", ".join(after), all_of)
        self._failing = False
        self.addresses = tuple(replace(self.server, address=address) for address in after)
        return changed
