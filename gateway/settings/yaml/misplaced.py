"""Find keys in the wrong section: their indentation is wrong, and YAML cannot see that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gateway.settings.problems import INDENTATION, Problem
from gateway.settings.sections import SectionKeys, section_keys
from gateway.settings.values.wording import KeyPath, format_path, spaces
from gateway.settings.yaml.loader import Position, YamlDocument

_MOST = 20
"""Keys that are moved; more are no typing error."""


def fix_indentation(document: YamlDocument) -> YamlDocument:
    """Return the document with such keys where they were meant to be, and a problem for each.

    So the operator reads about the indentation, and not about errors that follow from it.
    """
    for _ in range(_MOST):
        found = _outdented(document) or _indented_too_far(document)
        if found is None:
            break
        document = found
    return document


def _outdented(document: YamlDocument) -> YamlDocument | None:
    """Move keys into the empty section above them, if they are keys of that section."""
    for path in document.empty:
        parent, inner = _value_at(document.value, path[:-1]), section_keys(path)
        if inner is None or not isinstance(parent, dict):
            continue
        names = _outdented_names(parent, path, inner)
        if not names or not _is_below(document, path, names[0]):
            continue
        own = parent[path[-1]] = {name: parent.pop(name) for name in names}
        position, above = document.positions[*path[:-1], names[0]], document.positions[path]
        message = (
            f"indented by {spaces(position.column - 1)}, as {path[-1]} on line {above.line} is;"
            " what belongs to that is indented by more"
        )
        moves = {(*path[:-1], name): (*path, name) for name in own}
        return _move(document, moves, (*path, names[0]), position, message, dropped=path)
    return None


def _outdented_names(parent: dict[str, Any], path: KeyPath, inner: SectionKeys) -> list[str]:
    """Return the keys below an empty key that belong to it, and not to the section around."""
    outer = section_keys(path[:-1])
    names = list(parent)
    outdented = []
    for name in names[names.index(str(path[-1])) + 1 :]:
        is_own = isinstance(parent[name], dict) if inner.are_chosen_names else name in inner.names
        if not is_own or outer is None or name in outer.names:
            break
        outdented.append(name)
    return outdented


def _indented_too_far(document: YamlDocument) -> YamlDocument | None:
    """Move a key that its section does not have into the section around it that has it."""
    for path, name, home in _foreign_keys(document.value):
        around, position = _value_at(document.value, home), document.positions[*path, name]
        wanted = min(document.positions[*home, other].column for other in around)
        if wanted >= position.column or not _is_below(document, path, (*path, name)):
            continue
        around[name] = _value_at(document.value, path).pop(name)
        message = (
            f"indented by {spaces(position.column - 1)}, as if it belonged to {_name(path)};"
            f" it is a setting {_of(home)} and is indented by {wanted - 1}"
        )
        moves = {(*path, name): (*home, name)}
        return _move(document, moves, (*home, name), position, message)
    return None


def _foreign_keys(value: object) -> Iterator[tuple[KeyPath, str, KeyPath]]:
    """Yield the keys that their sections do not have, with their section and the right one."""
    for path, section in _sections(value, ()):
        keys = section_keys(path)
        for name, each in section.items() if path else ():
            home = _right_section(value, name, path) if _is_foreign(name, each, keys) else None
            if home is not None and _has_shape_of(each, (*home, name)):
                yield path, name, home


def _is_foreign(name: str, value: object, keys: SectionKeys | None) -> bool:
    """Tell whether a section has no such key."""
    if keys is None:
        return False
    if not keys.are_chosen_names:
        return name not in keys.names
    return not (isinstance(value, dict) and any(each in value for each in keys.of_each or ()))


def _right_section(value: object, name: str, path: KeyPath) -> KeyPath | None:
    """Return the nearest section around that has the key, and no value for it yet."""
    for length in range(len(path) - 1, -1, -1):
        keys, around = section_keys(path[:length]), _value_at(value, path[:length])
        if keys is not None and name in keys.names and isinstance(around, dict):
            return None if name in around else path[:length]
    return None


def _has_shape_of(value: object, path: KeyPath) -> bool:
    """Tell whether a value has the shape of the setting at a path."""
    if section_keys(path) is not None:
        return isinstance(value, dict)
    return isinstance(value, list) if path == ("routes",) else not isinstance(value, dict)


def _name(path: KeyPath) -> str:
    return format_path(path) if isinstance(path[-1], int) else path[-1]


def _of(home: KeyPath) -> str:
    return f"of {format_path(home)}" if home else "of the top level"


def _is_below(document: YamlDocument, path: KeyPath, name: str | KeyPath) -> bool:
    """Tell whether a key stands on a line of its own, and not within { }."""
    key = (*path[:-1], name) if isinstance(name, str) else name
    return (
        path in document.positions and document.positions[key].line > document.positions[path].line
    )


def _move(
    document: YamlDocument,
    moves: dict[KeyPath, KeyPath],
    path: KeyPath,
    position: Position,
    message: str,
    dropped: KeyPath | None = None,
) -> YamlDocument:
    """Return a document with some keys moved; problems of the key ``dropped`` are dropped."""

    def to(old: KeyPath) -> KeyPath:
        start = next((each for each in moves if old[: len(each)] == each), None)
        return old if start is None else (*moves[start], *old[len(start) :])

    problem = Problem(format_path(path), position.line, position.column, message, INDENTATION)
    kept = [
        each
        for each in document.problems
        if dropped is None or not _is_missing_value(each, dropped)
    ]
    return replace(
        document,
        positions={to(old): each for old, each in document.positions.items()},
        problems=(problem, *kept),
        unquoted={to(old): each for old, each in document.unquoted.items()},
        empty=tuple(to(old) for old in document.empty if old != dropped),
        ends={to(old): each for old, each in document.ends.items()},
    )


def _is_missing_value(problem: Problem, path: KeyPath) -> bool:
    return problem.setting == format_path(path) and problem.message.startswith("no value")


def _sections(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Yield all mappings within a value, each with its path."""
    match value:
        case dict():
            yield path, value
            for name, each in value.items():
                yield from _sections(each, (*path, name))
        case list():
            for i, each in enumerate(value):
                yield from _sections(each, (*path, i))


def _value_at(value: Any, path: KeyPath) -> Any:
    for part in path:
        value = value[part]
    return value
