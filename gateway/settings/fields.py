"""What the parts of the settings are made of: sections, and numbers within bounds."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, PlainValidator

from gateway.settings.quantities import (
    Between,
    parse_count,
    parse_duration,
    parse_share,
    parse_size,
    share_text,
)


class Section(BaseModel):
    """Hold keys and values, of which none is unknown and none changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def size(least: str, most: str) -> PlainValidator:
    """Return the check of a size in bytes."""
    return PlainValidator(Between(parse_size, least, most), json_schema_input_type=int | str)


def time(least: str, most: str) -> PlainValidator:
    """Return the check of a duration in seconds."""
    return PlainValidator(Between(parse_duration, least, most), json_schema_input_type=float | str)


def count(least: str, most: str) -> PlainValidator:
    """Return the check of a whole number."""
    return PlainValidator(Between(parse_count, least, most), json_schema_input_type=int | str)


def _file(value: object) -> object:
    if value == "":
        raise ValueError("expected the name of a file, got ''")
    return value


File = Annotated[str, BeforeValidator(_file)]
Percentage = Annotated[
    float,
    PlainValidator(Between(parse_share, "0%", "100%"), json_schema_input_type=str),
    PlainSerializer(share_text, return_type=str),
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
