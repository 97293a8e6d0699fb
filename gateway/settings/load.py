"""Load a settings file: ``Settings``, or all problems of the file, with what was probably meant."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gateway.settings.cross_checks import unusable
from gateway.settings.problems import (
    INDENTATION,
    MISSING_FILE,
    UNKNOWN_KEY,
    Problem,
    SettingsError,
    UnreadableError,
)
from gateway.settings.schema import Settings, section_keys, sections_with_key
from gateway.settings.values.wording import (
    LIKENESS,
    TYPING_ERROR,
    KeyPath,
    closest_name,
    describe,
    did_you_mean,
    format_path,
    suggest,
)
from gateway.settings.yaml_document import INVALID, Position, YamlDocument, parse_yaml

_LITERAL = re.compile(r"'([^']*)'|\b([0-9]+)\b")
_SHELL_VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
_KEY_AND_VALUE = re.compile(r"([A-Za-z_][\w-]*)( *= *|:)(?!//)\S.*")
_TIMEOUT = re.compile(r".*time[_-]?outs?", re.IGNORECASE)
TIMEOUTS = {
    "limits.request_timeout": "a whole call, also in routes[].limits",
    "limits.idle_timeout": "a call without a byte, also in routes[].limits",
    "limits.connect_timeout": "connecting to a server",
    "limits.request_header_timeout": "the head of a request",
    "limits.keep_alive_timeout": "a client between two requests",
    "limits.drain_timeout": "a shutdown",
    "concurrency.queue_timeout": "waiting for a slot, also of an upstream",
    "upstreams.NAME.idle_timeout": "an unused connection to a server",
    "upstreams.NAME.health_check.timeout": "a health check",
}
"""All timeouts, with what each is for: by name alone they are mistaken for each other."""
_EXAMPLES = {"upstreams": "triton: {endpoints: [http://127.0.0.1:8000]}"}

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


def error_message(details: ErrorDetails) -> str:
    """Return the message for an error of pydantic."""
    got, context, path = details["input"], details.get("ctx", {}), details["loc"]
    match details["type"]:
        case "value_error":
            return str(context["error"]) + (_reference_hint(got) or _dash_hint(got))
        case "missing":
            return "required, but missing" + _misplaced_hint(path[:-1])
        case "extra_forbidden":
            return _unknown_key(path)
        case "too_short":
            return "expected at least one, got none"
        case "literal_error":
            expected = context["expected"].replace("'", "")
            known = [word or number for word, number in _LITERAL.findall(context["expected"])]
            hint = _reference_hint(got) or did_you_mean(got, known)
        case "bool_type":
            expected, hint = "true or false", _reference_hint(got) or _boolean_hint(got)
        case "string_type":
            is_other = isinstance(got, bool | int | float)
            expected, hint = "text", "; in quotes it is text" if is_other else ""
        case "tuple_type":
            expected, hint = "a list", _dash_hint(got)
        case "model_type" | "dict_type" | "mapping_type":
            expected, hint = "keys and values", _misplaced_hint(path) or _section_hint(path, got)
        case _:
            return details["msg"]
    return f"expected {expected}, got {describe(got)}{hint}"


def _unknown_key(path: KeyPath) -> str:
    known, name = section_keys(path[:-1]) or (), str(path[-1])
    if name.startswith("-"):
        return "unknown key; the - of a list needs a space behind it"
    homes = " and of ".join([each or "the top level" for each in sections_with_key(name)][:2])
    is_timeout = _TIMEOUT.fullmatch(name) is not None
    if closest_name(name, known, TYPING_ERROR if is_timeout else LIKENESS) is None:
        if is_timeout and (not homes or name == "timeout"):
            timeouts = ", ".join(f"{path} ({what})" for path, what in TIMEOUTS.items())
            return f"unknown key; the timeouts are {timeouts}"
        if homes:
            return f"unknown key; it is a key of {homes}"
    return f"unknown key{suggest(name, known)}" + (f" {name} is a key of {homes}" if homes else "")


def _boolean_hint(got: object) -> str:
    word = str(got) if isinstance(got, int) else got
    return did_you_mean({"1": "true", "0": "false"}.get(str(word), word), ("true", "false"))


def _dash_hint(got: object) -> str:
    keys = got if isinstance(got, Mapping) else ()
    if any(str(key).startswith("-") for key in keys):
        return "; the - of a list needs a space behind it"
    return ""


def _misplaced_hint(path: KeyPath) -> str:
    """Tell that an entry with a name of the operator's choice was meant as a setting."""
    if section_keys(path[:-1]) == () and "" in sections_with_key(str(path[-1])):
        return f"; {path[-1]} is a setting of the top level, which is not indented"
    return ""


def _section_hint(path: KeyPath, got: object) -> str:
    found = _KEY_AND_VALUE.fullmatch(got) if isinstance(got, str) else None
    if found is not None:
        return f"; a key is followed by a colon and a space: {found[1]}: ..."
    if isinstance(got, str) and "://" in got and path[:1] == ("upstreams",) and len(path) == 2:
        return f"; did you mean {{endpoints: {describe(got)}}}?"
    example = _EXAMPLES.get(format_path(path))
    return f"; for example {example}" if example else ""


def _reference_hint(got: object) -> str:
    found = _SHELL_VARIABLE.fullmatch(got) if isinstance(got, str) else None
    return f"; a value from the environment is written ${{{found[1]}}}" if found else ""
