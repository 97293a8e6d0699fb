"""The composition root: builds a gateway from settings, reloads it, drains it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gateway.admin.status import decode_status, encode_status, worker_status
from gateway.app.active_config import ActiveConfig, RetiredConfigs
from gateway.app.build.limits import SharedLimits, build_shared_limits
from gateway.app.build.listen import (
    BoundAddress,
    close,
    describe_addresses,
    difference,
    listen,
    listen_addresses,
)
from gateway.app.build.routes import build_routes
from gateway.app.build.tracing import Tracing, build_tracing
from gateway.app.build.upstreams import SharedUpstream, build_upstreams, upstreams_by_name
from gateway.app.build.worker_count import offload_threads
from gateway.app.captured_calls import CapturedCalls, send_connection
from gateway.app.ejection_sync import EjectionSync
from gateway.app.endpoint_watch import EndpointWatch, leads_workers
from gateway.app.journal.journal import Event
from gateway.app.loaded_resources import LoadedResources, load_resources
from gateway.app.reload.diff import describe_changes, keep_startup_settings
from gateway.app.reload.prepared import CloseReplaced, PreparedReload
from gateway.app.reload.revision import Revision
from gateway.app.shared_memory import SharedMemory
from gateway.app.status_publisher import StatusPublisher
from gateway.errors import replace_surrogates
from gateway.listener.accept import AcceptingSockets
from gateway.listener.connection_host import IdleTimeouts
from gateway.listener.dispatcher import RequestHandler
from gateway.listener.server import HttpListener
from gateway.observe.access_log import (
    AccessLog,
    LineFormat,
    TemplateFormat,
    write_json,
    write_text,
)
from gateway.observe.call_metrics import CallMetrics
from gateway.observe.call_record import CallObserver
from gateway.observe.failure_log import FAILURE_LOG, REFUSAL_LOG
from gateway.observe.gateway_metrics import GatewayMetrics, ReloadMetrics
from gateway.observe.log_writer import LogWriter
from gateway.offload.threads import OffloadThreads
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.destination import Upstream
from gateway.proxy.filters.trace_sampling import TraceSampler
from gateway.proxy.interfaces import ClientRequest, ClientResponse
from gateway.proxy.router import Router
from gateway.settings.schema import Settings
from gateway.upstream.pool.pool import Pool
from gateway.workers.control import ControlServer, Question
from gateway.workers.worker_watch import WorkerWatch

if TYPE_CHECKING:
    from multidict import CIMultiDictProxy

    from gateway.app.admin_site import AdminSite

_ADMIN_DRAIN_GRACE = 0.1
"""Seconds at the end for operators with an open connection to request a page."""

_NOTED_WAIT = 1.0
"""Seconds after which other workers learn that a call waits for its endpoint."""

_UNKNOWN_VERSION = -1
"""Of the drained endpoints: they are read at the next look."""

_log = logging.getLogger("tensorgate")


@dataclass(frozen=True, slots=True)
class _Parts:
    """What is made from one version of the settings, and replaced by a reload."""

    resources: LoadedResources
    bound: tuple[BoundAddress, ...]
    active_config: ActiveConfig
    offload: OffloadThreads | None
    access_log_writer: LogWriter | None
    tracing: Tracing | None
    admin: AdminSite | None
    watches: tuple[asyncio.Task[None], ...]
    observers: tuple[CallObserver, ...]
    addresses: list[str]

    def listener_at(self, each: BoundAddress, clients: AcceptingSockets) -> AcceptingSockets:
        """Return what accepts at an address: that of operators, or else that of ``clients``."""
        return _listener_at(each, self.resources.settings, self.admin, clients)


class Gateway:
    """A gateway that serves while its context is open; leaving the context drains it.

    A worker's gateway has ``on_closed``: it does not listen, but gets connections with ``take``,
    and calls that function for each connection that closes. ``resources`` are what was loaded for
    these settings already. Workers have ``shared`` memory; ``slot`` is the number of the worker,
    from 0.
    ``drained`` is awaited when no client's call is running any more; the admin address is served
    until it returns. Entering raises ListenError, UpstreamTlsError and ApiKeysError.
    """

    def __init__(
        self,
        settings: Settings,
        on_closed: Callable[[], None] | None = None,
        resources: LoadedResources | None = None,
        revision: Revision | None = None,
        shared: SharedMemory | None = None,
        slot: int = 0,
    ) -> None:
        self._settings = settings
        self._on_closed = on_closed
        self._uncounted_connections = 0
        self._drained_version = 0
        self._preloaded = resources
        self._ejection_sync = None
        if shared is not None:
            self._ejection_sync = EjectionSync(shared.ejections, slot == 0)
        else:
            shared = SharedMemory.for_one_process()
        self._shared = shared
        self._slot = slot
        self.metric_store = shared.metric_store
        """The counters and histograms of all workers."""
        shared.worker_pids[slot][0] = os.getpid()
        shared.heartbeats[slot][0] = int(time.monotonic() * 1000)
        writer = self.metric_store.writer(slot)
        self.call_metrics = CallMetrics(self.metric_store, writer)
        self.reload_metrics = ReloadMetrics(writer)
        self.journal = shared.journal.of_process(slot)
        """Where this process records its events."""
        self._metrics = GatewayMetrics(writer, self.call_metrics.observe_mirrored)
        self._recent_calls = shared.recent_calls.writer(slot)
        self._status_publisher = StatusPublisher(
            shared.statuses,
            slot,
            partial(worker_status, self),
            self._metrics,
            self._tick,
            self._each_second,
        )
        self._endpoint_watch = EndpointWatch(
            self.metric_store, shared.waiting.read, self._pools, self._leads
        )
        self._worker_watch = WorkerWatch(shared.worker_pids, shared.heartbeats, slot)
        self._control: ControlServer | None = None
        self._admin: AdminSite | None = None
        self._offload: OffloadThreads | None = None
        self._access_log_writer: LogWriter | None = None
        self._tracing: Tracing | None = None
        self._bound: tuple[BoundAddress, ...] = ()
        self._watches: tuple[asyncio.Task[None], ...] = ()
        self._observers: tuple[CallObserver, ...] = ()
        self._retired = RetiredConfigs()
        self.revision = revision or Revision(time.time())
        """Which settings are in use; the reloader keeps it up to date."""
        self.addresses: list[str] = []
        """Where clients and operators connect: URLs, or unix:/path."""
        self.dropped = 0
        """Calls that were cut at the drain timeout."""
        self.draining = False
        """It is stopping, and finishes the calls in progress."""

    @property
    def settings(self) -> Settings:
        """Return the settings in use."""
        return self._settings

    @property
    def listener(self) -> HttpListener:
        """Return the listener of clients."""
        return self._listener

    @property
    def upstreams(self) -> dict[str, Upstream]:
        """Return the upstreams by name."""
        return self.active_config.upstreams

    @property
    def concurrency_limit(self) -> ConcurrencyLimit | None:
        """Return the limit of all calls together, if there is one."""
        return self.active_config.limits.concurrency_limit

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes of bodies that are buffered."""
        return self.active_config.limits.memory_budget.total

    @property
    def event_loop_lag(self) -> dict[str, Any] | None:
        """Return by how much the event loop lags, and since when; None while it is well."""
        return self._status_publisher.event_loop.describe()

    @property
    def settings_status(self) -> dict[str, Any]:
        """Return which settings are in use, and why newer ones are not."""
        return {
            # The name of a file need not be UTF-8.
            name: replace_surrogates(value) if isinstance(value, str) else value
            for name, value in asdict(self.revision).items()
        }

    async def worker_statuses(self) -> list[dict[str, Any]]:
        """Return the status of this process, which is the only one, as the admin address reads it.

        The workers of several publish theirs.
        """
        self._metrics.count_cpu_time()
        status = worker_status(self)
        return [await asyncio.to_thread(lambda: decode_status(encode_status(status)))]

    @property
    def hangs(self) -> bool:
        """Tell whether no worker serves calls; this process would not reply then."""
        return False

    def requests_in_progress(self) -> int:
        """Return the number of calls in progress."""
        return self._listener.requests

    def authorizes(self, headers: CIMultiDictProxy[str]) -> bool:
        """Tell whether a request has a key that allows actions at the admin address."""
        return self._resources.authorizes(headers)

    async def drain_endpoint(self, upstream: str, url: str, drained: bool, operator: str) -> None:
        """Drain an endpoint, or restore it. Raises ValueError."""
        self._shared.drained.change(upstream, url, drained)
        self.journal.record_action(operator, upstream, url, drained)
        self._drain_endpoints(self.upstreams)

    async def connect(self) -> socket.socket:
        """Return a connection that is served as that of a client over a Unix socket."""
        ours, theirs = socket.socketpair()
        self._listener.adopt(theirs)
        return ours

    async def connect_captured(self, skips_conversion: bool) -> tuple[socket.socket, socket.socket]:
        """Return such a connection for one call, and a socket that gets what is captured of it."""
        (ours, theirs), (source, sink) = socket.socketpair(), socket.socketpair()
        with theirs:
            send_connection(source, theirs, skips_conversion)
        self._captured.serve(sink)
        return ours, source

    def recent_calls(self, positions: Sequence[int]) -> tuple[list[bytes], list[int]]:
        """Return the recent calls after positions, and the next positions."""
        return self._shared.recent_calls.read(positions)

    def events(self) -> list[Event]:
        """Return the last events, newest first."""
        return self.journal.read()

    async def not_ready_reason(self) -> str:
        """Return why the gateway is not ready, or an empty text."""
        return await self.active_config.router.readiness.check()

    async def __aenter__(self) -> Self:
        settings = self._settings
        resources = self._preloaded
        if resources is None:
            resources = load_resources(settings)
        self._resources = resources
        self._bound = self._bind(settings)
        self._offload = self._offload_for(settings)
        limits = build_shared_limits(settings, self._metrics)
        buffers = limits.memory_budget.buffers
        upstreams = build_upstreams(
            *(resources.upstream_specs, {}, self._metrics, buffers),
            *(self._ejection_sync, self.journal),
        )
        try:
            await _start(upstreams)
        except BaseException:
            close(self._bound)
            await _close_unused(upstreams)
            raise
        router = _build_router(resources, upstreams, limits, self._offload, self._metrics)
        self.active_config = ActiveConfig(upstreams, router, limits)
        self.active_config.activate()
        self._drain_endpoints(self.upstreams)
        self._access_log_writer = self._log_writer(settings)
        self._tracing = build_tracing(settings, self._metrics)
        self._observers = self._make_observers(settings, self._access_log_writer, self._tracing)
        self._listener = HttpListener(
            self._handle_request,
            self._observers,
            self._note_closed,
            self.active_config.fast_path,
            resources.tls,
            _idle_timeouts(settings),
            resources.forwarding,
            buffers,
            _sampler(self._tracing),
        )
        self._captured = CapturedCalls(self._capturing_listener, self._handle_request)
        self._watches = self._watch_files(resources)
        self._admin = await self._admin_site(settings)
        self.addresses = describe_addresses(self._bound, settings)
        self._listen(self._bound, settings, self._admin)
        if self._shared.control is not None:
            self._control = ControlServer(self._shared.control, self._slot, self._reply)
            self._control.__enter__()
        if self._ejection_sync is not None:
            self._ejection_sync.start(self._pools)
        await self._endpoint_watch.__aenter__()
        await self._status_publisher.__aenter__()
        if self._is_alone:
            self.journal.record_start(1)
        return self

    @property
    def _is_alone(self) -> bool:
        """Tell whether there is no supervisor, which else records what concerns all workers."""
        return self._on_closed is None

    def take(self, connection: socket.socket) -> None:
        """Serve a connection that was accepted elsewhere; this owns it from now on."""
        self._listener.adopt(connection)

    def make_room(self) -> bool:
        """Close idle connections of clients, as descriptors have run out; see HttpListener."""
        return self._listener.make_room()

    def reopen_logs(self) -> None:
        """Open the file of the access log anew, as after a rotation."""
        if self._access_log_writer is not None:
            self._access_log_writer.reopen()

    def begin_draining(self) -> None:
        """Be not ready from now on; leaving the context drains."""
        if self._is_alone and not self.draining:
            self.journal.record_drain(self._settings.limits.drain_timeout)
        self.draining = self.active_config.router.readiness.draining = True

    async def reload(self, settings: Settings) -> str:
        """Apply other settings, as ``prepare`` and a commit do; return what has changed."""
        prepared = await self.prepare(settings)
        # Nothing is awaited in between, as ``prepare`` has begun to accept connections.
        await prepared.commit()()
        return prepared.changes

    async def prepare(self, settings: Settings) -> PreparedReload:
        """Make all that other settings need, but for the number of workers.

        Running calls end as they began. Only one reload is prepared at a time. Whatever this
        raises, nothing has changed: ListenError, UpstreamTlsError and ApiKeysError for settings
        that cannot be used, and RuntimeError or OSError where the system has no room for a part.
        """
        settings = keep_startup_settings(settings, self._settings)
        resources = await asyncio.to_thread(load_resources, settings, self._resources)
        changes = describe_changes(resources, self._resources)
        async with AsyncExitStack() as undo:
            parts = await self._make_parts(resources, undo)
            return PreparedReload(changes, partial(self._swap, parts), undo.pop_all())

    async def _make_parts(self, resources: LoadedResources, undo: AsyncExitStack) -> _Parts:
        """Make all that the settings ask for, and that there is not; ``undo`` closes it again.

        It has accepted no connection yet when this returns.
        """
        settings = resources.settings
        offload = self._offload_for(settings)
        limits = build_shared_limits(settings, self._metrics, self.active_config.limits)
        upstreams = build_upstreams(
            resources.upstream_specs,
            self.active_config.shared_upstreams,
            self._metrics,
            limits.memory_budget.buffers,
            self._ejection_sync,
            self.journal,
        )
        undo.push_async_callback(_close_unused, upstreams)
        await _start(upstreams)
        router = await asyncio.to_thread(
            _build_router, resources, upstreams, limits, offload, self._metrics
        )
        bound = self._bind(settings)
        opened = difference(bound, self._bound)
        undo.callback(close, opened)
        writer = self._log_writer(settings)
        undo.push_async_callback(_close_writer, writer, self._access_log_writer)
        tracing = build_tracing(settings, self._metrics, self._tracing)
        undo.push_async_callback(_close_tracing, tracing, self._tracing)
        admin = await self._admin_site(settings)
        undo.push_async_callback(_close_admin, admin, self._admin)
        watches = self._watch_files(resources)
        undo.callback(_cancel, watches)
        self._drain_endpoints(upstreams_by_name(upstreams))
        observers = self._make_observers(settings, writer, tracing)
        addresses = describe_addresses(bound, settings)
        # Nothing is awaited from here on, so that nobody connects in between.
        undo.callback(self._stop_listening, opened, settings, admin)
        self._listen(opened, settings, admin)
        return _Parts(
            resources,
            bound,
            ActiveConfig(upstreams, router, limits),
            offload,
            writer,
            tracing,
            admin,
            watches,
            observers,
            addresses,
        )

    def _swap(self, parts: _Parts) -> CloseReplaced:
        """Use other parts from now on, by assignments that cannot fail."""
        replaced = _Parts(
            self._resources,
            self._bound,
            self.active_config,
            self._offload,
            self._access_log_writer,
            self._tracing,
            self._admin,
            self._watches,
            self._observers,
            self.addresses,
        )
        settings = parts.resources.settings
        self._settings, self._resources = settings, parts.resources
        self._bound, self.addresses = parts.bound, parts.addresses
        parts.active_config.activate()
        self.active_config = parts.active_config
        self._drained_version = _UNKNOWN_VERSION  # operators may have drained more meanwhile
        self._offload = parts.offload
        self._access_log_writer = parts.access_log_writer
        self._tracing = parts.tracing
        self._admin = parts.admin
        self._watches = parts.watches
        self._observers = parts.observers
        self._listener.reconfigure(
            parts.active_config.fast_path,
            parts.observers,
            parts.resources.tls,
            _idle_timeouts(settings),
            parts.resources.forwarding,
            _sampler(parts.tracing),
        )
        self._retired.add(replaced.active_config)
        return partial(self._close_replaced, replaced)

    async def _close_replaced(self, replaced: _Parts) -> None:
        """Close what is not used any more; what fails is logged, as the reload has happened."""
        _cancel(replaced.watches)
        kept_addresses = {each.address for each in self._bound}
        for each in difference(replaced.bound, self._bound):
            sockets = replaced.listener_at(each, self._listener.sockets)
            with _logged(f"the address {each.address}"):
                try:
                    if each.address not in kept_addresses:
                        await sockets.stop_listening(each.sockets)
                finally:
                    sockets.close_sockets(each.sockets)
        with _logged("the admin address"):
            await _close_admin(replaced.admin, self._admin)
        if replaced.offload is not None and replaced.offload is not self._offload:
            with _logged("the threads for large tensors"):
                replaced.offload.close()
        with _logged("the access log"):
            await _close_writer(replaced.access_log_writer, self._access_log_writer)
        with _logged("the export of traces"):
            await _close_tracing(replaced.tracing, self._tracing)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        limits = self._settings.limits
        self.begin_draining()
        self.dropped = await self._listener.drain(limits.drain_timeout, limits.drain_grace)
        await self._captured.close()
        admin, self._admin = self._admin, None
        await _close_admin(admin, grace=_ADMIN_DRAIN_GRACE)
        if self._control is not None:
            self._control.__exit__(None, None, None)
        await self._status_publisher.__aexit__(None, None, None)
        FAILURE_LOG.flush()
        REFUSAL_LOG.flush()
        await self._endpoint_watch.__aexit__(None, None, None)
        close(self._bound)
        _cancel(self._watches)
        if self._ejection_sync is not None:
            await self._ejection_sync.close()
        await self._retired.close()
        await self.active_config.close()
        if self._offload is not None:
            self._offload.close()
        await _close_writer(self._access_log_writer)
        await _close_tracing(self._tracing)

    async def _admin_site(self, settings: Settings) -> AdminSite | None:
        """Return what serves the admin address, if there is one: the current one, or a new one.

        The admin process does it for workers.
        """
        if settings.admin.listen is None or self._on_closed is not None:
            return None
        if self._admin is not None:
            return self._admin
        from gateway.app.admin_site import AdminSite  # imports aiohttp, which takes time

        admin = AdminSite(self)
        # Clients can take all descriptors, operators cannot.
        admin.sockets.make_room = self._listener.make_room
        try:
            await admin.__aenter__()
        except BaseException:
            await admin.drain(0.0)
            raise
        return admin

    async def _reply(self, question: Question, connection: socket.socket | None) -> str:
        """Reply to a question of the admin process."""
        if question == Question.READY:
            return await self.not_ready_reason()
        if question == Question.PUBLISH:
            await self._status_publisher.publish()
        elif question == Question.CONNECT and connection is not None:
            self._uncounted_connections += 1
            self._listener.adopt(connection)
        elif question == Question.CAPTURE and connection is not None:
            self._captured.serve(connection)
        return ""

    def _note_closed(self) -> None:
        """Count a closed connection, unless the supervisor has not counted it as open."""
        if self._uncounted_connections:
            self._uncounted_connections -= 1
        elif self._on_closed is not None:
            self._on_closed()

    def _drain_endpoints(self, upstreams: Mapping[str, Upstream]) -> None:
        """Apply what operators have drained or restored."""
        urls: defaultdict[str, set[str]] = defaultdict(set)
        for upstream, url in self._shared.drained.read():
            urls[upstream].add(url)
        for name, each in upstreams.items():
            each.pool.set_drained(urls[name])

    def _leads(self) -> bool:
        return leads_workers(self._shared.heartbeats, self._slot, time.monotonic())

    def _tick(self) -> None:
        self._shared.heartbeats[self._slot][0] = int(time.monotonic() * 1000)
        version = self._shared.drained.version
        if self._drained_version != version:
            self._drain_endpoints(self.upstreams)
            self._drained_version = version
        self._shared.calls_in_progress[self._slot][0] = self._listener.requests

    def _each_second(self) -> None:
        FAILURE_LOG.flush_if_due()
        REFUSAL_LOG.flush_if_due()
        self.active_config.flush_mirror_logs()
        self._worker_watch.look(self._leads())
        self._recent_calls.flush()
        now, waiting = time.monotonic(), self._listener.find_waiting(_NOTED_WAIT)
        sent = {key: now - seconds for key, seconds in waiting.items()}
        self._shared.waiting.publish(self._slot, now, sent)

    def _make_observers(
        self, settings: Settings, writer: LogWriter | None, tracing: Tracing | None
    ) -> tuple[CallObserver, ...]:
        """Return what gets the record of each call."""
        observers: list[CallObserver] = [self.call_metrics.observe, FAILURE_LOG.observe]
        if writer is not None:
            observers.append(_access_log(settings, writer).write)
        if settings.admin.listen is not None:
            observers.append(self._recent_calls.observe)
        if tracing is not None:
            observers.append(tracing.exporter.observe)
        return tuple(observers)

    def _log_writer(self, settings: Settings) -> LogWriter | None:
        """Return what writes the access log: the current one if it writes to the right place."""
        log, current = settings.log.access, self._access_log_writer
        if log is None:
            return None
        if current is not None and current.path == log.path:
            return current
        dropped = self._metrics.dropped_log_lines
        return LogWriter(log.path, lambda lines: dropped.add(float(lines)))

    def _offload_for(self, settings: Settings) -> OffloadThreads | None:
        """Return the threads of the settings: the current ones if that is their number."""
        count = offload_threads(settings)
        if not count:
            return None
        if self._offload is not None and self._offload.count == count:
            return self._offload
        metrics = self._metrics.offload()

        def on_job(offloaded: bool) -> None:
            (metrics.offloaded if offloaded else metrics.local).add(1.0)

        return OffloadThreads(count, on_job)

    def _pools(self) -> dict[str, Pool]:
        return {name: each.pool for name, each in self.upstreams.items()}

    def _bind(self, settings: Settings) -> tuple[BoundAddress, ...]:
        if self._on_closed is not None:
            return ()
        # An address that clients and operators swap needs sockets of its own for either.
        swapped = {self._settings.admin.listen} ^ {settings.admin.listen}
        return listen(listen_addresses(settings), self._bound, swapped)

    def _capturing_listener(
        self, handler: RequestHandler, observer: CallObserver, on_closed: Callable[[], None]
    ) -> HttpListener:
        """Return a listener for captured calls, with the settings in use."""
        settings, resources = self.settings, self._resources
        observers = self._make_observers(settings, self._access_log_writer, self._tracing)
        return HttpListener(
            handler,
            (*observers, observer),
            on_closed,
            None,
            None,
            _idle_timeouts(settings),
            resources.forwarding,
            self.active_config.limits.memory_budget.buffers,
            _sampler(self._tracing),
        )

    def _listen(
        self, opened: Iterable[BoundAddress], settings: Settings, admin: AdminSite | None
    ) -> None:
        """Accept connections at addresses, for clients or for operators."""
        for each in opened:
            for sock in each.sockets:
                _listener_at(each, settings, admin, self._listener.sockets).listen(sock)

    def _stop_listening(
        self, opened: Iterable[BoundAddress], settings: Settings, admin: AdminSite | None
    ) -> None:
        """Undo ``_listen``, also if it has failed half-way."""
        for each in opened:
            sockets = _listener_at(each, settings, admin, self._listener.sockets)
            sockets.close_sockets(each.sockets)

    def _watch_files(self, resources: LoadedResources) -> tuple[asyncio.Task[None], ...]:
        """Start to follow the certificate and the API keys; return the tasks that do it."""
        watches = []

        def on_reload(failure: str) -> None:
            if self._is_alone:
                resources.record_certificate(self.journal, failure)

        if resources.tls is not None:
            watches.append(asyncio.create_task(resources.tls.watch(on_reload)))
        if resources.api_keys.groups:
            watch = resources.api_keys.watch(self._listener.clear_plans)
            watches.append(asyncio.create_task(watch))
        return tuple(watches)

    async def _handle_request(self, request: ClientRequest, response: ClientResponse) -> None:
        await self.active_config.handle_request(request, response)


