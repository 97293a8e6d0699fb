"""A gateway of several worker processes, which this one supervises, and an admin process.

Reloads have two phases, which are in ``workers/reload_broadcast.py``: all processes prepare new
settings, then all use them, or none.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Self

from gateway.app.admin_source import DRAIN_GRACE, AdminSource
from gateway.app.build import listening
from gateway.app.build.listening import BoundAddress
from gateway.app.gateway import Gateway
from gateway.app.journal import WORKER_ENDED, WORKER_RESTARTED
from gateway.app.loaded_resources import LoadedResources, load_resources
from gateway.app.process import (
    BackgroundTask,
    MallocTrim,
    handle_signals,
    log_started,
    log_stopped,
    log_stopping,
    run,
    set_log_level,
)
from gateway.app.reload import (
    CloseReplaced,
    PreparedReload,
    ReloadLog,
    SettingsSource,
    describe_changes,
    failure_reason,
    failure_text,
)
from gateway.app.shared_memory import SharedMemory
from gateway.observe import families
from gateway.settings.schema import Settings
from gateway.system.memory import tune_garbage_collector
from gateway.workers.control import ControlClient
from gateway.workers.ipc import (
    ConnectionKind,
    FromWorker,
    ListeningSockets,
    ToWorker,
    WorkerChannel,
)
from gateway.workers.reload_broadcast import PREPARE_TIMEOUT
from gateway.workers.signals import STOP_SIGNALS
from gateway.workers.supervisor import Supervisor
from gateway.workers.worker_pool import SupervisedGateway, WorkerProcess

_log = logging.getLogger("tensorgate")


def serve_with_workers(workers: int, settings: Settings, source: SettingsSource) -> None:
    """Serve until SIGTERM or Ctrl-C, and finish the calls in progress.

    Raises UnusableSettingsError and NoWorkerError.
    """
    gateway = GatewayWithWorkers(settings, source, workers)
    tune_garbage_collector()
    log_stopped(Supervisor(workers, gateway).run())


class _Update(NamedTuple):
    """What the supervisor has made for new settings; ``read`` are those of the file."""

    read: Settings
    requested: bool
    resources: LoadedResources
    bound: tuple[BoundAddress, ...]
    changes: str
    settings_before: Settings
    addresses_before: list[str]


class GatewayWithWorkers(SupervisedGateway):
    """What the supervisor serves: it reads the settings and opens the sockets for the workers.

    Raises UnusableSettingsError.
    """

    def __init__(self, settings: Settings, source: SettingsSource, workers: int) -> None:
        self._resources = load_resources(settings)
        self._bound = listening.listen(settings.listen, settings.admin.listen)
        # Made before the first fork, as all workers share it. It outlives them, and each reload.
        self.shared = SharedMemory.for_workers(workers)
        writer = self.shared.metric_store.writer(workers)
        self._worker_restarts = writer.counter(families.WORKER_RESTARTS)
        self._reload_log = ReloadLog(source, self.shared, writer)
        self._journal = self.shared.owner_journal
        self._has_started = False
        self._update: _Update
        """What is made for new settings, until all processes use them or none."""

    @property
    def settings(self) -> Settings:
        """Return the settings in use."""
        return self._resources.settings

    @property
    def drain_timeout(self) -> float:
        """Return the seconds that calls in progress have when the gateway stops."""
        return self.settings.limits.drain_timeout

    @property
    def sockets(self) -> ListeningSockets:
        """Return the listening sockets, with who connects there."""
        return _sockets(self._bound)

    @property
    def addresses(self) -> list[str]:
        """Return where clients and operators connect."""
        return listening.describe(self._bound, self.settings)

    def worker(self, on_closed: Callable[[], None], slot: int = 0) -> Gateway:
        """Build the gateway of a worker that starts now; see Gateway for the parameters."""
        # It gets what is loaded already: the files may have become unusable since then.
        return Gateway(self._resources, self.shared, slot, on_closed)

    def run(self, channel: WorkerChannel, serves: ConnectionKind) -> None:
        """Run in a worker or the admin process until it is to exit."""
        run(self._serve(channel, serves))

    async def _serve(self, channel: WorkerChannel, serves: ConnectionKind) -> None:
        """Serve the connections that the supervisor accepts: those of clients, or of operators."""
        # The first thing to do, as the rest takes a while: the supervisor ends this process.
        handle_signals(partial(channel.send, FromWorker.LEAVING), *STOP_SIGNALS)
        gateway: Gateway | AdminProcess
        if serves == ToWorker.CLIENT:
            gateway = self.worker(channel.count_closed, channel.slot)
        else:
            gateway = AdminProcess(self._resources, self.shared)
        done = partial(channel.send, FromWorker.RELOAD_DONE)
        reloader = WorkerReloader(gateway, self.shared, done)
        async with gateway, reloader, MallocTrim():
            tune_garbage_collector()
            channel.send(FromWorker.READY)
            await channel.receive(gateway, reloader.steps.put_nowait)
        channel.send(FromWorker.DROPPED, str(gateway.dropped))

    def poll(self, requested: bool) -> ListeningSockets | None:
        """Read the settings if that is requested, or if their files have changed."""
        # Workers that start later get the files that the others reload by themselves.
        self._resources.refresh(self._journal)
        if not requested and not self._reload_log.is_due(self.settings):
            return None
        try:
            self._update = self._prepare(requested)
            return _sockets(self._update.bound)
        except Exception as error:  # whatever it is, it must not end the supervisor
            reason = failure_text(error, self._reload_log.source.file)
            self._reload_log.record_failure(reason, requested)
            return None

    def _prepare(self, requested: bool) -> _Update:
        """Read the settings, load what they name and open their addresses, or raise."""
        read = self._reload_log.source.read()
        resources = load_resources(read, self._resources)
        if not self.shared.new_settings.publish(0, pickle.dumps(resources.settings)):
            raise OSError("they are too large")
        bound = listening.listen(read.listen, read.admin.listen, self._bound)
        changes = describe_changes(resources, self._resources)
        return _Update(read, requested, resources, bound, changes, self.settings, self.addresses)

    def commit(self) -> None:
        """Use what is prepared, by assignments: each process is ready."""
        self._resources, self._bound = self._update.resources, self._update.bound
        self._reload_log.record_reload()

    def abort(self, errors: Mapping[str, str]) -> None:
        """Close the new addresses, and log which processes have refused the settings, and why."""
        listening.close(listening.difference(self._update.bound, self._bound))
        processes = defaultdict(list)
        for name, error in errors.items():
            processes[error].append(name)
        reasons = [f"{', '.join(names)}: {error}" for error, names in processes.items()]
        reason = f"{self._reload_log.source.file}: {'; '.join(reasons)}"
        self._reload_log.record_failure(reason, self._update.requested)

    def on_applied(self, late: Sequence[str]) -> None:
        """Log what has changed, and which processes go on with the previous settings for now."""
        update, addresses = self._update, (self.addresses, self._update.addresses_before)
        self._reload_log.log_reload(
            update.changes, update.read, update.settings_before, addresses, update.requested
        )
        for name in late:
            _log.warning("%s does not respond: it uses the new settings once it does", name)

    def on_started(self, workers: Sequence[int]) -> None:
        """Log that workers with these process ids serve connections from now on."""
        self._has_started = True
        _log.info("%d workers: %s", len(workers), ", ".join(map(str, workers)))
        log_started(self.addresses)
        self._journal.record_start(len(workers))

    def on_stopping(self) -> None:
        """Log that no client is accepted any more."""
        if self._has_started:
            log_stopping(self.settings)
            self._journal.record_drain(self.drain_timeout)

    def on_worker_ended(self, process: WorkerProcess, why: str) -> None:
        """Record that a process has ended unexpectedly."""
        name, pid = process.name, process.pid
        self._journal.record(WORKER_ENDED, who="", why=why, subject=name, process=pid)

    def on_worker_restarted(self, process: WorkerProcess) -> None:
        """Record that a process was started in the place of one that had ended unexpectedly."""
        if process.serves == ToWorker.CLIENT:
            self._worker_restarts.add(1.0)
        name, pid, why = process.name, process.pid, "another one had ended"
        self._journal.record(WORKER_RESTARTED, who="supervisor", why=why, subject=name, process=pid)


def _sockets(bound: Sequence[BoundAddress]) -> ListeningSockets:
    """Return the listening sockets, with who connects there."""
    return {
        sock: ToWorker.ADMIN if each.is_admin else ToWorker.CLIENT
        for each in bound
        for sock in each.sockets
    }


class AdminProcess:
    """Serves operators while its context is open. It has no part in calls."""

    def __init__(self, resources: LoadedResources, shared: SharedMemory) -> None:
        from gateway.admin.application import AdminSite  # imports aiohttp, which takes time

        assert shared.control is not None
        self._control = ControlClient(shared.control)
        self.source = AdminSource(resources, shared, shared.admin_journal, self._control.ask)
        """What operators see."""
        self._site = AdminSite(self.source)
        self.dropped = 0
        """Calls that it cut at its end: it has none."""

    @property
    def settings(self) -> Settings:
        """Return the settings in use."""
        return self.source.settings

    async def __aenter__(self) -> Self:
        self._control.__enter__()
        await self._site.__aenter__()
        self._use(self.source.resources)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watch.cancel()
        await self._site.close(DRAIN_GRACE)
        self._control.__exit__()

    def _use(self, resources: LoadedResources) -> None:
        """Use what settings name, and follow the files of API keys; certificates are of workers."""
        self.source.resources = resources._replace(tls=None)
        self._watch = asyncio.create_task(self.source.resources.follow(lambda: None))

    def take(self, connection: socket.socket) -> None:
        """Serve a connection that was accepted elsewhere; this owns it from now on."""
        self._site.adopt(connection)

    def begin_draining(self) -> None:
        """Be not ready from now on."""
        self.source.draining = True

    def make_room(self) -> bool:
        """Return that no connection was closed: operators keep theirs."""
        return False

    async def prepare(self, settings: Settings) -> PreparedReload:
        """Load what other settings name. Raises UnusableSettingsError."""
        resources = await asyncio.to_thread(load_resources, settings, self.source.resources)
        return PreparedReload(partial(self._swap, resources), AsyncExitStack().aclose)

    def _swap(self, resources: LoadedResources) -> CloseReplaced:
        self._watch.cancel()
        self._use(resources)
        return AsyncExitStack().aclose

    def reopen_logs(self) -> None:
        """Do nothing: it has no log."""


@dataclass(eq=False)
class WorkerReloader(BackgroundTask):
    """Does the ``steps`` of reloads in a worker or the admin process, one after the other.

    It does so while its context is open, and then gives back what is prepared. ``reply`` gets the
    error of each step, or an empty text.
    """

    gateway: Gateway | AdminProcess
    shared: SharedMemory
    reply: Callable[[str], None]
    steps: asyncio.Queue[int] = field(default_factory=asyncio.Queue, init=False)
    _prepared: PreparedReload | None = field(default=None, init=False)

    async def run(self) -> None:
        """Do the steps as they come."""
        try:
            while True:
                await self._handle(await self.steps.get())
        finally:
            await self._give_back()

    async def _handle(self, step: int) -> None:
        if step == ToWorker.COMMIT:
            await self._commit()
            return
        await self._give_back()
        self.gateway.reopen_logs()
        self.reply(await self._prepare() if step == ToWorker.PREPARE else "")

    async def _prepare(self) -> str:
        """Prepare new settings; return why that has failed, or an empty text."""
        # What hangs must not keep the steps that follow from this process.
        limit = asyncio.timeout(PREPARE_TIMEOUT)
        try:
            async with limit:
                document = self.shared.new_settings.read()
                # The supervisor wrote it, from which this process was forked.
                settings: Settings = await asyncio.to_thread(pickle.loads, document)
                self._prepared = await self.gateway.prepare(settings)
        except Exception as failure:  # whatever it is, it must not end the task
            if limit.expired():
                return f"not prepared within {PREPARE_TIMEOUT:g} s"
            return failure_reason(failure)
        return ""

    async def _commit(self) -> None:
        """Use what is prepared; the supervisor asks for that only if all processes are ready.

        If that fails, this process may have a part of it: the supervisor replaces it.
        """
        try:
            assert self._prepared is not None
            prepared, self._prepared = self._prepared, None
            close_replaced = prepared.commit()
        except Exception as failure:  # whatever it is, it must not end the task
            self.reply(failure_reason(failure))
            return
        self.reply("")
        set_log_level(self.gateway.settings)
        await close_replaced()

    async def _give_back(self) -> None:
        """Close what is prepared, if anything is; what fails is logged."""
        if self._prepared is None:
            return
        prepared, self._prepared = self._prepared, None
        try:
            await prepared.abort()
        except Exception:
            _log.exception("a part of settings that are not used could not be closed")
