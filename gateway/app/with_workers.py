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
from dataclasses import dataclass
from functools import partial
from typing import Self

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
    keep_workers,
)
from gateway.app.shared_memory import SharedMemory
from gateway.observe import families
from gateway.settings.schema import Settings
from gateway.system.memory import tune_garbage_collector
from gateway.workers.control import ControlClient
from gateway.workers.ipc import FromWorker, ListeningSockets, ToWorker, WorkerChannel
from gateway.workers.reload_broadcast import PREPARE_TIMEOUT
from gateway.workers.signals import STOP_SIGNALS
from gateway.workers.supervisor import SupervisedGateway, Supervisor
from gateway.workers.worker_pool import WorkerProcess

_log = logging.getLogger("tensorgate")


def serve_with_workers(workers: int, settings: Settings, source: SettingsSource) -> None:
    """Serve until SIGTERM or Ctrl-C, and finish the calls in progress.

    Raises UnusableSettingsError and NoWorkerError.
    """
    gateway = GatewayWithWorkers(settings, source, workers)
    tune_garbage_collector()
    supervisor = Supervisor(
        workers,
        lambda channel: run(_serve(channel, gateway.shared, gateway.worker)),
        lambda channel: run(_serve(channel, gateway.shared, gateway.admin_process)),
        gateway,
    )
    log_stopped(supervisor.run())


