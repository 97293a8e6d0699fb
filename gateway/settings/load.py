"""Load a settings file: ``Settings``, or all problems of the file at once."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gateway.settings.cross_checks import unusable
from gateway.settings.error_text import error_message
from gateway.settings.problems import (
    INDENTATION,
    MISSING_FILE,
    UNKNOWN_KEY,
    Problem,
    SettingsError,
    UnreadableError,
)
from gateway.settings.schema import Settings, section_keys
from gateway.settings.values.wording import KeyPath, format_path
from gateway.settings.yaml.loader import INVALID, Position, YamlDocument, parse_yaml

MAX_FILE_BYTES = 2**20
"""Largest settings file."""


class LoadedSettings(NamedTuple):
    """Settings, and the position in the file of each."""

    settings: Settings
    positions: Mapping[KeyPath, Position]

    def problem(self, path: KeyPath, message: str) -> Problem:
        """Return what is to be said about a setting, with its position, if that is known."""
        return _problem_at(path, message, self.positions)


def load(path: Path, environ: Mapping[str, str]) -> Settings:
    """Return the settings of a YAML file, with ``environ`` filled in.

    Raises SettingsError with all problems of the file.
    """
    return load_with_positions(path, environ).settings


def load_with_positions(
    path: Path,
    environ: Mapping[str, str],
    *,
    with_files: bool = False,
    with_written_files: bool = False,
) -> LoadedSettings:
    """Return the settings of a YAML file, and the position of each.

    ``with_files`` makes files that cannot be read or written a problem, too;
    ``with_written_files`` only those that cannot be written. Either makes packages that are not
    installed one. Raises SettingsError with all problems of the file.
    """
    try:
        document = parse_yaml(_read(path), environ)
    except UnreadableError as error:
        raise SettingsError(path, [error.problem]) from None
    settings, errors = _validate(document)
    problems = [*_validation_problems(errors, document), *_yaml_problems(document, errors)]
    if with_files or with_written_files:
        for setting, message in unusable(document.value, environ, with_files):
            problems.append(_problem(setting, message, document, MISSING_FILE))
    if settings is None or problems:
        raise SettingsError(path, problems)
    return LoadedSettings(settings, document.positions)


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


def _validate(document: YamlDocument) -> tuple[Settings | None, list[ErrorDetails]]:
    """Return the settings, or the errors of pydantic.

    A reference in quotes is text where the setting wants text. Elsewhere it is what it would be
    without the quotes.
    """
    settings, errors = _attempt(document.value)
    # An error may be within a value: in the list, say, that a single item stands for.
    around = {e["loc"][:length] for e in errors for length in range(len(e["loc"]) + 1)}
    refused = [path for path in document.unquoted if path in around]
    if refused:
        for path in refused:
            _put(document.value, path, document.unquoted[path])
        settings, errors = _attempt(document.value)
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


def _validation_problems(errors: list[ErrorDetails], document: YamlDocument) -> Iterator[Problem]:
    for details in errors:
        if not _is_consequence(details):
            kind = UNKNOWN_KEY if details["type"] == "extra_forbidden" else ""
            yield _problem(details["loc"], error_message(details), document, kind)


def _yaml_problems(document: YamlDocument, errors: list[ErrorDetails]) -> Iterator[Problem]:
    """Yield the problems of the document, except missing values of unknown keys."""
    unknown = {
        format_path(details["loc"]) for details in errors if details["type"] == "extra_forbidden"
    }
    sections = {format_path(path) for path in document.empty if section_keys(path) is not None}
    for problem in document.problems:
        if problem.setting in unknown and problem.message.startswith("no value"):
            continue
        if problem.setting in sections:
            hint = "leave the key out, or indent what belongs to it by more"
            message = f"{problem.message}; {hint}"
            problem = problem._replace(message=message, kind=INDENTATION)
        yield problem


def _is_consequence(details: ErrorDetails) -> bool:
    """Tell whether an error only follows from another one."""
    match details["type"]:
        case "too_short":
            return bool(details["input"])  # none of the list's items is valid
        case "extra_forbidden":
            return False  # the key is unknown whatever its value
        case _:
            return details["input"] is INVALID


def _problem(path: KeyPath, message: str, document: YamlDocument, kind: str = "") -> Problem:
    """Return a problem at the position of a value, or of the section around it."""
    while path and isinstance(path[-1], int) and path not in document.positions:
        path = path[:-1]  # a single item stands for a list of one
    if path in document.ends:
        message += f"; the value goes on in line {document.ends[path]}, check its indentation"
    return _problem_at(path, message, document.positions, kind)


def _problem_at(
    path: KeyPath, message: str, positions: Mapping[KeyPath, Position], kind: str = ""
) -> Problem:
    """Return a problem at the position of a value, or of the innermost section around it."""
    around = (path[:length] for length in range(len(path), 0, -1))
    found = (positions[each] for each in around if each in positions)
    line, column = next(found, (None, None))
    return Problem(format_path(path), line, column, message, kind)
