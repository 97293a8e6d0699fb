"""Settings → the API keys of clients, which follow their files."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gateway.app.build.listening import UnusableSettingsError
from gateway.listener.tls import is_world_readable
from gateway.proxy.filters.authentication import KeyGroup
from gateway.settings.schema import Settings
from gateway.system.file_watcher import FileWatch

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
            if declared.file is None:
                keys = _from_environment(name, declared.environment or "", environ)
                self.groups[name] = KeyGroup(name, declared.header, keys)
                continue
            setting, file = f"api_keys.{name}.file", declared.file
            watch = FileWatch([file])
            self.groups[name] = KeyGroup(name, declared.header, _read(setting, file))
            self._files.append(_KeyFile(setting, file, watch, self.groups[name]))
            if is_world_readable(file):
                _log.warning("%s: every user of this machine can read %s", setting, file)

    def refresh(self) -> bool:
        """Replace the keys of groups whose files have changed; return whether there were any."""
        replaced = [file.refresh() for file in self._files]
        return any(replaced)


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


def _read(setting: str, file: str) -> tuple[str, ...]:
    """Return the keys of a file. Raises UnusableSettingsError."""
    where = f"{setting}: {file}"
    try:
        with open(file, "rb", opener=_open_without_waiting) as opened:
            content = opened.read(_MAX_FILE_SIZE + 1)
    except OSError as error:
        raise UnusableSettingsError(f"{where} cannot be read: {error.strerror}") from None
    if len(content) > _MAX_FILE_SIZE:
        raise UnusableSettingsError(f"{where} is larger than {_MAX_FILE_SIZE} bytes")
    return _parse(where, content.decode("utf-8-sig", "replace").splitlines(), "line")


@dataclass(slots=True)
class _KeyFile:
    """A file of API keys, and the group that has them."""

    setting: str
    file: str
    watch: FileWatch
    group: KeyGroup
    logged: str = ""

    def refresh(self) -> bool:
        """Replace the keys if the file has changed, and is the same as at the last look."""
        if not self.watch.changed():
            return False
        try:
            keys = _read(self.setting, self.file)
        except UnusableSettingsError as error:
            if str(error) != self.logged:  # not again at each look
                self.logged = str(error)
                _log.error("%s; keeping the previous keys", error)
            return False
        self.watch.mark_used()
        self.logged = ""
        _log.info("%s: keys loaded from %s: %d", self.setting, self.file, len(keys))
        self.group.replace_keys(keys)
        return True


def _from_environment(name: str, variable: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    where = f"api_keys.{name}.environment: {variable}"
    if variable not in environ:
        raise UnusableSettingsError(f"{where} is not set")
    return _parse(where, filter(None, re.split(r"[,\s]+", environ[variable])), "word")


def _parse(where: str, lines: Iterable[str], word: str) -> tuple[str, ...]:
    try:
        return parse_keys(lines, word)
    except ValueError as error:
        raise UnusableSettingsError(f"{where}: {error}") from None


def _open_without_waiting(file: str, flags: int) -> int:
    """Open a file; a pipe without a writer reads as empty, instead of blocking."""
    return os.open(file, flags | os.O_NONBLOCK)