async def _serve(
    channel: WorkerChannel,
    shared: SharedMemory,
    build: Callable[[Callable[[], None], int], Gateway | AdminProcess],
) -> None:
    """Serve the connections that the supervisor accepts: those of clients, or of operators."""
    # The first thing to do, as the rest takes a while: the supervisor ends this process.
    handle_signals(partial(channel.send, FromWorker.LEAVING), *STOP_SIGNALS)
    gateway = build(channel.count_closed, channel.slot)
    reloader = WorkerReloader(gateway, shared, partial(channel.send, FromWorker.RELOAD_DONE))
    async with gateway, reloader, MallocTrim():
        tune_garbage_collector()
        channel.send(FromWorker.READY)
        await channel.receive(gateway, reloader.enqueue)
    channel.send(FromWorker.DROPPED, str(gateway.dropped))


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What the supervisor has made for new settings; ``read`` are those of the file."""

    read: Settings
    resources: LoadedResources
    bound: tuple[BoundAddress, ...]
    changes: str


class GatewayWithWorkers(SupervisedGateway):
    """What the supervisor serves: it reads the settings and opens the sockets for the workers.

    Raises UnusableSettingsError.
    """

    def __init__(self, settings: Settings, source: SettingsSource, workers: int) -> None:
        self._resources = load_resources(settings)
        self._bound = listening.listen(listening.addresses_of(settings))
        # Made before the first fork, as all workers share it. It outlives them, and each reload.
        self.shared = SharedMemory.for_workers(workers)
        writer = self.shared.metric_store.writer(workers)
        self._worker_restarts = writer.counter(families.WORKER_RESTARTS)
        self._reload_log = ReloadLog(source, self.shared, writer)
        self._journal = self.shared.owner_journal
        self._has_started = self._is_requested = False
        self._prepared: _Prepared | None = None
        """What is made for new settings, until all processes use them or none."""
        self._log_applied: Callable[[], None] = lambda: None
        """Logs what has changed, once all processes use it."""

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
        return _sockets(self._bound, self.settings)

    @property
    def addresses(self) -> list[str]:
        """Return where clients and operators connect."""
        return listening.describe(self._bound, self.settings)

    def worker(self, on_closed: Callable[[], None], slot: int = 0) -> Gateway:
        """Build the gateway of a worker that starts now; see Gateway for the parameters."""
        # It gets what is loaded already: the files may have become unusable since then.
        return Gateway(self._resources, self.shared, slot, on_closed)

    def admin_process(self, *_: object) -> AdminProcess:
        """Build what the admin process runs."""
        return AdminProcess(self._resources, self.shared)

    def poll(self, requested: bool) -> ListeningSockets | None:
        """Read the settings if that is requested, or if their files have changed."""
        try:
            # Workers that start later get the files that the others reload by themselves.
            self._resources.refresh(self._journal)
        except Exception:
            _log.exception(
                "API keys or certificates could not be reloaded; keeping the previous ones"
            )
        if not requested and not self._reload_log.is_due(self.settings):
            return None
        self._is_requested = requested
        try:
            return self._prepare()
        except Exception as error:  # whatever it is, it must not end the supervisor
            reason = failure_text(error, self._reload_log.source.file)
            self._reload_log.record_failure(reason, requested)
            return None

    def _prepare(self) -> ListeningSockets:
        """Read the settings, load what they name and open their addresses, or raise."""
        read = self._reload_log.source.read()
        settings = keep_workers(read, self.settings)
        resources = load_resources(settings, self._resources)
        if not self.shared.new_settings.publish(0, pickle.dumps(settings)):
            raise OSError("they are too large")
        bound = listening.listen(listening.addresses_of(settings), self._bound)
        changes = describe_changes(resources, self._resources)
        self._prepared = _Prepared(read, resources, bound, changes)
        return _sockets(bound, settings)

    def commit(self) -> None:
        """Use what is prepared, by assignments: each process is ready."""
        assert self._prepared is not None
        now, self._prepared = self._prepared, None
        before, left = self.settings, self.addresses
        self._resources, self._bound = now.resources, now.bound
        self._reload_log.record_reload()
        addresses = self.addresses, left
        self._log_applied = partial(
            self._reload_log.log_reload,
            now.changes,
            now.read,
            before,
            addresses,
            self._is_requested,
        )

    def abort(self, errors: Mapping[str, str]) -> None:
        """Close the new addresses, and log which processes have refused the settings, and why."""
        assert self._prepared is not None
        listening.close(listening.difference(self._prepared.bound, self._bound))
        self._prepared = None
        processes = defaultdict(list)
        for name, error in errors.items():
            processes[error].append(name)
        reasons = [f"{', '.join(names)}: {error}" for error, names in processes.items()]
        reason = f"{self._reload_log.source.file}: {'; '.join(reasons)}"
        self._reload_log.record_failure(reason, self._is_requested)

    def on_applied(self, late: Sequence[str]) -> None:
        """Log what has changed, and which processes go on with the previous settings for now."""
        self._log_applied()
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


def _sockets(bound: Sequence[BoundAddress], settings: Settings) -> ListeningSockets:
    """Return the listening sockets, with who connects there."""
    return {
        sock: ToWorker.ADMIN if each.address == settings.admin.listen else ToWorker.CLIENT
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
        self._key_watch: asyncio.Task[None] | None = None
        self.dropped = 0
        """Calls that it cut at its end: it has none."""

    @property
    def settings(self) -> Settings:
        """Return the settings in use."""
        return self.source.settings

    async def __aenter__(self) -> Self:
        self._control.__enter__()
        await self._site.__aenter__()
        self._watch_keys()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._key_watch is not None:
            self._key_watch.cancel()
        await self._site.close(DRAIN_GRACE)
        self._control.__exit__()

    def _watch_keys(self) -> None:
        """Follow the files of API keys; those of before may belong to other settings."""
        if self._key_watch is not None:
            self._key_watch.cancel()
        watch = self.source.resources.api_keys.watch(lambda: None)
        self._key_watch = asyncio.create_task(watch)

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
        return PreparedReload("", partial(self._swap, resources), AsyncExitStack())

    def _swap(self, resources: LoadedResources) -> CloseReplaced:
        self.source.resources = resources
        self._watch_keys()
        return AsyncExitStack().aclose

    def reopen_logs(self) -> None:
        """Do nothing: it has no log."""


class WorkerReloader(BackgroundTask):
    """Does the steps of reloads in a worker or the admin process, one after the other.

    It does so while its context is open, and then gives back what is prepared. ``reply`` gets the
    error of each step, or an empty text.
    """

    def __init__(
        self, gateway: Gateway | AdminProcess, shared: SharedMemory, reply: Callable[[str], None]
    ) -> None:
        self._gateway = gateway
        self._shared = shared
        self._reply = reply
        self._steps: asyncio.Queue[int] = asyncio.Queue()
        self._prepared: PreparedReload | None = None

    def enqueue(self, step: int) -> None:
        """Do a step of a reload behind those that came before: see ReloadStep."""
        self._steps.put_nowait(step)

    async def run(self) -> None:
        """Do the steps as they come."""
        try:
            while True:
                await self._handle(await self._steps.get())
        finally:
            await self._give_back()

    async def _handle(self, step: int) -> None:
        if step == ToWorker.COMMIT:
            await self._commit()
            return
        await self._give_back()
        self._gateway.reopen_logs()
        self._reply(await self._prepare() if step == ToWorker.PREPARE else "")

    async def _prepare(self) -> str:
        """Prepare new settings; return why that has failed, or an empty text."""
        # What hangs must not keep the steps that follow from this process.
        limit = asyncio.timeout(PREPARE_TIMEOUT)
        try:
            async with limit:
                document = self._shared.new_settings.read()
                # The supervisor wrote it, from which this process was forked.
                settings: Settings = await asyncio.to_thread(pickle.loads, document)
                self._prepared = await self._gateway.prepare(settings)
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
            self._reply(failure_reason(failure))
            return
        self._reply("")
        set_log_level(self._gateway.settings)
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
