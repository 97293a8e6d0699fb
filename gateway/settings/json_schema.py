"""The JSON Schema of a settings file, by which editors complete and check it."""

import ast
import inspect
from collections.abc import Iterator
from itertools import pairwise
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from gateway.settings.schema import Settings, all_sections
from gateway.settings.values.fields import Check, Section
from gateway.settings.values.units import Bounded

_FROM_ENVIRONMENT = "FromEnvironment"
_REFERENCE = {"$ref": f"#/$defs/{_FROM_ENVIRONMENT}"}
# Editors see the file before references are replaced. They do not know the values.
_DEFINITION = {
    "description": "A value from the environment: ${NAME}, or ${NAME:-default}.",
    "pattern": r"\$\{[A-Za-z_][A-Za-z0-9_]*(:-[^}]*)?\}",
    "type": "string",
}
_OF_VALUES = ("type", "enum", "const")


def settings_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a settings file.

    It allows all valid files, and some others: only ``load`` knows the bounds of sizes and
    durations, and names that must match. A reference to the environment is allowed wherever there
    is a value. Each description ends with the bounds and the default.
    """
    schema = Settings.model_json_schema(schema_generator=_WithoutTitles)
    for model in filter(None, (model for _, model in all_sections())):
        part = schema if model is Settings else schema["$defs"][model.__name__]
        for name, text in field_texts(model).items():
            described = {"description": _describe(model.model_fields[name], text)}
            part["properties"][name] = dict(sorted((part["properties"][name] | described).items()))
    for name in ("$defs", "properties"):
        schema[name] = _inside("properties", schema[name])
    schema["$defs"][_FROM_ENVIRONMENT] = _DEFINITION
    return {"$schema": _WithoutTitles.schema_dialect, "title": "Settings of Tensorgate", **schema}


def field_texts(model: type[BaseModel]) -> dict[str, str]:
    """Return what each setting of a section means: the text below its field in the source.

    Pydantic can read these texts too (use_attribute_docstrings), but then does so at each start.
    """
    texts = {}
    for section in reversed(model.__mro__[: model.__mro__.index(Section)]):
        for field, text in pairwise(_class_body(section)):
            match field, text:
                case (ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(written)))):
                    texts[name] = " ".join(written.split())
    return texts


def _class_body(section: type) -> list[ast.stmt]:
    try:
        [definition] = ast.parse(inspect.getsource(section)).body
    except OSError:
        return []  # a class that is made when the gateway starts
    assert isinstance(definition, ast.ClassDef)
    return definition.body


def _describe(field: FieldInfo, text: str) -> str:
    """Return what a setting means, its bounds and its default, in plain sentences."""
    bounded = next(_bounds((field.annotation, *field.metadata)), None)
    parts = [text]
    if bounded is not None:
        parts.append(bounded.describe())
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    default = extra.get("default", field.get_default())
    if bounded is not None and isinstance(default, int | float):
        parts.append(f"The default is {bounded.format(default)}.")
    elif isinstance(default, bool):
        parts.append(f"The default is {str(default).lower()}.")
    elif isinstance(default, str | int):
        parts.append(f"The default is {default}.")
    elif isinstance(default, tuple) and default:
        parts.append(f"The default is {', '.join(map(str, default))}.")
    return " ".join(parts)


def _bounds(kind: object) -> Iterator[Bounded]:
    """Yield the bounds that a type and its metadata name, however deep."""
    if isinstance(kind, Check):
        if isinstance(kind.func, Bounded):
            yield kind.func
        return
    for each in kind if isinstance(kind, tuple) else get_args(kind):
        if each is not NoneType and not isinstance(each, str):
            yield from _bounds(each)


class _WithoutTitles(GenerateJsonSchema):
    """Leaves out the titles of fields, which only repeat their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _allow_references(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that allows a reference to the environment wherever a value may stand."""
    schema = {name: _inside(name, part) for name, part in schema.items()}
    if not any(map(_is_value, schema.get("anyOf", [schema]))):
        return schema  # sections and lists are not written in the environment
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], _REFERENCE]}
    value = {name: schema.pop(name) for name in _OF_VALUES if name in schema}
    return {"anyOf": [value, _REFERENCE], **schema}


def _inside(name: str, part: Any) -> Any:
    match name:
        case "properties":
            return {each: _allow_references(schema) for each, schema in part.items()}
        case "items" | "additionalProperties" if isinstance(part, dict):
            return _allow_references(part)
        case "anyOf":
            # Kinds that are values are extended together, by the caller.
            kinds = [inner for kind in part for inner in kind.get("anyOf", [kind])]
            return [{each: _inside(each, of) for each, of in kind.items()} for kind in kinds]
    return part


def _is_value(kind: dict[str, Any]) -> bool:
    """Tell whether a reference stands for something of this kind that is not text anyway."""
    is_text = kind.get("type") == "string" and not {"enum", "const"} & kind.keys()
    is_section = kind.get("type") in ("object", "array", "null") or "$ref" in kind
    return not (is_text or is_section) and bool(kind.keys() & set(_OF_VALUES))
