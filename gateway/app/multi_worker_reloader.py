"""Reloads with several workers: all processes prepare new settings, then all use them, or none.

``workers/reload_broadcast.py`` has the two phases.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gateway.app.background import BackgroundTask
from gateway.app.build.listen import (
    BoundAddress,
    close,
    describe_addresses,
    difference,
    listen,
    listen_addresses,
)
from gateway.app.gateway import Gateway
from gateway.app.loaded_resources import LoadedResources, load_resources
from gateway.app.reload.diff import describe_changes, keep_startup_settings
from gateway.app.reload.failure import failure_reason, failure_text
from gateway.app.reload.prepared import OnApplied, PreparedReload, notify_applied
from gateway.app.reload.revision import ReloadLog, Revision, log_addresses
from gateway.app.reload.source import SettingsSource
from gateway.app.shared_memory import SharedMemory
from gateway.observe.gateway_metrics import WORKER_RESTARTS, ReloadMetrics
from gateway.settings.schema import Settings
from gateway.workers.ipc import ConnectionKind, ReloadMessage, ToWorker
from gateway.workers.reload_broadcast import (
    PREPARE_TIMEOUT,
    ConfigSource,
    ConfigUpdate,
    RefusedUpdate,
)

if TYPE_CHECKING:
    from gateway.app.admin_process import AdminProcess

_log = logging.getLogger("tensorgate")


@dataclass(frozen=True, slots=True)
class _Reload:
    """What processes prepare: the revision is that of the settings once they are in use."""

    settings: Settings
    revision: Revision


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What the supervisor has made for new settings; ``read`` are those of the file."""

    read: Settings
    resources: LoadedResources
    bound: tuple[BoundAddress, ...]
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
        self._bound = listen(listen_addresses(settings))
        # Made before the first fork, as all workers share it. It outlives them, and each reload.
        self._shared = SharedMemory.for_workers(workers)
        writer = self._shared.metric_store.writer(self._shared.supervisor_segment)
        self.journal = self._shared.supervisor_journal
        self.worker_restarts = writer.counter(WORKER_RESTARTS)
        revision = Revision(time.time(), str(source.file))
        self._reload_log = ReloadLog(revision, ReloadMetrics(writer), self.journal)
        self._is_requested = False
        self._prepared: _Prepared | None = None
        """What is made for new settings, until all processes use them or none."""
        self._replaced: _Prepared | None = None
        """What new settings have replaced, until that is logged."""

    @property
    def settings(self) -> Settings:
        """Return the settings in use."""
        return self._resources.settings

    @property
    def sockets(self) -> dict[socket.socket, ConnectionKind]:
        """Return the listening sockets, with who connects there."""
        return _sockets(self._bound, self.settings)

    @property
    def addresses(self) -> list[str]:
        """Return where clients and operators connect."""
        return describe_addresses(self._bound, self.settings)

    def gateway(self, on_closed: Callable[[], None], slot: int = 0) -> Gateway:
        """Build the gateway of a worker that starts now; see Gateway for the parameters."""
        # It gets what is loaded already: the files may have become unusable since then.
        revision = self._reload_log.revision
        return Gateway(self._resources, self._shared, slot, revision, on_closed)

    def admin_process(self) -> AdminProcess:
        """Build what the admin process runs."""
        from gateway.app.admin_process import AdminProcess  # imports aiohttp, which takes time

        return AdminProcess(self._resources, self._shared, self._reload_log.revision)

    def poll(self, requested: bool) -> ConfigUpdate | RefusedUpdate | None:
        """Read the settings if that is requested, or if their files have changed."""
        self._refresh_resources()
        if not requested and not self._changed():
            return None
        self._is_requested = requested
        try:
            return self._prepare()
        except Exception as error:  # whatever it is, it must not end the supervisor
            return self._refuse(failure_text(error, self._source.file))

    def commit(self) -> None:
        """Use what is prepared, by assignments: each process is ready."""
        assert self._prepared is not None
        before = self._reload_log.revision
        self._replaced = _Prepared(self.settings, self._resources, self._bound, before)
        self._resources, self._bound = self._prepared.resources, self._prepared.bound
        self._reload_log.record_reload(self._prepared.revision)

    def abort(self, errors: Mapping[str, str]) -> RefusedUpdate:
        """Close the new addresses, and log which processes have refused the settings, and why."""
        assert self._prepared is not None
        close(difference(self._prepared.bound, self._bound))
        self._prepared = None
        processes = defaultdict(list)
        for name, error in errors.items():
            processes[error].append(name)
        reasons = [f"{', '.join(names)}: {error}" for error, names in processes.items()]
        return self._refuse(f"{self._source.file}: {'; '.join(reasons)}")

    def on_applied(self, late: Sequence[str]) -> None:
        """Log what has changed, and which processes go on with the previous settings for now."""
        assert self._prepared is not None
        assert self._replaced is not None
        now, before = self._prepared, self._replaced
        self._prepared = self._replaced = None
        notify_applied(self._on_settings_applied, self.settings)
        changes = describe_changes(now.resources, before.resources)
        self._reload_log.log_reload(
            changes, now.read, before.resources.settings, self._is_requested
        )
        self._source.log_warnings(before.resources.settings)
        log_addresses(self.addresses, describe_addresses(before.bound, before.resources.settings))
        for name in late:
            _log.warning("%s does not respond: it uses the new settings once it does", name)

    def _refuse(self, reason: str) -> RefusedUpdate:
        """Record and log why the settings are not used; return the same for the processes."""
        self._reload_log.record_failure(reason, self._is_requested)
        return RefusedUpdate(pickle.dumps(self._reload_log.revision))

    def _refresh_resources(self) -> None:
        """Load the files that workers reload by themselves, for workers that start later."""
        try:
            self._resources.refresh(self.journal)
        except Exception:
            _log.exception(
                "API keys or certificates could not be reloaded; keeping the previous ones"
            )

    def _changed(self) -> bool:
        failed = self._reload_log.revision.last_failure is not None
        return self.settings.watch and self._source.changed(failed)

    def _prepare(self) -> ConfigUpdate:
        """Read the settings, load what they name and open their addresses, or raise."""
        read = self._source.read()
        settings = keep_startup_settings(read, self.settings)
        resources = load_resources(settings, self._resources)
        bound = listen(listen_addresses(settings), self._bound)
        revision = self._reload_log.revision.after_reload(time.time())
        update = ConfigUpdate(
            pickle.dumps(_Reload(settings, revision)),
            _sockets(bound, settings),
            settings.limits.drain_timeout,
        )
        self._prepared = _Prepared(read, resources, bound, revision)
        return update


