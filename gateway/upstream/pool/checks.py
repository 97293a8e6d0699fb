"""Background checks of a pool's members: their health, their models, their dialect, and DNS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.errors import ErrorKind, GatewayError, bad_response, strip_tracebacks
from gateway.protocol.operations import ModelName
from gateway.protocol.v1 import MODELS_PATH, ready_entries
from gateway.routing.endpoint_health import HealthCheckPolicy, record_probe
from gateway.sizes import MAX_MODEL_DOCUMENT, MAX_PROBE_RESPONSE
from gateway.upstream.control_client import send_control_request
from gateway.upstream.pool.dialect import DialectDetector
from gateway.upstream.pool.dns import Resolver
from gateway.upstream.pool.member import ANY_MODEL, Member, ReadyModels
from gateway.upstream.pool.watch import Watch
from gateway.upstream.transport import UpstreamEndpoint

_INDEX = "/v2/repository/index"

_LIST_TIMEOUT = 5.0
"""Seconds for the lists of models of a server, both together."""

# The server has no list, or not for everybody. Temporary errors such as 429 and 503 are not here.
_NOT_SERVED = frozenset((400, 401, 403, 404, 405, 501))

START_DNS_TIMEOUT = 1.0
"""Seconds for which the start waits for the addresses of names."""

_log = logging.getLogger("tensorgate.upstream")


def log_level(is_known: bool | None) -> int:
    """Choose the level of an event, which has one line in the log over all workers.

    ``is_known`` tells that another worker has found it before; see EjectionListener.
    """
    return logging.DEBUG if is_known else logging.WARNING


@dataclass(eq=False)
class HealthChecker(Watch[Member]):
    """Requests ``path`` every ``interval`` seconds; a 2xx within ``timeout`` is a success.

    ``notify`` is called with a member that has become unhealthy, or healthy again; it returns True
    if another worker has told the same before. Then ``on_change`` is called with it.
    """

    path: str
    interval: float
    timeout: float
    policy: HealthCheckPolicy
    notify: Callable[[Member], bool | None] = lambda _: None
    on_change: Callable[[Member], None] = lambda _: None

    async def probe(self, member: Member) -> float:
        """Check an endpoint."""
        result = await self._check(member.endpoint)
        if result is not None:
            success, member.reason = result
            before = member.probed
            member.probed = record_probe(before, success, self.policy)
            if member.probed.healthy is not before.healthy:
                self._log_change(member, before.healthy)
                self.on_change(member)
        return self.interval

    async def _check(self, endpoint: UpstreamEndpoint) -> tuple[bool, str] | None:
        """Return success or failure and its reason; None if the gateway itself failed."""
        try:
            response = await send_control_request(
                endpoint, self.path, MAX_PROBE_RESPONSE, self.timeout
            )
        except GatewayError as error:
            strip_tracebacks(error)
            return None if error.kind is ErrorKind.EXHAUSTED else (False, error.message)
        return 200 <= response.status < 300, f"GET {self.path} returned {response.status}"

    def _log_change(self, member: Member, before: bool | None) -> None:
        if member.is_healthy and before is None:
            return
        what = "healthy again" if member.is_healthy else "unhealthy"
        level = log_level(self.notify(member))
        _log.log(level, "%s is %s: %s", member.endpoint.url, what, member.reason)


@dataclass(eq=False)
class ModelDiscovery(Watch[Member]):
    """Asks for ready models every ``interval`` seconds, and whenever they may have changed."""

    interval: float

    def refresh_models(self) -> None:
        """Ask all endpoints at once, after a model was loaded or unloaded."""
        for member in self.wakes:
            self.wake(member)

    async def probe(self, member: Member) -> float:
        """Bring the list of an endpoint's models up to date."""
        url, error = member.endpoint.url, ""
        try:
            member.models = await fetch_ready_models(member.endpoint)
            if member.models is ANY_MODEL:
                lacks = "serves no repository index, nor a list as KServe's"
                error = f"{url} {lacks}: any model may be there"
        except GatewayError as failure:
            error = f"{url} does not say which models it has: {failure.message}"
        if error and error != member.models_error:
            _log.warning("%s", error)
        member.models_error = error
        return self.interval


async def may_have_model(endpoint: UpstreamEndpoint, model: str) -> bool:
    """Ask a server whether a model is ready there; without a clear answer it may be.

    The lists of discovery are too old to decide which servers a change of the model is for.
    """
    try:
        return (await fetch_ready_models(endpoint)).includes(ModelName(model))
    except GatewayError:
        return True


