"""The keys of each section of the settings, by its path in a file."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel

from gateway.settings.schema import Settings
from gateway.settings.values.wording import KeyPath


def section_keys(path: KeyPath) -> tuple[str, ...] | None:
    """Return the keys of a section; None where there is no section.

    There are none where the operator chooses them, as the names of upstreams.
    """
    kind: Any = Settings
    for part in path:
        if _is_model(kind):
            if part not in kind.model_fields:
                return None
            kind = _if_given(kind.model_fields[part].annotation)
        else:
            kind = _model_in(kind)
        if kind is None:
            return None
    if _is_model(kind):
        return tuple(kind.model_fields)
    is_list = getattr(kind, "__origin__", None) is tuple
    return None if is_list or _model_in(kind) is None else ()


def sections_with_key(key: str) -> list[str]:
    """Return the paths of the sections that have a key."""
    return [path for path, model in _all_sections() if key in model.model_fields]


@cache
def _all_sections() -> tuple[tuple[str, type[BaseModel]], ...]:
    return tuple(_sections("", Settings))


def _sections(path: str, kind: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, kind
    for name, field in kind.model_fields.items():
        declared = _if_given(field.annotation)
        inner = declared if _is_model(declared) else _model_in(declared)
        if inner is not None:
            is_list = getattr(declared, "__origin__", None) is tuple
            step = "[]" if is_list else "" if inner is declared else ".NAME"
            yield from _sections(f"{path}.{name}{step}".removeprefix("."), inner)


def _model_in(kind: Any) -> type[BaseModel] | None:
    """Return the section that a type holds, or one of the types that it is made of."""
    for each in get_args(kind):
        if found := each if _is_model(each) else _model_in(each):
            return found
    return None


def _if_given(kind: Any) -> Any:
    """Return the type of a value that is not null."""
    kinds = get_args(kind)
    return next(each for each in kinds if each is not NoneType) if NoneType in kinds else kind


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
