"""Keys that stand in the wrong section, as their indentation is wrong: YAML does not see that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gateway.settings.problems import INDENTATION, Problem
from gateway.settings.sections import SectionKeys, section_keys
from gateway.settings.values.wording import KeyPath, format_path, spaces
from gateway.settings.yaml.loader import Position, YamlDocument

_MOST = 20
"""Keys that are put right: more are no slip of the hand."""


def fix_indentation(source: YamlDocument) -> YamlDocument:
    """Return the source with such keys where they were meant to be, and a problem for each.

    So they are told as what they are, and nothing that only follows from them.
    """
    for _ in range(_MOST):
        found = _fallen_out(source) or _sunk_in(source)
        if found is None:
            break
        source = found
    return source


def _fallen_out(source: YamlDocument) -> YamlDocument | None:
    """Put keys into the section above them, which has none, if they are of that section."""
    for path in source.empty:
        parent, inner = _value_at(source.value, path[:-1]), section_keys(path)
        if inner is None or not isinstance(parent, dict):
            continue
        names = _that_fell(parent, path, inner)
        if not names or not _on_lines_of_their_own(source, path, names[0]):
            continue
        own = parent[path[-1]] = {name: parent.pop(name) for name in names}
        place, above = source.positions[*path[:-1], names[0]], source.positions[path]
        message = (
            f"indented by {spaces(place.column - 1)}, as {path[-1]} on line {above.line} is;"
            " what belongs to that is indented by more"
        )
        moves = {(*path[:-1], name): (*path, name) for name in own}
        return _moved(source, moves, (*path, names[0]), place, message, told=path)
    return None


def _that_fell(parent: dict[str, Any], path: KeyPath, inner: SectionKeys) -> list[str]:
    """Return the keys behind an empty one that are no keys of its section, but of its own."""
    outer = section_keys(path[:-1])
    names = list(parent)
    fallen = []
    for name in names[names.index(str(path[-1])) + 1 :]:
        is_own = isinstance(parent[name], dict) if inner.are_free else name in inner.names
        if not is_own or outer is None or name in outer.names:
            break
        fallen.append(name)
    return fallen


def _sunk_in(source: YamlDocument) -> YamlDocument | None:
    """Put a key that its section does not have into the one around it that has it."""
    for path, name, home in _strange_keys(source.value):
        around, place = _value_at(source.value, home), source.positions[*path, name]
        wanted = min(source.positions[*home, other].column for other in around)
        if wanted >= place.column or not _on_lines_of_their_own(source, path, (*path, name)):
            continue
        around[name] = _value_at(source.value, path).pop(name)
        message = (
            f"indented by {spaces(place.column - 1)}, as if it belonged to {_name(path)};"
            f" it is a setting {_of(home)} and is indented by {wanted - 1}"
        )
        moves = {(*path, name): (*home, name)}
        return _moved(source, moves, (*home, name), place, message)
    return None


def _strange_keys(value: object) -> Iterator[tuple[KeyPath, str, KeyPath]]:
    """Yield the keys that sections do not have, each with its section and the one that has it."""
    for path, section in _sections(value, ()):
        keys = section_keys(path)
        for name, each in section.items() if path else ():
            home = _home_of(value, name, path) if _is_strange(name, each, keys) else None
            if home is not None and _may_be(each, (*home, name)):
                yield path, name, home


def _is_strange(name: str, value: object, keys: SectionKeys | None) -> bool:
    """Tell whether a section does not have such a key, or no section of that name."""
    if keys is None:
        return False
    if not keys.are_free:
        return name not in keys.names
    return not (isinstance(value, dict) and any(each in value for each in keys.of_each or ()))


def _home_of(value: object, name: str, path: KeyPath) -> KeyPath | None:
    """Return the nearest section around that has the key and lacks its value."""
    for length in range(len(path) - 1, -1, -1):
        keys, around = section_keys(path[:length]), _value_at(value, path[:length])
        if keys is not None and name in keys.names and isinstance(around, dict):
            return None if name in around else path[:length]
    return None


def _may_be(value: object, path: KeyPath) -> bool:
    """Tell whether a value is of the shape that the setting at a path has."""
    if section_keys(path) is not None:
        return isinstance(value, dict)
    return isinstance(value, list) if path == ("routes",) else not isinstance(value, dict)


def _name(path: KeyPath) -> str:
    return format_path(path) if isinstance(path[-1], int) else path[-1]


def _of(home: KeyPath) -> str:
    return f"of {format_path(home)}" if home else "of the top level"


def _on_lines_of_their_own(source: YamlDocument, path: KeyPath, name: str | KeyPath) -> bool:
    """Tell whether a key does not stand on the line of another, as within { }."""
    key = (*path[:-1], name) if isinstance(name, str) else name
    return path in source.positions and source.positions[key].line > source.positions[path].line


def _moved(
    source: YamlDocument,
    moves: dict[KeyPath, KeyPath],
    path: KeyPath,
    place: Position,
    message: str,
    told: KeyPath | None = None,
) -> YamlDocument:
    """Return a source of which some keys have moved; what was ``told`` of a key is dropped."""

    def to(old: KeyPath) -> KeyPath:
        start = next((each for each in moves if old[: len(each)] == each), None)
        return old if start is None else (*moves[start], *old[len(start) :])

    problem = Problem(format_path(path), place.line, place.column, message, INDENTATION)
    kept = [each for each in source.problems if told is None or not _is_of(each, told, source)]
    return replace(
        source,
        positions={to(old): each for old, each in source.positions.items()},
        problems=(problem, *kept),
        unquoted={to(old): each for old, each in source.unquoted.items()},
        empty=tuple(to(old) for old in source.empty if old != told),
        ends={to(old): each for old, each in source.ends.items()},
    )


def _is_of(problem: Problem, path: KeyPath, source: YamlDocument) -> bool:
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