def _sockets(
    bound: Iterable[BoundAddress], settings: Settings
) -> dict[socket.socket, ConnectionKind]:
    """Return the listening sockets, with who connects there."""
    return {
        sock: ToWorker.ADMIN if each.address == settings.admin.listen else ToWorker.CLIENT
        for each in bound
        for sock in each.sockets
    }


class Reloadable(Protocol):
    """What new settings are applied to, in a worker or in the admin process."""

    revision: Revision

    async def prepare(self, settings: Settings) -> PreparedReload:
        """Make all that other settings need, or raise and keep nothing of it."""

    def reopen_logs(self) -> None:
        """Open the file of the access log anew."""


class WorkerReloader(BackgroundTask):
    """Does the steps of reloads in a worker or the admin process, one after the other.

    It does so while its context is open, and then gives back what is prepared. ``reply`` gets the
    error of each step, or an empty text.
    """

    def __init__(
        self, gateway: Reloadable, on_applied: OnApplied, reply: Callable[[str], None]
    ) -> None:
        self._gateway = gateway
        self._on_applied = on_applied
        self._reply = reply
        self._messages: asyncio.Queue[ReloadMessage] = asyncio.Queue()
        self._prepared: tuple[PreparedReload, _Reload] | None = None

    def enqueue(self, message: ReloadMessage) -> None:
        """Do a step of a reload behind those that came before."""
        self._messages.put_nowait(message)

    async def run(self) -> None:
        """Do the steps as they come."""
        try:
            while True:
                await self._handle(await self._messages.get())
        finally:
            await self._give_back()

    async def _handle(self, message: ReloadMessage) -> None:
        if message.step == ToWorker.COMMIT:
            await self._commit()
            return
        await self._give_back()
        self._gateway.reopen_logs()
        handle = self._prepare if message.step == ToWorker.PREPARE else self._note_refusal
        error = message.error
        if not error:
            try:
                # What hangs must not keep the steps that follow from this process.
                async with asyncio.timeout(PREPARE_TIMEOUT) as limit:
                    await handle(message.document)
            except TimeoutError as failure:
                if not limit.expired():
                    error = failure_reason(failure)
                else:
                    error = f"not prepared within {PREPARE_TIMEOUT:g} s"
            except Exception as failure:  # whatever it is, it must not end the task
                error = failure_reason(failure)
        self._reply(error)

    async def _prepare(self, document: bytes) -> None:
        # The supervisor wrote it, from which this process was forked.
        reload: _Reload = await asyncio.to_thread(pickle.loads, document)
        self._prepared = await self._gateway.prepare(reload.settings), reload

    async def _note_refusal(self, document: bytes) -> None:
        # Not in a thread, as there may be none; the supervisor wrote it, as above.
        self._gateway.revision = pickle.loads(document)  # noqa: S301

    async def _commit(self) -> None:
        """Use what is prepared; the supervisor asks for that only if all processes are ready.

        If that fails, this process may have a part of it: the supervisor replaces it.
        """
        try:
            assert self._prepared is not None
            (prepared, reload), self._prepared = self._prepared, None
            close_replaced = prepared.commit()
        except Exception as failure:  # whatever it is, it must not end the task
            self._reply(failure_reason(failure))
            return
        self._gateway.revision = reload.revision
        self._reply("")
        notify_applied(self._on_applied, reload.settings)
        await close_replaced()

    async def _give_back(self) -> None:
        """Close what is prepared, if anything is; what fails is logged."""
        if self._prepared is None:
            return
        (prepared, _), self._prepared = self._prepared, None
        try:
            await prepared.abort()
        except Exception:
            _log.exception("a part of settings that are not used could not be closed")
