"""The files, and variables, that settings name: whether they are there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from errno import EACCES, EISDIR, ENOENT
from pathlib import Path

from gateway.settings.values.wording import KeyPath

_OF_CLIENTS = ("certificate", "key", "client_ca")
_OF_SERVERS = ("ca", "certificate", "key")


def missing_files(settings: object, environ: Mapping[str, str]) -> Iterator[tuple[KeyPath, str]]:
    """Yield the files and variables that settings name, and that are not there.

    The settings are as they were read: what has another type than it should is passed over.
    """
    named = [*_of(settings, ("tls",), _OF_CLIENTS)]
    for name in _names(settings, "upstreams"):
        named += _of(settings, ("upstreams", name, "tls"), _OF_SERVERS)
    for name in _names(settings, "api_keys"):
        named += _of(settings, ("api_keys", name), ("file",))
        for path, variable in _of(settings, ("api_keys", name), ("environment",)):
            # What is no name of a variable may be a key.
            if variable.isidentifier() and variable not in environ:
                yield path, f"{variable} is not set in the environment"
    for path, file in named:
        why = _why_not(file)
        if why:
            yield path, f"{file} cannot be read: {why}"


def _why_not(file: str) -> str | None:
    """Tell why a file cannot be read; it is not opened, as it may be a pipe."""
    where = "" if os.path.isabs(file) or "\0" in file else f" (in {Path.cwd()})"
    try:
        if os.path.isdir(file):
            return os.strerror(EISDIR)
        os.stat(file)
    except OSError as error:
        return (error.strerror or os.strerror(ENOENT)) + where
    except ValueError:  # a NUL
        return os.strerror(ENOENT)
    readable = os.access(file, os.R_OK, effective_ids=os.access in os.supports_effective_ids)
    return None if readable else os.strerror(EACCES)


def _names(settings: object, section: str) -> list[str]:
    named = _within(settings, section)
    return list(named) if isinstance(named, Mapping) else []


def _of(settings: object, path: KeyPath, names: tuple[str, ...]) -> Iterator[tuple[KeyPath, str]]:
    section = settings
    for part in path:
        section = _within(section, part)
    for name in names:
        value = _within(section, name)
        if isinstance(value, str) and value:
            yield (*path, name), value


def _within(section: object, name: str | int) -> object:
    return section.get(name) if isinstance(section, Mapping) else None
