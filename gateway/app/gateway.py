"""The composition root: builds what serves calls from settings, reloads it, drains it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, Self

from gateway.app.build.limits import SharedLimits, build_shared_limits
from gateway.app.build.routes import build_routes
from gateway.app.build.tracing import Tracing, build_tracing
from gateway.app.build.upstreams import SharedUpstream, build_upstreams, upstreams_by_name
from gateway.app.build.worker_count import offload_threads
from gateway.app.captured_calls import CapturedCalls
from gateway.app.ejection_sync import EjectionSync
from gateway.app.endpoint_watch import EndpointWatch, RecentLooks
from gateway.app.loaded_resources import LoadedResources, load_resources
from gateway.app.reload import CloseReplaced, PreparedReload
from gateway.app.shared_memory import SharedMemory
from gateway.app.status_publisher import StatusPublisher, describe_concurrency, describe_upstream
from gateway.listener.client_call import RequestHandler
from gateway.listener.connection_host import IdleTimeouts
from gateway.listener.server import HttpListener
from gateway.observe.access_log import AccessLog, LineFormat, TemplateFormat, write_json, write_text
from gateway.observe.call_metrics import CallMetrics
from gateway.observe.call_record import CallObserver
from gateway.observe.failure_log import FAILURE_LOG, REFUSAL_LOG
from gateway.observe.gateway_metrics import GatewayMetrics, OffloadMetrics
from gateway.observe.log_writer import LogWriter
from gateway.observe.tracing.exporter import TraceExporter
from gateway.offload.threads import OffloadThreads
from gateway.proxy.calls.dispatch import handle_request
from gateway.proxy.calls.planner import Planner
from gateway.proxy.destination import Upstream
from gateway.proxy.filters.mirror import Mirror
from gateway.proxy.filters.trace_sampling import TraceSampler
from gateway.proxy.interfaces import ClientRequest, ClientResponse
from gateway.proxy.router import Router
from gateway.settings.schema import Settings
from gateway.upstream.pool.pool import Pool
from gateway.workers.control import ControlServer, Question
from gateway.workers.worker_watch import WorkerWatch

_RETIRED_POLL = 0.1
"""Seconds between two looks whether the calls of a retired configuration have ended."""
_NOTED_WAIT = 1.0
"""Seconds after which other workers learn that a call waits for its endpoint."""

_log = logging.getLogger("tensorgate")


class ActiveConfig:
    """A router and its upstreams, which it may share with the runtimes before and after it."""

    def __init__(
        self, shared_upstreams: Mapping[str, SharedUpstream], router: Router, limits: SharedLimits
    ) -> None:
        self.shared_upstreams = shared_upstreams
        self.router = router
        self.limits = limits
        self.planner = Planner(router)
        self._calls = 0

    def activate(self) -> None:
        """Hold the upstreams, and apply the limits, from now on; that cannot fail."""
        for each in self.shared_upstreams.values():
            each.acquire()
        self.limits.apply()

    @property
    def upstreams(self) -> dict[str, Upstream]:
        """Return the upstreams by name."""
        return upstreams_by_name(self.shared_upstreams)

    @property
    def in_use(self) -> bool:
        """Tell whether calls that began on it are still running."""
        calls = self._calls or self.planner.in_flight
        return bool(calls) or any(
            each.has_calls_of_last_user for each in self.shared_upstreams.values()
        )

    async def handle_request(self, request: ClientRequest, response: ClientResponse) -> None:
        """Serve a request on the streaming path."""
        self._calls += 1
        try:
            await handle_request(request, response, self.planner)
        finally:
            self._calls -= 1

    def flush_mirror_logs(self) -> None:
        """Log how many mirrored requests have failed, where that is due; call it once a second."""
        for mirror in self._mirrors():
            mirror.stats.flush_if_due()

    def _mirrors(self) -> Iterator[Mirror]:
        return (route.mirror for route in self.router.routes if route.mirror is not None)

    async def close(self) -> None:
        """Close all that no other configuration uses, once no call is running."""
        self.planner.close()
        for mirror in self._mirrors():
            await mirror.close()
        await self.router.readiness.close()
        for each in self.shared_upstreams.values():
            await each.release()

    async def close_when_idle(self) -> None:
        """Close all that no other configuration uses, when the calls have ended; none begins."""
        try:
            # Polled: nothing signals the end of the last call.
            while self.in_use:  # noqa: ASYNC110
                await asyncio.sleep(_RETIRED_POLL)
        finally:
            await self.close()


Closable = OffloadThreads | LogWriter | TraceExporter


class Parts(NamedTuple):
    """What is made from one version of the settings, and replaced by a reload."""

    resources: LoadedResources
    active_config: ActiveConfig
    offload: OffloadThreads | None
    log_writer: LogWriter | None
    tracing: Tracing | None
    observers: tuple[CallObserver, ...]
    watch: asyncio.Task[None]

    @property
    def closable(self) -> dict[str, Closable | None]:
        """Return those that a reload may take over, by what the log calls them."""
        return {
            "the threads for large tensors": self.offload,
            "the access log": self.log_writer,
            "the export of traces": self.tracing and self.tracing.exporter,
        }

    @property
    def sampler(self) -> TraceSampler | None:
        """Return what decides which calls are traced."""
        return self.tracing and self.tracing.sampler

    @property
    def idle_timeouts(self) -> IdleTimeouts:
        """Return how long connections of clients may be idle."""
        limits = self.resources.settings.limits
        return IdleTimeouts(
            limits.request_header_timeout, limits.keep_alive_timeout, limits.idle_timeout
        )

    async def close(self, kept: Parts | None = None) -> None:
        """Close what is not ``kept``; what fails is logged, so that the rest is closed too."""
        self.watch.cancel()
        kept_parts = {} if kept is None else kept.closable
        for what, part in self.closable.items():
            with logged(what):
                await _close(part, kept_parts.get(what))


class Gateway:
    """Serves the calls of clients while its context is open; leaving the context drains it.

    It does not listen, but gets connections with ``take``, and calls ``on_closed`` for each that
    closes: who starts it accepts them, be it the supervisor of several workers or the process
    itself. ``slot`` is the number of the worker, from 0, in the memory that all share.
    """

    def __init__(
        self,
        resources: LoadedResources,
        shared: SharedMemory,
        slot: int,
        on_closed: Callable[[], None],
    ) -> None:
        self._loaded = resources
        self._on_closed = on_closed
        self._uncounted_connections = 0
        self._drained: set[tuple[str, str]] | None = None
        """The endpoints that operators have drained; None before they are read again."""
        self.shared = shared
        self._slot = slot
        shared.worker_pids[slot][0] = os.getpid()
        shared.heartbeats[slot][0] = int(time.monotonic() * 1000)
        writer = shared.metric_store.writer(slot)
        self.call_metrics = CallMetrics(shared.metric_store, writer)
        self.journal = shared.journal(slot)
        """Where this process records its events."""
        self._metrics = GatewayMetrics(writer, self.call_metrics.observe_mirrored)
        self._recent_calls = shared.recent_calls.writer(slot)
        self._ejection_sync = None
        if shared.control is not None:
            self._ejection_sync = EjectionSync(shared.ejections, slot, self._pools)
        self._status_publisher = StatusPublisher(
            shared.statuses, slot, self.status, self._metrics, self._tick, self._each_second
        )
        self._worker_watch = WorkerWatch(shared.worker_pids, shared.heartbeats, slot)
        looks, leads = RecentLooks(shared.metric_store), self._worker_watch.leads
        self._endpoint_watch = EndpointWatch(looks, shared.waiting.read, self._pools, leads)
        self._captured = CapturedCalls(self._capturing_listener, self._handle_request)
        self._background = AsyncExitStack()
        self._retired: set[asyncio.Task[None]] = set()
        """Each closes a configuration that a reload has replaced, when its calls have ended."""
        self.dropped = 0
        """Calls that were cut at the drain timeout."""
        self.draining = False
        """It is stopping, and finishes the calls in progress."""

    @property
    def settings(self) -> Settings:
        """Return the settings in use."""
        return self.parts.resources.settings

    @property
    def active_config(self) -> ActiveConfig:
        """Return the router and the upstreams in use."""
        return self.parts.active_config

    async def __aenter__(self) -> Self:
        limits = build_shared_limits(self._loaded.settings, self._metrics)
        async with AsyncExitStack() as undo:
            parts = await self._make_parts(self._loaded, limits, None, undo)
            undo.pop_all()
        self.listener = HttpListener(
            self._handle_request, parts.observers, self._note_closed, limits.memory_budget.buffers
        )
        self._use(parts)
        background = (self._ejection_sync, self._endpoint_watch, self._status_publisher)
        for each in filter(None, background):
            await self._background.enter_async_context(each)
        if self.shared.control is not None:
            server = ControlServer(self.shared.control, self._slot, self.reply)
            self._background.enter_context(server)
        return self

    def take(self, connection: socket.socket) -> None:
        """Serve a connection that was accepted elsewhere; this owns it from now on."""
        self.listener.adopt(connection)

    def make_room(self) -> bool:
        """Close idle connections of clients, as descriptors have run out; see HttpListener."""
        return self.listener.make_room()

    def reopen_logs(self) -> None:
        """Open the file of the access log anew, as after a rotation."""
        if self.parts.log_writer is not None:
            self.parts.log_writer.reopen()

    def begin_draining(self) -> None:
        """Be not ready from now on; leaving the context drains."""
        self.draining = self.active_config.router.readiness.draining = True

    async def prepare(self, settings: Settings) -> PreparedReload:
        """Make all that other settings need, but for the number of workers.

        Running calls end as they began. Only one reload is prepared at a time. Whatever this
        raises, nothing has changed: UnusableSettingsError for settings that cannot be used, and
        RuntimeError or OSError where the system has no room for a part.
        """
        before = self.parts
        resources = await asyncio.to_thread(load_resources, settings, before.resources)
        last = before.active_config.limits
        limits = build_shared_limits(resources.settings, self._metrics, last)
        async with AsyncExitStack() as undo:
            parts = await self._make_parts(resources, limits, before, undo)
            return PreparedReload(partial(self._swap, parts), undo.pop_all().aclose)

    async def _make_parts(
        self,
        resources: LoadedResources,
        limits: SharedLimits,
        before: Parts | None,
        undo: AsyncExitStack,
    ) -> Parts:
        """Make all that the settings ask for and that was not there; ``undo`` closes it again."""
        settings = resources.settings
        offload = self._offload_for(settings, before and before.offload)
        upstreams = build_upstreams(
            resources.upstream_specs,
            before.active_config.shared_upstreams if before else {},
            self._metrics,
            limits.memory_budget.buffers,
            self._ejection_sync,
            self.journal,
        )
        undo.push_async_callback(_close_unused, upstreams)
        await asyncio.gather(*(each.start() for each in upstreams.values()))
        router = await asyncio.to_thread(
            build_routes,
            settings,
            upstreams_by_name(upstreams),
            limits,
            offload,
            resources.api_keys.groups,
            resources.forwarding,
            self._metrics,
        )
        writer = self._log_writer(settings, before and before.log_writer)
        undo.push_async_callback(_close, writer, before and before.log_writer)
        tracing = build_tracing(settings, self._metrics, before and before.tracing)
        if tracing is not None:
            last = before and before.tracing and before.tracing.exporter
            undo.push_async_callback(_close, tracing.exporter, last)
        # The supervisor records what concerns all workers.
        journal = self.journal if self.shared.control is None else None
        following = resources.follow(lambda: self.listener.clear_plans(), journal)
        watch = asyncio.create_task(following)
        undo.callback(watch.cancel)
        _drain(upstreams_by_name(upstreams), self.shared.drained.read())
        observers = self._make_observers(settings, writer, tracing)
        config = ActiveConfig(upstreams, router, limits)
        return Parts(resources, config, offload, writer, tracing, observers, watch)

    def _use(self, parts: Parts) -> None:
        """Use parts from now on, by assignments that cannot fail."""
        self.parts = parts
        parts.active_config.activate()
        self._drained = None  # operators may have drained more meanwhile
        self.listener.reconfigure(
            parts.active_config.planner,
            parts.observers,
            parts.resources.tls,
            parts.idle_timeouts,
            parts.resources.forwarding,
            parts.sampler,
        )

    def _swap(self, parts: Parts) -> CloseReplaced:
        replaced = self.parts
        self._use(parts)
        replaced.active_config.router.readiness.replaced = True
        task = asyncio.create_task(replaced.active_config.close_when_idle())
        self._retired.add(task)
        task.add_done_callback(self._retired.discard)
        return partial(replaced.close, parts)

    async def __aexit__(self, *_: object) -> None:
        self.begin_draining()
        await self._drain()
        await self._background.aclose()
        FAILURE_LOG.flush()
        REFUSAL_LOG.flush()
        for task in self._retired:
            task.cancel()
        await asyncio.gather(*self._retired, return_exceptions=True)
        await self.active_config.close()
        await self.parts.close()

    async def _drain(self) -> None:
        """Wait for the calls in progress, and cut those that take too long."""
        limits = self.settings.limits
        self.dropped = await self.listener.drain(limits.drain_timeout, limits.drain_grace)
        await self._captured.close()

    async def reply(self, question: Question, connection: socket.socket | None) -> str:
        """Reply to who serves operators; this owns the connection that comes with a question."""
        if question == Question.READY:
            return await self.active_config.router.readiness.check()
        if question == Question.PUBLISH:
            await self._status_publisher.publish()
        elif question == Question.CONNECT and connection is not None:
            self._uncounted_connections += 1
            self.listener.adopt(connection)
        elif question == Question.CAPTURE and connection is not None:
            self._captured.serve(connection)
        return ""

    def status(self, with_models: bool = True) -> dict[str, Any]:
        """Return the status of this process, for ``encode_status``; it counts the CPU time too."""
        self._metrics.count_cpu_time()
        listener, config = self.listener, self.active_config
        return {
            "pid": os.getpid(),
            "time": time.time(),
            "draining": self.draining,
            "settings": self.shared.revision(),
            "connections": listener.connections,
            "tls_handshakes": listener.tls_handshakes,
            "requests_in_progress": listener.requests,
            "bodies_in_transit": listener.buffers.streams,
            "tasks": len(asyncio.all_tasks()),
            "buffered_bytes": config.limits.memory_budget.total,
            "event_loop_lag": self._status_publisher.event_loop.describe(),
            "concurrency": describe_concurrency(config.limits.concurrency_limit),
            "upstreams": {
                name: describe_upstream(each, with_models)
                for name, each in config.upstreams.items()
            },
            "exemplars": self.call_metrics.exemplars(),
        }

    def _note_closed(self) -> None:
        """Count a closed connection, unless it came from operators: nobody counted it as open."""
        if self._uncounted_connections:
            self._uncounted_connections -= 1
        else:
            self._on_closed()

    def _tick(self) -> None:
        self.shared.heartbeats[self._slot][0] = int(time.monotonic() * 1000)
        drained = self.shared.drained.read()
        if self._drained != drained:
            _drain(self.active_config.upstreams, drained)
            self._drained = drained
        self.shared.calls_in_progress[self._slot][0] = self.listener.requests

    def _each_second(self) -> None:
        FAILURE_LOG.flush_if_due()
        REFUSAL_LOG.flush_if_due()
        self.active_config.flush_mirror_logs()
        self._worker_watch.look(self._worker_watch.leads())
        self._recent_calls.flush()
        now, waiting = time.monotonic(), self.listener.find_waiting(_NOTED_WAIT)
        sent = {key: now - seconds for key, seconds in waiting.items()}
        self.shared.waiting.publish(self._slot, now, sent)

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

    def _log_writer(self, settings: Settings, current: LogWriter | None) -> LogWriter | None:
        """Return what writes the access log: the current one if it writes to the right place."""
        log = settings.log.access
        if log is None:
            return None
        if current is not None and current.path == log.path:
            return current
        dropped = self._metrics.dropped_log_lines
        return LogWriter(log.path, lambda lines: dropped.add(float(lines)))

    def _offload_for(
        self, settings: Settings, current: OffloadThreads | None
    ) -> OffloadThreads | None:
        """Return the threads of the settings: the current ones if that is their number."""
        count = offload_threads(settings)
        if not count:
            return None
        if current is not None and current.count == count:
            return current
        metrics = OffloadMetrics(self._metrics.writer)

        def on_job(offloaded: bool) -> None:
            (metrics.offloaded if offloaded else metrics.local).add(1.0)

        return OffloadThreads(count, on_job)

    def _pools(self) -> dict[str, Pool]:
        return {name: each.pool for name, each in self.active_config.upstreams.items()}

    def _capturing_listener(
        self, handler: RequestHandler, observer: CallObserver, on_closed: Callable[[], None]
    ) -> HttpListener:
        """Return a listener for captured calls, with the settings in use."""
        parts = self.parts
        observers = (*parts.observers, observer)
        listener = HttpListener(handler, observers, on_closed, self.listener.buffers)
        forwarding = parts.resources.forwarding
        listener.reconfigure(None, observers, None, parts.idle_timeouts, forwarding, parts.sampler)
        return listener

    async def _handle_request(self, request: ClientRequest, response: ClientResponse) -> None:
        await self.parts.active_config.handle_request(request, response)


def _drain(upstreams: Mapping[str, Upstream], drained: Iterable[tuple[str, str]]) -> None:
    """Apply what operators have drained or restored."""
    urls: defaultdict[str, set[str]] = defaultdict(set)
    for upstream, url in drained:
        urls[upstream].add(url)
    for name, each in upstreams.items():
        each.pool.set_drained(urls[name])


def _access_log(settings: Settings, writer: LogWriter) -> AccessLog:
    log = settings.log.access
    assert log is not None
    formats: dict[str, LineFormat] = {"text": write_text, "json": write_json}
    line_format = formats.get(log.format) or TemplateFormat(log.format)
    return AccessLog(writer, line_format, log.sample / 100, log.slow)


async def _close_unused(upstreams: Mapping[str, SharedUpstream]) -> None:
    for each in upstreams.values():
        await each.close_if_unused()


async def _close(part: Closable | None, kept: Closable | None) -> None:
    """Close a part unless it is kept, within a bounded time: a log and traces are written first.

    It waits for a thread of its own, if possible without blocking the event loop.
    """
    if part is None or part is kept:
        return
    if isinstance(part, OffloadThreads):
        part.close()
        return
    try:
        await asyncio.to_thread(part.close)
    except RuntimeError:  # no thread can be started; closing twice does no harm
        part.close()


@contextmanager
def logged(what: str) -> Iterator[None]:
    """Log an error inside, instead of raising it."""
    try:
        yield
    except Exception:
        _log.exception("%s of the previous settings could not be closed", what)
