"""Settings → the API keys of clients, which follow their files."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping

from gateway.app.build.listen import UnusableSettingsError
from gateway.listener.tls import is_world_readable
from gateway.proxy.filters.authentication import KeyGroup
from gateway.settings.schema import Settings
from gateway.system.file_watcher import POLL_INTERVAL, FileWatch

MAX_KEYS = 1000
"""Keys in a group at most: a request whose head is not cached is compared with all of them."""

_MAX_FILE_SIZE = 1024 * 1024
# Visible ASCII but for the comma, which separates values of a header.
_KEY = re.compile(r"[!-+\--~]{1,512}")

_log = logging.getLogger("tensorgate")


class ApiKeys:
    """The groups of API keys by name; their keys are replaced when files change.

    Raises UnusableSettingsError.
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

    async def watch(self, on_replaced: Callable[[], None]) -> None:
        """Follow the files until cancelled; call ``on_replaced`` when keys were replaced."""
        while True:
            if self.refresh():
                on_replaced()
            await asyncio.sleep(POLL_INTERVAL)

    def refresh(self) -> bool:
        """Replace the keys of groups whose files have changed; return whether there were any."""
        replaced = False
        for file, group in self._files:
            keys = file.changed()
            if keys is not None:
                group.replace_keys(keys)
                replaced = True
        return replaced


def parse_keys(lines: Iterable[str], word: str = "line") -> tuple[str, ...]:
    """Parse keys, one on each line; empty lines and comments that begin with # are skipped.

    Raises ValueError with the number of the invalid key, as a ``word``; it never quotes the key.
    """
    keys = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        if not _KEY.fullmatch(line):
            raise ValueError(
                f"{word} {number} is not a key; a key is 1 to 512 visible ASCII characters"
                " without a comma"
            )
        keys.append(line)
    if not keys:
        raise ValueError("there is no key")
    if len(keys) > MAX_KEYS:
        raise ValueError(f"there are more than {MAX_KEYS} keys")
    return tuple(dict.fromkeys(keys))


class _KeyFile:
    """A file of API keys."""

    def __init__(self, setting: str, file: str) -> None:
        self._setting = setting
        self._file = file
        self._watch = FileWatch([file])
        self._logged = ""

    def read(self) -> tuple[str, ...]:
        """Return the keys. Raises UnusableSettingsError."""
        where = f"{self._setting}: {self._file}"
        try:
            with open(self._file, "rb", opener=_open_without_waiting) as opened:
                content = opened.read(_MAX_FILE_SIZE + 1)
        except OSError as error:
            raise UnusableSettingsError(f"{where} cannot be read: {error.strerror}") from None
        if len(content) > _MAX_FILE_SIZE:
            raise UnusableSettingsError(f"{where} is larger than {_MAX_FILE_SIZE} bytes")
        try:
            return parse_keys(content.decode("utf-8-sig", "replace").splitlines())
        except ValueError as error:
            raise UnusableSettingsError(f"{where}: {error}") from None

    def changed(self) -> tuple[str, ...] | None:
        """Return the keys if the file has changed, and is the same as at the last look."""
        if not self._watch.changed():
            return None
        try:
            keys = self.read()
        except UnusableSettingsError as error:
            self._log_once(f"{error}; keeping the previous keys")
            return None
        self._watch.mark_used()
        self._logged = ""
        _log.info("%s: keys loaded from %s: %d", self._setting, self._file, len(keys))
        return keys

    def _log_once(self, error: str) -> None:
        """Log an error, but not again at each look."""
        if error != self._logged:
            self._logged = error
            _log.error("%s", error)


def _from_environment(name: str, variable: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    where = f"api_keys.{name}.environment: {variable}"
    if variable not in environ:
        raise UnusableSettingsError(f"{where} is not set")
    try:
        return parse_keys(filter(None, re.split(r"[,\s]+", environ[variable])), "word")
    except ValueError as error:
        raise UnusableSettingsError(f"{where}: {error}") from None


def _open_without_waiting(file: str, flags: int) -> int:
    """Open a file; a pipe without a writer reads as empty, instead of blocking."""
    return os.open(file, flags | os.O_NONBLOCK)
