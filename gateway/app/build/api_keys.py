"""Settings → the keys that let clients in, and their renewal when files change."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable, Mapping

from gateway.listener.tls import is_world_readable
from gateway.proxy.filters.authentication import KeyGroup, parse_keys
from gateway.settings.schema import Settings
from gateway.system.files import POLL_INTERVAL, FileWatch

_LARGEST_FILE = 1024 * 1024

_log = logging.getLogger("tensorgate")


class ApiKeysError(Exception):
    """Keys that cannot be had; the message names the setting, and the file or the variable."""


class ApiKeys:
    """Holds the groups of keys, by name, and renews those whose files change.

    Raises ApiKeysError.
    """

    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        self._files = []
        self.groups: dict[str, KeyGroup] = {}
        for name, declared in settings.api_keys.items():
            if declared.file is not None:
                file = _KeyFile(f"api_keys.{name}.file", declared.file)
                group = self.groups[name] = KeyGroup(name, declared.header, file.read())
                self._files.append((file, group))
                if is_world_readable(declared.file):
                    _log.warning(
                        "api_keys.%s.file: every user of this machine can read %s",
                        name,
                        declared.file,
                    )
            else:
                keys = _from_environment(name, declared.environment or "", environ)
                self.groups[name] = KeyGroup(name, declared.header, keys)

    async def watch(self, on_renewed: Callable[[], None]) -> None:
        """Renew the groups whenever files change, and tell; until it is cancelled."""
        while True:
            if self.look():
                on_renewed()
            await asyncio.sleep(POLL_INTERVAL)

    def look(self) -> bool:
        """Renew the groups whose files have changed, and not since the last look; tell if so."""
        renewed = False
        for file, group in self._files:
            keys = file.changed()
            if keys is not None:
                group.replace_keys(keys)
                renewed = True
        return renewed


class _KeyFile:
    """A file of keys."""

    def __init__(self, setting: str, file: str) -> None:
        self._setting = setting
        self._file = file
        self._watch = FileWatch([file])
        self._told = ""

    def read(self) -> tuple[str, ...]:
        """Give the keys. Raises ApiKeysError."""
        where = f"{self._setting}: {self._file}"
        try:
            with open(self._file, "rb", opener=_without_waiting) as opened:
                content = opened.read(_LARGEST_FILE + 1)
        except OSError as error:
            raise ApiKeysError(f"{where} cannot be read: {error.strerror}") from None
        if len(content) > _LARGEST_FILE:
            raise ApiKeysError(f"{where} is larger than {_LARGEST_FILE} bytes")
        try:
            return parse_keys(content.decode("utf-8-sig", "replace").splitlines())
        except ValueError as error:
            raise ApiKeysError(f"{where}: {error}") from None

    def changed(self) -> tuple[str, ...] | None:
        """Give the keys if the file has changed, and not since the last look."""
        if not self._watch.changed():
            return None
        try:
            keys = self.read()
        except ApiKeysError as error:
            self._tell(f"{error}; the keys from before stay in use")
            return None
        self._watch.mark_used()
        self._told = ""
        _log.info("%s: %d from %s are in use from now on", self._setting, len(keys), self._file)
        return keys

    def _tell(self, fault: str) -> None:
        """Log a fault, but once: it is met again with each look."""
        if fault != self._told:
            self._told = fault
            _log.error("%s", fault)


def _from_environment(name: str, variable: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    where = f"api_keys.{name}.environment: {variable}"
    if variable not in environ:
        raise ApiKeysError(f"{where} is not set")
    try:
        return parse_keys(filter(None, re.split(r"[,\s]+", environ[variable])), "word")
    except ValueError as error:
        raise ApiKeysError(f"{where}: {error}") from None


def _without_waiting(file: str, flags: int) -> int:
    """Open a file; a pipe that nobody writes to is empty."""
    return os.open(file, flags | os.O_NONBLOCK)
