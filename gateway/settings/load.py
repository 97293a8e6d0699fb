"""A settings file → ``Settings``, or all that is wrong with it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gateway.settings.cross_checks import missing_files
from gateway.settings.error_text import error_message
from gateway.settings.problems import MISSING_FILE, Problem, SettingsError, UnreadableError
from gateway.settings.schema import Settings
from gateway.settings.sections import section_keys
from gateway.settings.values.wording import KeyPath, format_path
from gateway.settings.yaml.loader import INVALID, Position, YamlDocument, parse_yaml
from gateway.settings.yaml.misplaced import fix_indentation

MAX_FILE_BYTES = 2**20
"""How large a settings file may be."""


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Hold settings, and where in their file each of them was written."""

    settings: Settings
    positions: Mapping[KeyPath, Position]


def load(path: Path, environ: Mapping[str, str]) -> Settings:
    """Return the settings that a YAML file gives, with ``environ`` filled in.

    Raises SettingsError, which holds all problems of the file.
    """
    return load_with_positions(path, environ).settings


def load_with_positions(
    path: Path, environ: Mapping[str, str], *, with_files: bool = False
) -> LoadedSettings:
    """Return the settings that a YAML file gives, and where each was written.

    ``with_files`` is whether the files that they name have to be there. Raises SettingsError,
    which holds all problems of the file.
    """
    try:
        source = fix_indentation(parse_yaml(_read(path), environ))
    except UnreadableError as error:
        raise SettingsError(path, [error.problem]) from None
    settings, errors = _validated(source)
    problems = [*_worded(errors, source), *_told_already(source, errors)]
    if with_files:
        for at, message in missing_files(source.value, environ):
            problems.append(_problem(at, message, source, MISSING_FILE))
    if settings is None or problems:
        raise SettingsError(path, problems)
    return LoadedSettings(settings, source.positions)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise UnreadableError(f"larger than {MAX_FILE_BYTES} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UnreadableError("not UTF-8 text", line) from None


def _validated(source: YamlDocument) -> tuple[Settings | None, list[ErrorDetails]]:
    """Return the settings, or what pydantic says against them.

    A reference in quotes is text where text is wanted; elsewhere it is what it would be without
    the quotes.
    """
    settings, errors = _attempt(source.value)
    # An error may be within a value: of a single item, say, that stands for a list.
    around = {e["loc"][:length] for e in errors for length in range(len(e["loc"]) + 1)}
    refused = [path for path in source.unquoted if path in around]
    if refused:
        for path in refused:
            _put(source.value, path, source.unquoted[path])
        settings, errors = _attempt(source.value)
    return settings, errors


def _attempt(value: object) -> tuple[Settings | None, list[ErrorDetails]]:
    try:
        return Settings.model_validate(value), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


def _put(value: Any, path: KeyPath, item: object) -> None:
    for part in path[:-1]:
        value = value[part]
    value[path[-1]] = item


def _worded(errors: list[ErrorDetails], source: YamlDocument) -> Iterator[Problem]:
    for details in errors:
        if not _follows(details):
            yield _problem(details["loc"], error_message(details), source)


def _told_already(source: YamlDocument, errors: list[ErrorDetails]) -> Iterator[Problem]:
    """Yield the problems of the source, but for values of keys that do not exist."""
    unknown = {
        format_path(details["loc"]) for details in errors if details["type"] == "extra_forbidden"
    }
    sections = {format_path(path) for path in source.empty if section_keys(path) is not None}
    for problem in source.problems:
        if problem.setting in unknown and problem.message.startswith("no value"):
            continue
        if problem.setting in sections:
            hint = "leave the key out, or indent what belongs to it by more"
            problem = replace(problem, message=f"{problem.message}; {hint}")
        yield problem


def _follows(details: ErrorDetails) -> bool:
    """Tell whether an error only follows from one that is told anyway."""
    match details["type"]:
        case "too_short":
            return bool(details["input"])  # a list whose items are wrong has no right ones
        case "extra_forbidden":
            return False  # a key is unknown whatever its value
        case _:
            return details["input"] is INVALID


def _problem(path: KeyPath, message: str, source: YamlDocument, kind: str = "") -> Problem:
    """Return a problem of a value, at its place or at that of what the file holds around it."""
    while path and isinstance(path[-1], int) and path not in source.positions:
        path = path[:-1]  # a single item stands for a list of one
    if path in source.ends:
        message += f"; the value goes on in line {source.ends[path]}, check its indentation"
    place = _place(path, source.positions)
    line, column = (place.line, place.column) if place else (None, None)
    return Problem(format_path(path), line, column, message, kind)


def _place(path: KeyPath, positions: Mapping[KeyPath, Position]) -> Position | None:
    """Return the place of a value, or of the innermost one around it that the file holds."""
    around = (path[:length] for length in range(len(path), 0, -1))
    return next((positions[each] for each in around if each in positions), None)