def _build_router(
    resources: LoadedResources,
    upstreams: Mapping[str, SharedUpstream],
    limits: SharedLimits,
    offload: OffloadThreads | None,
    metrics: GatewayMetrics,
) -> Router:
    return build_routes(
        resources.settings,
        upstreams_by_name(upstreams),
        limits,
        offload,
        resources.api_keys.groups,
        resources.forwarding,
        metrics,
    )


def _access_log(settings: Settings, writer: LogWriter) -> AccessLog:
    log = settings.log.access
    assert log is not None
    formats: dict[str, LineFormat] = {"text": write_text, "json": write_json}
    line_format = formats.get(log.format) or TemplateFormat(log.format)
    return AccessLog(writer, line_format, log.sample / 100, log.slow)


def _listener_at(
    each: BoundAddress, settings: Settings, admin: AdminSite | None, clients: AcceptingSockets
) -> AcceptingSockets:
    """Return what accepts at an address: that of operators, or else that of ``clients``."""
    return clients if admin is None or each.address != settings.admin.listen else admin.sockets


def _sampler(tracing: Tracing | None) -> TraceSampler | None:
    return None if tracing is None else tracing.sampler


def _cancel(watches: Iterable[asyncio.Task[None]]) -> None:
    for watch in watches:
        watch.cancel()


