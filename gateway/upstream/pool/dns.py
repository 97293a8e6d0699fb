"""The addresses of host names, looked up every so often: each of them is an endpoint."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

from gateway.routing.intervals import pauses
from gateway.upstream.http.address import ServerAddress, TcpAddress
from gateway.upstream.http.connect_errors import describe_connect_error
from gateway.upstream.transport import UpstreamEndpoint

_MOST = 256
"""Addresses of one name that are used."""

_log = logging.getLogger("tensorgate.upstream")

Lookup = Callable[[str], Awaitable[Sequence[str]]]
"""Gives the addresses of a host name. Raises OSError, or UnicodeError for what cannot be a name."""


async def resolve_host(host: str) -> list[str]:
    """Ask the system for a host's addresses, of the kinds that this machine can reach."""
    loop = asyncio.get_running_loop()
    kinds = socket.AI_ADDRCONFIG
    found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=kinds)
    return [str(entry[4][0]) for entry in found]


class Resolver:
    """Gives the endpoints of servers, of which some are named.

    Names are looked up every so many seconds. What was known of a name stays if that fails, or
    gives nothing. ``connect`` makes the endpoint at an address; a look-up fails after ``time``
    seconds; ``random`` gives numbers in [0, 1).
    """

    def __init__(
        self,
        servers: Sequence[ServerAddress],
        every: float,
        connect: Callable[[ServerAddress], UpstreamEndpoint],
        lookup: Lookup,
        time: float = 5.0,
        random: Callable[[], float] = random.random,
    ) -> None:
        self._every = every
        self._connect = connect
        self._random = random
        self._servers = tuple(dict.fromkeys(servers))
        self._names = {
            server: _Name(server, lookup, time)
            for server in self._servers
            if isinstance(server, TcpAddress) and server.has_host_name
        }
        self._unanswered = set(self._names)
        self._made: dict[ServerAddress, UpstreamEndpoint] = {}
        self.answered = asyncio.Event()
        """All names have been looked up, whatever came of it."""
        self.endpoints: tuple[UpstreamEndpoint, ...] = ()
        """Those that are known now: the same object for the same address."""
        self._make()

    @property
    def fault(self) -> str:
        """Tell why there is no endpoint, where there is none."""
        faults = (f"{server.url}: {name.fault}" for server, name in self._names.items())
        return "cannot connect to " + "; ".join(faults)

    def adopt_state(self, before: Resolver) -> None:
        """Begin with the addresses that another resolver knows for the same hosts."""
        known = {server.host: name.addresses for server, name in before._names.items()}
        for server, name in self._names.items():
            name.begin_with(known.get(server.host, ()))
        self._make()

    async def watch(self, changed: Callable[[], None]) -> None:
        """Look names up until cancelled; ``changed`` is called when the endpoints are others."""
        await asyncio.gather(*(self._follow(server, changed) for server in self._names))

    async def _follow(self, server: TcpAddress, changed: Callable[[], None]) -> None:
        name = self._names[server]
        try:
            for pause in pauses(self._every, self._random()):
                if await name.look_up():
                    self._make()
                    changed()
                self._unanswered.discard(server)
                if not self._unanswered:
                    self.answered.set()
                await asyncio.sleep(pause)
        finally:
            await name.close()

    def _make(self) -> None:
        addresses: list[ServerAddress] = []
        for server in self._servers:
            name = self._names.get(server) if isinstance(server, TcpAddress) else None
            addresses += (server,) if name is None else name.addresses
        self._made = {
            address: self._made.get(address) or self._connect(address) for address in addresses
        }
        self.endpoints = tuple(self._made.values())


class _Name:
    """A server's host name, and the addresses that were found for it."""

    def __init__(self, server: TcpAddress, lookup: Lookup, time: float) -> None:
        self.addresses: tuple[TcpAddress, ...] = ()
        self.fault = "its name has not been looked up yet"
        """Why the last look-up gave nothing."""
        self._server = server
        self._lookup = lookup
        self._time = time
        self._asking: asyncio.Future[Sequence[str]] | None = None
        self._failing = False

    def begin_with(self, known: Iterable[TcpAddress]) -> None:
        """Use addresses of the same host, until a look-up gives others."""
        self.addresses = tuple(replace(self._server, address=each.address) for each in known)

    async def look_up(self) -> bool:
        """Look the name up; tell whether that gave other addresses than before."""
        try:
            found = await self._ask()
        except TimeoutError:
            self._fail(f"no answer of the name service within {self._time:g} s")
        except (OSError, UnicodeError) as error:
            self._fail(describe_connect_error(error))
        else:
            if found:
                return self._take(found)
            self._fail("its name has no address")
        return False

    async def close(self) -> None:
        """Wait for no answer any more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask(self) -> Sequence[str]:
        """Wait for the addresses: of one look-up at a time, as a system's cannot be cancelled."""
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._lookup(self._server.host))
        done, _ = await asyncio.wait((self._asking,), timeout=self._time)
        if not done:
            raise TimeoutError
        self._asking = None
        return done.pop().result()

    def _fail(self, why: str) -> None:
        self.fault = why
        if not self._failing:
            self._failing = True
            kept = f"; the {len(self.addresses)} addresses from before stay in use"
            _log.warning(
                "%s: look-up failed: %s%s", self._server.url, why, kept if self.addresses else ""
            )

    def _take(self, found: Sequence[str]) -> bool:
        """Use these addresses; those that were used before come first, in their order."""
        wanted = set(found)
        before = [server.address for server in self.addresses if server.address in wanted]
        after = [*before, *sorted(wanted.difference(before))][:_MOST]
        changed = len(before) < len(self.addresses) or len(after) > len(before)
        if changed or self._failing:
            all_of = "" if len(after) == len(wanted) else f", {len(after)} of {len(wanted)}"
            _log.info("%s is at %s%s", self._server.url, ", ".join(after), all_of)
        self._failing = False
        self.addresses = tuple(replace(self._server, address=address) for address in after)
        return changed
