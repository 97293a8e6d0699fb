"""Serves with several worker processes, which this one supervises."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gateway.app.journal.journal import WORKER_ENDED, WORKER_RESTARTED
from gateway.app.multi_worker_reloader import SupervisorReloader, WorkerReloader
from gateway.app.process import (
    MallocTrim,
    handle_signals,
    log_started,
    log_stopped,
    log_stopping,
    run,
    set_log_level,
)
from gateway.app.reload.source import SettingsSource
from gateway.settings.schema import Settings
from gateway.system.memory import tune_garbage_collector
from gateway.workers.ipc import ToWorker, WorkerChannel
from gateway.workers.signals import STOP_SIGNALS
from gateway.workers.supervisor import Supervisor
from gateway.workers.worker_pool import WorkerProcess

_log = logging.getLogger("tensorgate")


def serve_with_workers(workers: int, settings: Settings, source: SettingsSource) -> None:
    """Serve until SIGTERM or Ctrl-C, and finish the calls in progress.

    Raises ListenError, UpstreamTlsError, ApiKeysError and NoWorkerError.
    """
    reloader = SupervisorReloader(settings, source, set_log_level, workers)
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
    log_stopped(supervisor.run())


async def _serve_as_worker(channel: WorkerChannel, supervisor: SupervisorReloader) -> None:
    """Serve the connections that the supervisor accepts."""
    handle_signals(channel.send_leaving, *STOP_SIGNALS)
    gateway = supervisor.gateway(channel.count_closed, channel.slot)
    reloader = WorkerReloader(gateway, set_log_level, channel.send_reload_done)
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
    reloader = WorkerReloader(admin, set_log_level, channel.send_reload_done)
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
        log_started(self._reloader.addresses)
        self._reloader.journal.record_start(len(workers))

    def on_stopping(self) -> None:
        if self._has_started:
            log_stopping(self._reloader.settings)
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
