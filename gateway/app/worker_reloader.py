"""Newer settings for several workers: their parent reads them, and each worker takes them up."""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from gateway.app.background import BackgroundTask
from gateway.app.build.api_keys import ApiKeysError
from gateway.app.build.listen import ListenError, listen, listen_addresses, shown
from gateway.app.build.tls import UpstreamTlsError
from gateway.app.gateway import Gateway
from gateway.app.reload.diff import changes, keep_startup_settings
from gateway.app.reload.journal import ReloadLog, log_addresses
from gateway.app.reload.resources import gather, warn
from gateway.app.reload.revision import Revision
from gateway.app.reload.source import SettingsSource, failure_text
from gateway.app.reloader import INTERNAL_ERROR, SETTINGS_ERRORS, OnApplied
from gateway.settings.schema import Settings
from gateway.workers.ipc import ADMIN, CLIENT
from gateway.workers.letters import ReceivedUpdate
from gateway.workers.reload_broadcast import ConfigSource, ConfigUpdate
from gateway.workers.shared_state import SharedEjections

_log = logging.getLogger("tensorgate")


@dataclass(frozen=True, slots=True)
class _Notice:
    """What a parent tells its workers: which settings to use, or why there are no newer ones."""

    settings: Settings | None
    revision: Revision


class SupervisorReloader(ConfigSource):
    """Reads the settings for workers, and says where their parent listens.

    Raises ListenError and UpstreamTlsError where it cannot begin.
    """

    def __init__(self, settings: Settings, source: SettingsSource, in_use: OnApplied) -> None:
        self._source = source
        self._in_use = in_use
        self._journal = ReloadLog(Revision(time.time(), str(source.file)))
        self._material = gather(settings)
        warn(settings)
        self._listening = listen(listen_addresses(settings))
        # It is made before any worker is, and outlives them all, and each reload.
        self._board = SharedEjections()
        self._say_done: Callable[[], None] | None = None

    @property
    def settings(self) -> Settings:
        """Give the newest settings that could be used."""
        return self._material.settings

    @property
    def sockets(self) -> dict[socket.socket, bytes]:
        """Give the sockets to listen on, each with the word for who connects there."""
        admin = self.settings.admin
        return {
            sock: ADMIN if each.address == admin else CLIENT
            for each in self._listening
            for sock in each.sockets
        }

    @property
    def addresses(self) -> list[str]:
        """Tell where clients connect."""
        return shown(self._listening, self.settings)

    def gateway(
        self,
        on_closed: Callable[[], None],
        first: bool = True,
        drained: Callable[[], Awaitable[None]] | None = None,
    ) -> Gateway:
        """Make the gateway of a worker that starts now; ``first`` is whether it has that seat.

        ``drained`` is as in Gateway.
        """
        # The files may have become unusable since they were loaded.
        material, revision = self._material, self._journal.revision
        return Gateway(self.settings, on_closed, material, revision, self._board, first, drained)

    def look(self, wished: bool) -> ConfigUpdate | None:
        """Read the settings if that is wished, or if the files have changed; see Superior."""
        self._renew_material()
        if not wished and not self._changed():
            return None
        try:
            notice = _Notice(self._read(), self._journal.revision)
        except SETTINGS_ERRORS as error:
            self._journal.failed(failure_text(error, self._source.file), wished)
            notice = _Notice(None, self._journal.revision)
        except Exception:
            # A fault of our own: never a silent one, and never one that ends the parent.
            _log.exception("a reload failed")
            self._journal.failed(f"{self._source.file}: {INTERNAL_ERROR}", wished)
            notice = _Notice(None, self._journal.revision)
        return ConfigUpdate(pickle.dumps(notice), self.sockets, self.settings.limits.drain_timeout)

    def on_applied(self, faults: Mapping[int, str]) -> None:
        """Log what has become of new settings; see Superior."""
        if self._say_done is not None:
            self._say_done()
            self._say_done = None
        workers = defaultdict(list)
        for pid, fault in faults.items():
            workers[fault].append(str(pid))
        for fault, pids in workers.items():
            of = "worker" if len(pids) == 1 else "workers"
            _log.error("%s %s: still on the settings from before: %s", of, ", ".join(pids), fault)

    def _renew_material(self) -> None:
        """Keep up with the files that workers renew: those to come begin with what is here."""
        try:
            self._material.renew()
        except Exception:
            _log.exception("keys or certificates could not be renewed")

    def _changed(self) -> bool:
        failed = self._journal.revision.last_failure is not None
        return self.settings.watch and self._source.changed(failed)

    def _read(self) -> Settings:
        """Read the settings and use them, or raise and change nothing."""
        before, addresses = self._material, self.addresses
        read = self._source.read()
        settings = keep_startup_settings(read, before.settings)
        material = gather(settings, before)
        self._listening = listen(listen_addresses(settings), self._listening)
        self._material = material
        self._journal.reloaded()

        def say_done() -> None:
            self._in_use(settings)
            self._journal.log_reloaded(changes(material, before), read, before.settings)
            log_addresses(self.addresses, addresses)

        self._say_done = say_done
        return settings


class WorkerReloader(BackgroundTask):
    """Has a worker's gateway do what its parent tells, one letter after the other.

    It does so while its context is open.
    """

    def __init__(self, gateway: Gateway, in_use: OnApplied) -> None:
        self._gateway = gateway
        self._in_use = in_use
        self._letters: asyncio.Queue[ReceivedUpdate] = asyncio.Queue()

    def take(self, letter: ReceivedUpdate) -> None:
        """Take a letter, which is answered when it is done."""
        self._letters.put_nowait(letter)

    async def run(self) -> None:
        """Do as the letters say."""
        while True:
            letter = await self._letters.get()
            with letter:
                letter.answer(await self._follow(letter.content))

    async def _follow(self, content: bytes) -> str:
        """Do what a letter says; tell why it could not be done, or nothing."""
        # It was written by the parent, from which this process was forked.
        notice: _Notice = await asyncio.to_thread(pickle.loads, content)
        gateway = self._gateway
        if notice.settings is None:
            why, failed_at = notice.revision.last_failure, notice.revision.failed_at
            gateway.revision = gateway.revision.failed(why or "", failed_at or time.time())
            return ""
        try:
            await gateway.reload(notice.settings)
        except (ListenError, UpstreamTlsError, ApiKeysError) as error:
            fault = str(error)
        except Exception:
            _log.exception("a reload failed")
            fault = INTERNAL_ERROR
        else:
            gateway.revision = notice.revision
            self._in_use(notice.settings)
            return ""
        gateway.revision = gateway.revision.failed(fault, time.time())
        return fault
