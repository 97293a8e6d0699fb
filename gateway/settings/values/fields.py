"""What the parts of the settings are made of: sections, and numbers within bounds."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    PlainValidator,
)
from pydantic_core import CoreSchema, core_schema

from gateway.settings.values.units import (
    Bounded,
    format_percent,
    parse_count,
    parse_duration,
    parse_percent,
    parse_size,
)
from gateway.settings.values.wording import describe

_LONGEST_HINT = 100
"""Characters of a list that a message proposes."""


class Section(BaseModel):
    """Hold keys and values, of which none is unknown and none changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def size(least: str, most: str) -> PlainValidator:
    """Return the check of a size in bytes."""
    return PlainValidator(Bounded(parse_size, least, most), json_schema_input_type=int | str)


def time(least: str, most: str) -> PlainValidator:
    """Return the check of a duration in seconds."""
    return PlainValidator(Bounded(parse_duration, least, most), json_schema_input_type=float | str)


def count(least: str, most: str) -> PlainValidator:
    """Return the check of a whole number."""
    return PlainValidator(Bounded(parse_count, least, most), json_schema_input_type=int | str)


def as_tuple(value: object) -> tuple[object, ...]:
    """Return the items of a list, of which a single one may stand without brackets.

    Of what is no list, and no single item either, there are none.
    """
    if isinstance(value, list | tuple):
        return tuple(value)
    return (value,) if isinstance(value, str | int | float) else ()


class _OneOrMore:
    """Takes a single item for a list of one, in files and in the JSON Schema."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(_as_list, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        several = handler(schema)
        # Where there are words that stand for lists, the schema says so already.
        return {"anyOf": [several["items"], several]} if "items" in several else several


def _as_list(value: object) -> object:
    if isinstance(value, str):
        _check_is_one(value)
    if isinstance(value, Mapping):
        raise ValueError(f"expected one or a list, got {describe(value)}")
    return as_tuple(value) or value


def _check_is_one(text: str) -> None:
    """Raise ValueError for text that was meant as a list of several."""
    if re.match("-[^ ]", text):
        raise ValueError(f"the - of a list needs a space behind it, got {describe(text)}")
    if "," in text and not text.startswith("unix:"):
        items = ", ".join(part.strip() for part in text.split(","))
        raise ValueError(f"expected one, or a list in [ ], got {describe(text)}{_or(items)}")


def _or(items: str) -> str:
    return f"; did you mean [{items}]?" if len(items) < _LONGEST_HINT else ""


Item = TypeVar("Item")
OneOrMore = Annotated[tuple[Item, ...], _OneOrMore()]
"""A list of words, numbers or addresses."""


def _file(value: object) -> object:
    if value == "":
        raise ValueError("expected the name of a file, got ''")
    return value


File = Annotated[str, BeforeValidator(_file)]
Percentage = Annotated[
    float,
    PlainValidator(Bounded(parse_percent, "0%", "100%"), json_schema_input_type=float | str),
    PlainSerializer(format_percent, return_type=str),
]
RequestBytes = Annotated[int, size("1KiB", "1TiB")]
HeaderBytes = Annotated[int, size("1KiB", "1GiB")]
Inflation = Annotated[int, count("1", "10000")]
JsonDepth = Annotated[int, count("1", "200")]
MaxTensors = Annotated[int, count("1", "65536")]
SpoolBytes = Annotated[int, size("1KiB", "1TiB")]
BodyRate = Annotated[int, size("0", "1GiB")]
BodyGrace = Annotated[float, time("0s", "1h")]
IdleTime = Annotated[float, time("1ms", "24h")]
TotalTime = Annotated[float, time("1ms", "168h")]
