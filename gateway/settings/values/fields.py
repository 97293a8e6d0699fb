"""Building blocks of the sections: numbers within bounds, lists, names of files."""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
)
from pydantic_core import CoreSchema, core_schema

from gateway.settings.values.addresses import Address, parse_address
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
    """Base of all sections: unknown keys are errors, and values never change.

    A start needs the schema of all settings only. So none is made of a section alone: sections that
    are defaults come from model_construct.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


_WRITTEN = {
    str: core_schema.str_schema(),
    int: core_schema.int_schema(),
    float: core_schema.float_schema(),
}


class Check:
    """Checks a value by ``func``; editors learn that operators write one of some types, or a word.

    It does what PlainValidator does, but that makes schemas of the types for each setting anew,
    at each start.
    """

    def __init__(self, func: Callable[[object], object], *written: type | str) -> None:
        self.func = func
        self._written = written

    def __get_pydantic_core_schema__(self, source: Any, handler: object) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.func)

    def __get_pydantic_json_schema__(
        self, schema: object, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        kinds: list[CoreSchema | tuple[CoreSchema, str]] = [
            core_schema.literal_schema([each]) if isinstance(each, str) else _WRITTEN[each]
            for each in self._written
        ]
        return handler(core_schema.union_schema(kinds))


def size(least: str, most: str) -> Check:
    """Return the check of a size in bytes."""
    return Check(Bounded(parse_size, least, most), int, str)


def time(least: str, most: str) -> Check:
    """Return the check of a duration in seconds."""
    return Check(Bounded(parse_duration, least, most), float, str)


def count(least: str, most: str) -> Check:
    """Return the check of a whole number."""
    return Check(Bounded(parse_count, least, most), int, str)


def count_or(word: str, least: str, most: str) -> Check:
    """Return the check of a whole number or one word."""
    return Check(Bounded(parse_count, least, most, word), int, word)


def as_tuple(value: object) -> tuple[object, ...]:
    """Return the items of a list; a single item without brackets is a list of one.

    Anything else has no items.
    """
    if isinstance(value, list | tuple):
        return tuple(value)
    return (value,) if isinstance(value, str | int | float) else ()


class _OneOrMore:
    """Takes a single item as a list of one, in files and in the JSON Schema."""

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
        hint = f"; did you mean [{items}]?" if len(items) < _LONGEST_HINT else ""
        raise ValueError(f"expected one, or a list in [ ], got {describe(text)}{hint}")


Item = TypeVar("Item")
OneOrMore = Annotated[tuple[Item, ...], _OneOrMore()]
"""A list of words, numbers or addresses."""


def _file(value: object) -> object:
    if value == "":
        raise ValueError("expected the name of a file, got ''")
    return value


File = Annotated[str, BeforeValidator(_file)]
ListenAddress = Annotated[Address, Check(parse_address, str), PlainSerializer(str, return_type=str)]
Percentage = Annotated[
    float,
    Check(Bounded(parse_percent, "0%", "100%"), float, str),
    PlainSerializer(format_percent, return_type=str),
]
