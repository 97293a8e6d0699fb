"""A settings file → ``Settings``, or all that is wrong with it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, cast, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gateway.settings.problems import Problem, SettingsError, UnreadableError
from gateway.settings.schema import Settings
from gateway.settings.words import KeyPath, among, describe, path_text
from gateway.settings.yaml_source import BROKEN, Place, Source, read_source

MAX_FILE_BYTES = 2**20
"""How large a settings file may be."""


def load(path: Path, environ: Mapping[str, str]) -> Settings:
    """Return the settings that a YAML file gives, with ``environ`` filled in.

    Raises SettingsError, which holds all problems of the file.
    """
    try:
        source = read_source(_read(path), environ)
    except UnreadableError as error:
        raise SettingsError(path, [error.problem]) from None
    problems = list(source.problems)
    try:
        settings = Settings.model_validate(source.value)
    except ValidationError as error:
        problems += _worded(error, source)
    if problems:
        raise SettingsError(path, problems)
    return settings


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


def _worded(error: ValidationError, source: Source) -> Iterator[Problem]:
    for details in error.errors(include_url=False):
        if _follows(details):
            continue
        path = details["loc"]
        place = _place(path, source.places)
        line, column = (place.line, place.column) if place else (None, None)
        yield Problem(path_text(path), line, column, _message(details))


def _follows(details: ErrorDetails) -> bool:
    """Tell whether an error only follows from one that is told anyway."""
    match details["type"]:
        case "too_short":
            return bool(details["input"])  # a list whose items are wrong has no right ones
        case "extra_forbidden":
            return False  # a key is unknown whatever its value
        case _:
            return details["input"] is BROKEN


def _place(path: KeyPath, places: Mapping[KeyPath, Place]) -> Place | None:
    """Return the place of a value, or of the innermost one around it that the file holds."""
    around = (path[:length] for length in range(len(path), 0, -1))
    return next((places[each] for each in around if each in places), None)


def _message(details: ErrorDetails) -> str:
    got, context = details["input"], details.get("ctx", {})
    match details["type"]:
        case "value_error":
            return str(context["error"])
        case "missing":
            return "required, but missing"
        case "extra_forbidden":
            return _unknown_key(details["loc"])
        case "too_short":
            return "expected at least one, got none"
        case "literal_error":
            expected = context["expected"].replace("'", "")
        case "bool_type":
            expected = "true or false"
        case "string_type":
            expected = "text"
        case "tuple_type":
            expected = "a list"
        case "model_type" | "dict_type" | "mapping_type":
            expected = "keys and values"
        case _:
            return details["msg"]
    return f"expected {expected}, got {describe(got)}"


def _unknown_key(path: KeyPath) -> str:
    return f"unknown key{among(str(path[-1]), _model_at(path[:-1]).model_fields)}"


def _model_at(path: KeyPath) -> type[BaseModel]:
    """Return the model that the schema has at a path."""
    kind: Any = Settings
    for part in path:
        if _is_model(kind):
            kind = _if_given(kind.model_fields[part].annotation)
        else:
            kind = next(filter(_is_model, get_args(kind)))
    return cast("type[BaseModel]", kind)


def _if_given(kind: Any) -> Any:
    """Return the kind that a value has if it is not null."""
    kinds = get_args(kind)
    return next(each for each in kinds if each is not NoneType) if NoneType in kinds else kind


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
