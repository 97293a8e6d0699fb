"""Write docs/settings.md, the reference of all settings, from their schema.

Run it as ``python -m docs.generate_settings``. With ``--check`` it writes nothing, and ends with 1
if the page is not up to date.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gateway.settings.json_schema import field_texts
from gateway.settings.schema import Settings
from gateway.settings.values.units import (
    Bounded,
    parse_count,
    parse_duration,
    parse_percent,
    parse_size,
)

PAGE = Path(__file__).with_name("settings.md")

_INTRODUCTION = """\
# Settings

<!-- `make docs` writes this page from the schema of the settings. Do not edit it. -->

Every setting, with its type, its default and its meaning. A setting whose default is *required*
must be in the file. `config/reference.yaml` has the same settings as a commented file.
`tensorgate check FILE` reports every error of a file at once. How a file is written, and what
`${NAME}` stands for, is in [The settings file](guide/settings-file.md).

Types:

- *size*: a number of bytes, or text such as `512KiB`, `64MiB`, `10MB`, `4GiB`.
- *duration*: a number of seconds, or text such as `500ms`, `5s`, `2m`, `1.5h`.
- *percentage*: `50%`, or a number from 1 on.
- *list*: a single item needs no brackets.

Both bounds of a range are allowed.
"""

_KINDS: Mapping[object, str] = {
    parse_size: "size",
    parse_duration: "duration",
    parse_count: "number",
    parse_percent: "percentage",
}
_SIZES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_DURATIONS = (("h", 3600), ("m", 60), ("s", 1))


@dataclass(frozen=True, slots=True)
class Setting:
    """Hold one row of the page; ``section`` is the path of the section that it opens, if any."""

    path: str
    kind: str
    default: str
    description: str
    section: str | None


@dataclass(frozen=True, slots=True)
class Section:
    """Hold one table of the page; the path of the outermost section is empty."""

    path: str
    description: str
    settings: tuple[Setting, ...]


def sections() -> tuple[Section, ...]:
    """Return all sections of a settings file, each before those within it."""
    return tuple(_sections("", "What stands at the top level of the file.", Settings))


def page() -> str:
    """Return the page as Markdown."""
    return "\n".join([_INTRODUCTION, *map(_written, sections())])


def _sections(path: str, description: str, model: type[BaseModel]) -> Iterator[Section]:
    texts = field_texts(model)
    settings = tuple(
        _setting(path, name, field, texts[name]) for name, field in model.model_fields.items()
    )
    yield Section(path, description, settings)
    for setting, field in zip(settings, model.model_fields.values(), strict=True):
        inner = _model_in(field.annotation)
        if setting.section is not None and inner is not None:
            yield from _sections(setting.section, setting.description, inner)


def _setting(section: str, name: str, field: FieldInfo, text: str) -> Setting:
    path = f"{section}.{name}".removeprefix(".")
    inner = None
    if _model_in(field.annotation) is not None:
        match get_origin(_given(field.annotation)):
            case None:
                inner = path
            case origin if origin is tuple:
                inner = f"{path}[]"
            case _:
                inner = f"{path}.NAME"
    return Setting(path, _kind(field), _default(field, inner), text, inner)


def _kind(field: FieldInfo) -> str:
    bounds = _bounds(field.metadata) or _bounds(_metadata(field.annotation))
    if bounds is not None:
        return _range(bounds)
    return _named(_given(field.annotation))


def _named(annotation: Any) -> str:
    """Return the words for a type, as an operator would say it."""
    if get_origin(annotation) is Annotated:
        bounds = _bounds(_metadata(annotation))
        return _range(bounds) if bounds is not None else _named(get_args(annotation)[0])
    arguments = get_args(annotation)
    match get_origin(annotation):
        case origin if origin is Literal:
            return ", ".join(f"`{value}`" for value in arguments)
        case origin if origin in (Union, types.UnionType):
            kinds = dict.fromkeys(_named(each) for each in arguments if each is not types.NoneType)
            return " or ".join(kinds)
        case origin if origin is tuple:
            of = _named(arguments[0])
            return "list of sections" if of == "section" else f"list of {of}"
        case None:
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                return "section"
            return {bool: "`true`, `false`", int: "number", float: "number"}.get(annotation, "text")
    return "sections by name" if _model_in(annotation) is not None else "texts by name"


def _range(bounds: Any) -> str:
    return f"{_KINDS[bounds.parse]}, {bounds.least} to {bounds.most}"


def _default(field: FieldInfo, section: str | None) -> str:
    extra = field.json_schema_extra
    if isinstance(extra, Mapping) and "default" in extra:
        return f"`{extra['default']}`"
    value = field.default
    if value is PydanticUndefined:
        return "*required*"
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        return "see below"
    if section is not None:
        return "none"
    bounds = _bounds(field.metadata)
    return f"`{_value(value, bounds)}`"


def _value(value: Any, bounds: Any) -> str:
    """Write a default as it would stand in a file."""
    kind = None if bounds is None else _KINDS[bounds.parse]
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    units = {"size": _SIZES, "duration": _DURATIONS}.get(kind or "", ())
    for unit, factor in units:
        if value and value % factor == 0:
            return f"{value / factor:g}{unit}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _bounds(metadata: Any) -> Any:
    """Return the validator that holds a value within two bounds, None if there is none."""
    validators = (getattr(each, "func", None) for each in metadata)
    return next((each for each in validators if isinstance(each, Bounded) and not each.word), None)


def _metadata(annotation: Any) -> tuple[Any, ...]:
    annotation = _given(annotation)
    return annotation.__metadata__ if get_origin(annotation) is Annotated else ()


def _given(annotation: Any) -> Any:
    """Return the type that a value has if it is not null."""
    kinds = [each for each in get_args(annotation) if each is not types.NoneType]
    is_optional = types.NoneType in get_args(annotation) and len(kinds) == 1
    return kinds[0] if is_optional else annotation


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section that a type holds, directly, in a list or by name; None if none."""
    annotation = _given(annotation)
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def _written(section: Section) -> str:
    rows = [
        f"| {_name(setting)} | {setting.kind} | {setting.default} | {_cell(setting.description)} |"
        for setting in section.settings
    ]
    title = section.path or "Top level"
    return "\n".join(
        [
            f"## {title}",
            "",
            section.description,
            "",
            "| setting | type | default | meaning |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _name(setting: Setting) -> str:
    name = f"`{setting.path.rpartition('.')[2]}`"
    return name if setting.section is None else f"[{name}](#{anchor(setting.section)})"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def anchor(title: str) -> str:
    """Return the anchor of a section's heading, which GitHub and MkDocs agree on."""
    return "".join(each for each in title.lower() if each.isalnum() or each in "_-")


def main() -> None:
    """Write the page, or tell whether it is up to date."""
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        sys.exit("docs/settings.md is not up to date: run `make docs`")


if __name__ == "__main__":
    main()
