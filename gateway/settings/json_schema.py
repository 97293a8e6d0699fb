"""The settings as JSON Schema, with which editors complete and check what is written."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from gateway.settings.schema import Settings


def settings_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a settings file.

    It allows all that is right, but not only that: bounds of sizes and durations, names that must
    match and the like are known to ``load`` alone.
    """
    schema = Settings.model_json_schema(schema_generator=_Untitled)
    return {"$schema": _Untitled.schema_dialect, "title": "Settings of Tensorgate", **schema}


class _Untitled(GenerateJsonSchema):
    """Leaves out the titles of fields, which only repeat their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False