async def fetch_ready_models(endpoint: UpstreamEndpoint) -> ReadyModels:
    """Fetch a server's list of ready models; ``ANY_MODEL`` if it serves none.

    KServe has no repository index, only a V1 list of all its models. Raises GatewayError (502, 503,
    504) for no response or one that makes no sense.
    """
    try:
        async with asyncio.timeout(_LIST_TIMEOUT):
            return await _fetch_index_or_list(endpoint)
    except TimeoutError:
        message = f"{endpoint.url} sent no list of models within {_LIST_TIMEOUT:g} s"
        raise GatewayError(ErrorKind.SERVER_TIMEOUT, message, server=endpoint.name) from None


async def _fetch_index_or_list(endpoint: UpstreamEndpoint) -> ReadyModels:
    index = await _fetch_list(endpoint, _INDEX, b'{"ready":true}')
    if index is not None:
        models = _parse_list(index)
        if models is None:
            raise bad_response(f"{endpoint.url}{_INDEX} is no index of models", endpoint.name)
        return models
    v1_list = await _fetch_list(endpoint, MODELS_PATH)
    # Servers of OpenAI's API serve another list at this path.
    models = None if v1_list is None else _parse_list(v1_list)
    return ANY_MODEL if models is None else models


async def _fetch_list(
    endpoint: UpstreamEndpoint, path: str, body: bytes | None = None
) -> bytes | None:
    """Fetch a list; None if it is not served. Raises GatewayError as ``fetch_ready_models``."""
    response = await send_control_request(endpoint, path, MAX_MODEL_DOCUMENT, body=body)
    if response.status in _NOT_SERVED:
        return None
    if response.status != 200:
        raise bad_response(f"{endpoint.url}{path} returned {response.status}", endpoint.name)
    return response.body


def _parse_list(document: bytes) -> ReadyModels | None:
    try:
        return parse_ready_models(orjson.loads(document))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def parse_ready_models(document: Any) -> ReadyModels:
    """Read a repository index, or KServe's list of models.

    KServe's list has no versions, nor has MLServer's index for a model without one. Raises
    TypeError, KeyError or AttributeError for anything else.
    """
    versions: dict[str, set[str]] = {}
    for entry in ready_entries(document):
        versions.setdefault(str(entry["name"]), set()).add(str(entry.get("version") or ""))
    return ReadyModels(
        {name: frozenset() if "" in each else frozenset(each) for name, each in versions.items()}
    )


@dataclass(eq=False)
class PoolSupervisor:
    """Runs the background tasks of a pool's members, as far as the settings ask for them."""

    health_checker: HealthChecker | None = None
    model_discovery: ModelDiscovery | None = None
    resolver: Resolver | None = None
    dialect_detector: DialectDetector | None = None
    is_running: bool = False
    _tasks_by_member: dict[Member, list[asyncio.Task[None]]] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def _watches(self) -> list[Watch[Member]]:
        found = self.health_checker, self.model_discovery, self.dialect_detector
        return [each for each in found if each is not None]

    async def resolve_names(self, use: Callable[[Sequence[UpstreamEndpoint]], None]) -> None:
        """Start to resolve names; wait a moment for the first addresses.

        ``use`` gets the endpoints whenever they change.
        """
        resolver = self.resolver
        if resolver is None:
            return
        resolver.on_change = use
        for name in resolver.wakes:
            self.start_task(resolver.run(name))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_DNS_TIMEOUT):
                await resolver.all_resolved.wait()

    def add(self, members: Iterable[Member]) -> None:
        """Start the tasks of members."""
        for member in members:
            self._tasks_by_member[member] = tasks = []
            for watch in self._watches:
                watch.add(member)
                tasks.append(self.start_task(watch.run(member)))

    def remove(self, members: Iterable[Member]) -> None:
        """Stop the tasks of members and close their idle connections."""
        for member in members:
            for task in self._tasks_by_member.pop(member, ()):
                task.cancel()
            for watch in self._watches:
                watch.remove(member)
            self.start_task(member.endpoint.close())

    def recheck(self, member: Member) -> None:
        """Detect a member's dialect again, as it may be another server by now."""
        if self.dialect_detector is not None:
            self.dialect_detector.wake(member)

    async def close(self) -> None:
        """Cancel all tasks and wait for their end."""
        self.is_running = False
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def start_task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run work in the background until it ends, or until ``close``."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a background task of an upstream failed and stopped", exc_info=error)
