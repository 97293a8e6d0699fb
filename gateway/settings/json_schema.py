"""The settings as JSON Schema, with which editors complete and check what is written."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from gateway.settings.schema import Settings

_FROM_ENVIRONMENT = "FromEnvironment"
_REFERENCE = {"$ref": f"#/$defs/{_FROM_ENVIRONMENT}"}
# Editors see the file before references are replaced. What they give is not known there.
_DEFINITION = {
    "description": "A value from the environment: ${NAME}, or ${NAME:-default}.",
    "pattern": r"\$\{[A-Za-z_][A-Za-z0-9_]*(:-[^}]*)?\}",
    "type": "string",
}
_OF_VALUES = ("type", "enum", "const")


def settings_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a settings file.

    It allows all that is right, but not only that: bounds of sizes and durations, names that must
    match and the like are known to ``load`` alone. A reference to the environment is allowed
    wherever there is a value.
    """
    schema = Settings.model_json_schema(schema_generator=_Untitled)
    schema["$defs"] = {name: _open(each) for name, each in schema["$defs"].items()}
    schema["properties"] = {name: _open(each) for name, each in schema["properties"].items()}
    schema["$defs"][_FROM_ENVIRONMENT] = _DEFINITION
    return {"$schema": _Untitled.schema_dialect, "title": "Settings of Tensorgate", **schema}


class _Untitled(GenerateJsonSchema):
    """Leaves out the titles of fields, which only repeat their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _open(schema: dict[str, Any]) -> dict[str, Any]:
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
            return {each: _open(schema) for each, schema in part.items()}
        case "items" | "additionalProperties" if isinstance(part, dict):
            return _open(part)
        case "anyOf":
            return [_opened_inside(kind) for kind in _flat(part)]
    return part


def _opened_inside(kind: dict[str, Any]) -> dict[str, Any]:
    """Return one of several kinds; those that are values are opened together."""
    return {name: _inside(name, part) for name, part in kind.items()}


def _is_value(kind: dict[str, Any]) -> bool:
    """Tell whether a reference stands for something of this kind, and is not of it anyway."""
    is_text = kind.get("type") == "string" and not {"enum", "const"} & kind.keys()
    is_section = kind.get("type") in ("object", "array", "null") or "$ref" in kind
    return not (is_text or is_section) and bool(kind.keys() & set(_OF_VALUES))


def _flat(kinds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return kinds of which none is itself several."""
    return [inner for kind in kinds for inner in kind.get("anyOf", [kind])]
