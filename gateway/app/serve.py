"""Serves by settings, in this process or with workers, until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

import uvloop

from gateway import __version__
from gateway.app.journal.journal import WORKER_ENDED, WORKER_RESTARTED
from gateway.app.malloc_trim import MallocTrim
from gateway.app.multi_worker_reloader import SupervisorReloader, WorkerReloader
from gateway.app.reload.revision import Revision, log_addresses
from gateway.app.reload.source import SettingsSource
from gateway.app.standalone import SingleProcessReloader, StandaloneGateway
from gateway.build_info import describe_build
from gateway.settings.schema import Settings
from gateway.system.memory import tune_garbage_collector
from gateway.workers.ipc import ToWorker, WorkerChannel
from gateway.workers.signals import IGNORED_SIGNALS, STOP_SIGNALS, log_ignored
from gateway.workers.supervisor import Supervisor
from gateway.workers.worker_pool import WorkerProcess

_T = TypeVar("_T")

_log = logging.getLogger("tensorgate")


def serve(workers: int, settings: Settings, source: SettingsSource) -> None:
    """Serve until SIGTERM or Ctrl-C, and finish the calls in progress.

    Raises ListenError, UpstreamTlsError, ApiKeysError and NoWorkerError.
    """
    if workers == 1:
        run(_serve(settings, source))
    else:
        _serve_with_workers(workers, settings, source)


def run(main: Coroutine[None, None, _T]) -> _T:
    """Run a coroutine in an event loop of uvloop, and return what it returns."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def handle_signals(callback: Callable[[], None], *numbers: int) -> None:
    """Have the event loop call ``callback`` for some signals, and log those that are ignored."""
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, callback)
    for number in IGNORED_SIGNALS:
        loop.add_signal_handler(number, log_ignored, number)


def _set_log_level(settings: Settings) -> None:
    logging.getLogger().setLevel(settings.log.level.upper())


async def _serve(settings: Settings, source: SettingsSource) -> None:
    stop = asyncio.Event()
    # Until it serves, Ctrl-C is not for it to handle.
    handle_signals(stop.set, signal.SIGTERM)
    revision = Revision(time.time(), str(source.file))
    async with StandaloneGateway(settings, revision) as gateway:
        async with SingleProcessReloader(gateway, source, _set_log_level) as reloader, MallocTrim():
            handle_signals(stop.set, signal.SIGINT)
            handle_signals(reloader.request_reload, signal.SIGHUP)
            _log_started(gateway.addresses)
            tune_garbage_collector()
            await stop.wait()
        _log_stopping(gateway.settings)
    _log_stopped(gateway.dropped)


def _serve_with_workers(workers: int, settings: Settings, source: SettingsSource) -> None:
    """Serve with several worker processes, which this one supervises."""
    reloader = SupervisorReloader(settings, source, _set_log_level, workers)
    tune_garbage_collector()
    supervisor = Supervisor(
        reloader.sockets,
        workers,
        lambda channel: run(_serve_as_worker(channel, reloader)),
        lambda channel: run(_serve_as_admin(channel, reloader)),
        settings.limits.drain_timeout,
        _LogEvents(reloader),
        reloader,
    )
    _log_stopped(supervisor.run())


async def _serve_as_worker(channel: WorkerChannel, supervisor: SupervisorReloader) -> None:
    """Serve the connections that the supervisor accepts."""
    handle_signals(channel.send_leaving, *STOP_SIGNALS)
    gateway = supervisor.gateway(channel.count_closed, channel.slot)
    reloader = WorkerReloader(gateway, _set_log_level, channel.send_reload_done)
    async with gateway, reloader, MallocTrim():
        tune_garbage_collector()
        channel.send_ready()
        await channel.receive(
            gateway.take, reloader.enqueue, gateway.begin_draining, gateway.make_room
        )
    channel.send_dropped(gateway.dropped)


async def _serve_as_admin(channel: WorkerChannel, supervisor: SupervisorReloader) -> None:
    """Serve the admin address for the workers."""
    handle_signals(channel.send_leaving, *STOP_SIGNALS)
    admin = supervisor.admin_process()
    reloader = WorkerReloader(admin, _set_log_level, channel.send_reload_done)
    async with admin, reloader, MallocTrim():
        tune_garbage_collector()
        channel.send_ready()
        await channel.receive(admin.take, reloader.enqueue, admin.begin_draining)


class _LogEvents:
    """Logs the supervisor's events like those of a single process."""

    def __init__(self, reloader: SupervisorReloader) -> None:
        self._reloader = reloader
        self._has_started = False

    def on_started(self, workers: Sequence[int]) -> None:
        self._has_started = True
        _log.info("%d workers: %s", len(workers), ", ".join(map(str, workers)))
        _log_started(self._reloader.addresses)
        self._reloader.journal.record_start(len(workers))

    def on_stopping(self) -> None:
        if self._has_started:
            _log_stopping(self._reloader.settings)
            self._reloader.journal.record_drain(self._reloader.settings.limits.drain_timeout)

    def on_worker_ended(self, process: WorkerProcess, why: str) -> None:
        record = self._reloader.journal.record
        record(WORKER_ENDED, who="", why=why, subject=process.name, process=process.pid)

    def on_worker_restarted(self, process: WorkerProcess) -> None:
        if process.serves == ToWorker.CLIENT:
            self._reloader.worker_restarts.add(1.0)
        why = "another one had ended"
        record = self._reloader.journal.record
        record(
            WORKER_RESTARTED, who="supervisor", why=why, subject=process.name, process=process.pid
        )


def _log_started(addresses: Sequence[str]) -> None:
    _log.info("Tensorgate %s, %s", __version__, describe_build())
    log_addresses(addresses)


def _log_stopping(settings: Settings) -> None:
    _log.info("stopping: calls in progress have at most %g s", settings.limits.drain_timeout)


def _log_stopped(dropped: int) -> None:
    if dropped:
        _log.warning(
            "%d calls did not finish in time and were aborted (limits.drain_timeout)", dropped
        )
    _log.info("stopped")