async def _close_admin(
    admin: AdminSite | None, kept: AdminSite | None = None, grace: float = 0.0
) -> None:
    """Close what serves the admin address, unless it is kept."""
    if admin is not None and admin is not kept:
        await admin.drain(grace)
        await admin.__aexit__(None, None, None)


async def _close_writer(writer: LogWriter | None, kept: LogWriter | None = None) -> None:
    """Write the lines that wait, within a bounded time, unless the writer is kept."""
    if writer is not None and writer is not kept:
        await _in_thread(writer.close)


async def _close_tracing(tracing: Tracing | None, kept: Tracing | None = None) -> None:
    """Export what is queued, within a bounded time, unless the exporter is kept."""
    if tracing is not None and (kept is None or kept.exporter is not tracing.exporter):
        await _in_thread(tracing.exporter.close)


async def _in_thread(close: Callable[[], None]) -> None:
    """Close what waits for its own thread to end, without blocking the event loop if possible."""
    try:
        await asyncio.to_thread(close)
    except RuntimeError:  # no thread can be started; closing twice does no harm
        close()


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """Log an error inside, instead of raising it."""
    try:
        yield
    except Exception:
        _log.exception("%s of the previous settings could not be closed", what)


def _idle_timeouts(settings: Settings) -> IdleTimeouts:
    limits = settings.limits
    return IdleTimeouts(
        limits.request_header_timeout, limits.keep_alive_timeout, limits.idle_timeout
    )


async def _start(upstreams: Mapping[str, SharedUpstream]) -> None:
    """Start the pools that are not started yet."""
    await asyncio.gather(*(each.start() for each in upstreams.values()))


async def _close_unused(upstreams: Mapping[str, SharedUpstream]) -> None:
    for each in upstreams.values():
        await each.close_if_unused()
