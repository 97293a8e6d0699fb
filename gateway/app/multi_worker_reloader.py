"""Reloads with several workers: the supervisor reads the settings, and each worker applies them."""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gateway.app.background import BackgroundTask
from gateway.app.build.listen import describe_addresses, listen, listen_addresses
from gateway.app.gateway import Gateway
from gateway.app.loaded_resources import load_resources, log_warnings
from gateway.app.reload.diff import describe_changes, keep_startup_settings
from gateway.app.reload.failure import failure_reason, failure_text
from gateway.app.reload.revision import ReloadLog, Revision, log_addresses
from gateway.app.reload.source import SettingsSource
from gateway.app.shared_memory import SharedMemory
from gateway.app.single_process_reloader import OnApplied, notify_applied
from gateway.observe.gateway_metrics import ReloadMetrics
from gateway.settings.schema import Settings
from gateway.workers.ipc import ConnectionKind, ToWorker
from gateway.workers.reload_broadcast import ConfigSource, ConfigUpdate

if TYPE_CHECKING:
    from gateway.app.admin_process import AdminProcess

_log = logging.getLogger("tensorgate")


@dataclass(frozen=True, slots=True)
class _Reload:
    """What the supervisor sends: settings to apply, or none and why newer ones cannot be used."""

    settings: Settings | None
    revision: Revision


class SupervisorReloader(ConfigSource):
    """Reads the settings and opens the listening sockets for the workers.

    ``on_applied`` gets the settings once they are in use. Raises ListenError, UpstreamTlsError and
    ApiKeysError.
    """

    def __init__(
        self,
        settings: Settings,
        source: SettingsSource,
        on_applied: OnApplied,
        workers: int = 1,
    ) -> None:
        self._source = source
        self._on_settings_applied = on_applied
        self._resources = load_resources(settings)
        log_warnings(settings)
        self._bound = listen(listen_addresses(settings))
        # Made before the first fork, as all workers share it. It outlives them, and each reload.
        self._shared = SharedMemory.for_workers(workers)
        writer = self._shared.metric_store.writer(self._shared.supervisor_segment)
        self._reload_log = ReloadLog(Revision(time.time(), str(source.file)), ReloadMetrics(writer))
        self._log_applied: Callable[[], None] | None = None

    @property
    def settings(self) -> Settings:
        """Return the newest settings that could be used."""
        return self._resources.settings

    @property
    def sockets(self) -> dict[socket.socket, ConnectionKind]:
        """Return the listening sockets, with who connects there."""
        admin = self.settings.admin
        return {
            sock: ToWorker.ADMIN if each.address == admin else ToWorker.CLIENT
            for each in self._bound
            for sock in each.sockets
        }

    @property
    def addresses(self) -> list[str]:
        """Return where clients and operators connect."""
        return describe_addresses(self._bound, self.settings)

    def gateway(self, on_closed: Callable[[], None], slot: int = 0) -> Gateway:
        """Build the gateway of a worker that starts now; see Gateway for the parameters."""
        # It gets what is loaded already: the files may have become unusable since then.
        return Gateway(
            self.settings,
            on_closed,
            self._resources,
            self._reload_log.revision,
            self._shared,
            slot,
        )

    def admin_process(self) -> AdminProcess:
        """Build what the admin process runs."""
        from gateway.app.admin_process import AdminProcess  # imports aiohttp, which takes time

        return AdminProcess(self._resources, self._shared, self._reload_log.revision)

    def poll(self, requested: bool) -> ConfigUpdate | None:
        """Read the settings if that is requested, or if their files have changed."""
        self._refresh_resources()
        if not requested and not self._changed():
            return None
        try:
            reload = _Reload(self._read(), self._reload_log.revision)
        except Exception as error:  # whatever it is, it must not end the supervisor
            self._reload_log.record_failure(failure_text(error, self._source.file), requested)
            reload = _Reload(None, self._reload_log.revision)
        return ConfigUpdate(pickle.dumps(reload), self.sockets, self.settings.limits.drain_timeout)

    def on_applied(self, errors: Mapping[int, str]) -> None:
        """Log what has changed, and which workers could not apply it."""
        if self._log_applied is not None:
            if not errors:
                self._reload_log.count_reload()
            self._log_applied()
            self._log_applied = None
        workers = defaultdict(list)
        for pid, error in errors.items():
            workers[error].append(str(pid))
        for error, pids in workers.items():
            of = "worker" if len(pids) == 1 else "workers"
            _log.error("%s %s: keeping the previous settings: %s", of, ", ".join(pids), error)

    def _refresh_resources(self) -> None:
        """Load the files that workers reload by themselves, for workers that start later."""
        try:
            self._resources.refresh()
        except Exception:
            _log.exception(
                "API keys or certificates could not be reloaded; keeping the previous ones"
            )

    def _changed(self) -> bool:
        failed = self._reload_log.revision.last_failure is not None
        return self.settings.watch and self._source.changed(failed)

    def _read(self) -> Settings:
        """Read the settings and load what they name, or raise and change nothing."""
        before, addresses = self._resources, self.addresses
        read = self._source.read()
        settings = keep_startup_settings(read, before.settings)
        resources = load_resources(settings, before)
        self._bound = listen(listen_addresses(settings), self._bound)
        self._resources = resources
        self._reload_log.record_reload()

        def log_applied() -> None:
            notify_applied(self._on_settings_applied, settings)
            self._reload_log.log_reload(describe_changes(resources, before), read, before.settings)
            log_addresses(self.addresses, addresses)

        self._log_applied = log_applied
        return settings


class Reloadable(Protocol):
    """What new settings are applied to, in a worker or in the admin process."""

    revision: Revision
    reload_metrics: ReloadMetrics

    async def reload(self, settings: Settings) -> str:
        """Apply settings; raises ListenError, UpstreamTlsError and ApiKeysError."""

    def reopen_logs(self) -> None:
        """Open the file of the access log anew."""


class WorkerReloader(BackgroundTask):
    """Applies what the supervisor sends to a worker or the admin process, one after the other.

    It does so while its context is open. ``reply`` gets the error of each reload, or an empty text.
    """

    def __init__(
        self, gateway: Reloadable, on_applied: OnApplied, reply: Callable[[str], None]
    ) -> None:
        self._gateway = gateway
        self._on_applied = on_applied
        self._reply = reply
        self._reloads: asyncio.Queue[bytes] = asyncio.Queue()

    def enqueue(self, reload: bytes) -> None:
        """Apply a reload behind those that came before."""
        self._reloads.put_nowait(reload)

    async def run(self) -> None:
        """Apply the reloads as they come."""
        while True:
            self._reply(await self._apply(await self._reloads.get()))

    async def _apply(self, pickled: bytes) -> str:
        """Apply a reload; return why it failed, or an empty text."""
        gateway = self._gateway
        try:
            # The supervisor wrote it, from which this process was forked.
            reload: _Reload = await asyncio.to_thread(pickle.loads, pickled)
            gateway.reopen_logs()
            if reload.settings is None:
                why, failed_at = reload.revision.last_failure or "", reload.revision.failed_at
                gateway.revision = gateway.revision.after_failure(why, failed_at or time.time())
                return ""
            await gateway.reload(reload.settings)
        except Exception as error:  # whatever it is, it must not end the task
            why = failure_reason(error)
        else:
            gateway.revision = reload.revision
            notify_applied(self._on_applied, reload.settings)
            return ""
        gateway.revision = gateway.revision.after_failure(why, time.time())
        gateway.reload_metrics.failures.add(1.0)
        return why
