"""The settings of a gateway: names, types, defaults, bounds.

Values are checked by functions that speak to the operator: each raises ValueError with a message
that stands as it is. ``load`` adds the place in the file and words what pydantic itself refuses.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    StrictBool,
    ValidationError,
    model_validator,
)
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import ErrorDetails, InitErrorDetails

from gateway.settings.addresses import Address, TcpAddress, parse_address, parse_endpoint
from gateway.settings.quantities import Between, parse_count, parse_duration, parse_size
from gateway.settings.whole import faults, with_routes
from gateway.settings.words import KeyPath, describe

_MIB = 2**20
_DIALECTS_TO_COME = ("auto", "kserve", "openvino", "json")


def _size(least: str, most: str) -> PlainValidator:
    return PlainValidator(Between(parse_size, least, most), json_schema_input_type=int | str)


def _time(least: str, most: str) -> PlainValidator:
    return PlainValidator(Between(parse_duration, least, most), json_schema_input_type=float | str)


def _count(least: str, most: str) -> PlainValidator:
    return PlainValidator(Between(parse_count, least, most), json_schema_input_type=int)


_WORKERS = Between(parse_count, "1", "256")


def _workers(value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    try:
        return _WORKERS(value)
    except ValueError:
        raise ValueError(f"expected 1 to 256, or auto, got {describe(value)}") from None


def _known_dialect(value: object) -> object:
    if value in _DIALECTS_TO_COME:
        raise ValueError(f"the dialect {value} is not available yet; triton is")
    return value


def _null_by_name(value: object) -> object:
    # Unquoted, YAML reads the policy's name as its null value.
    return "null" if value is None else value


def _several(value: object) -> object:
    return value if isinstance(value, list | tuple) else (parse_address(value),)


_Listen = Annotated[
    Address,
    PlainValidator(parse_address, json_schema_input_type=str),
    PlainSerializer(str, return_type=str),
]
_Endpoint = Annotated[str, PlainValidator(parse_endpoint, json_schema_input_type=str)]
_NonFinite = Literal["literal", "null", "string", "error"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Upstream(_Section):
    """Name a group of servers that answer alike."""

    endpoints: tuple[_Endpoint, ...] = Field(
        min_length=1, description="The servers, each as http://host:port."
    )
    dialect: Annotated[Literal["triton"], BeforeValidator(_known_dialect)] = Field(
        default="triton", description="How the servers speak the protocol."
    )


class Route(_Section):
    """Send requests to an upstream, and say how its answers become JSON."""

    upstream: str = Field(description="The name of an upstream.")
    nonfinite: Annotated[
        _NonFinite, BeforeValidator(_null_by_name, json_schema_input_type=_NonFinite | None)
    ] = Field(
        default="literal",
        description="What NaN and infinities become in JSON: the bare tokens that Triton writes"
        " (literal), null, a string, or an error.",
    )
    bytes: Literal["utf8", "base64"] = Field(
        default="utf8",
        description="What BYTES elements become in JSON: text, which is an error for a tensor"
        " that is not UTF-8, or base64.",
    )


class Limits(_Section):
    """Bound what one exchange may take: sizes in bytes, times in seconds."""

    request_bytes: Annotated[int, _size("1KiB", "1TiB")] = Field(
        default=64 * _MIB, description="The largest request body."
    )
    header_bytes: Annotated[int, _size("1KiB", "1GiB")] = Field(
        default=1 * _MIB,
        description="The largest JSON part of a request, its data arrays cut out, or of an answer.",
    )
    json_depth: Annotated[int, _count("1", "200")] = Field(
        default=64, description="How deep the JSON of a request may nest."
    )
    spool_bytes: Annotated[int, _size("1KiB", "1TiB")] = Field(
        default=64 * _MIB,
        description="What is held of a body whose length is not known, or of an answer in mixed"
        " form.",
    )
    connect_time: Annotated[float, _time("1ms", "1h")] = Field(
        default=5.0, description="How long connecting to a server may take."
    )
    idle_time: Annotated[float, _time("1ms", "24h")] = Field(
        default=300.0, description="How long no byte may move in a direction where one should."
    )
    total_time: Annotated[float, _time("1ms", "168h")] = Field(
        default=3600.0, description="How long one exchange may take."
    )
    drain_time: Annotated[float, _time("1ms", "24h")] = Field(
        default=30.0, description="How long running exchanges may go on after SIGTERM."
    )
    metadata_time: Annotated[float, _time("1ms", "24h")] = Field(
        default=60.0,
        description="How long a model's metadata is used before it is asked for again.",
    )
    metadata_models: Annotated[int, _count("1", "1000000")] = Field(
        default=1024, description="How many models' metadata is kept."
    )


class Log(_Section):
    """Say what is logged."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The least severity that is logged."
    )
    access: StrictBool = Field(
        default=True, description="Whether each exchange is logged with one line."
    )


class Settings(_Section):
    """Hold all settings of a gateway."""

    listen: Annotated[
        tuple[_Listen, ...],
        BeforeValidator(_several, json_schema_input_type=str | list[str]),
    ] = Field(
        default=(TcpAddress("127.0.0.1", 8080),),
        min_length=1,
        description="Where clients connect: host:port, [IPv6]:port or unix:/path, one or a list.",
        json_schema_extra={"default": "127.0.0.1:8080"},
    )
    workers: Annotated[
        int | Literal["auto"],
        PlainValidator(_workers, json_schema_input_type=int | Literal["auto"]),
    ] = Field(
        default=1,
        description="How many processes serve, with an event loop each; auto is one per core that"
        " may be used.",
    )
    helper: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Whether each process has another one beside it that converts half of the "
        "numbers of large JSON bodies, started when the first of those comes; auto is where there "
        "are more cores than workers.",
    )
    upstreams: Mapping[str, Upstream] = Field(
        min_length=1, description="The groups of servers, by name."
    )
    routes: tuple[Route, ...] = Field(
        default=(),
        min_length=1,
        description="Which upstream answers; where there is just one, it need not be said.",
    )
    limits: Limits = Field(default=Limits(), description="What one exchange may take.")
    log: Log = Field(default=Log(), description="What is logged.")

    @model_validator(mode="wrap")
    @classmethod
    def _hold_together(cls, value: Any, build: ModelWrapValidatorHandler["Settings"]) -> "Settings":
        """Report what only the whole can show together with the faults of its parts."""
        errors = [_error(path, message) for path, message in faults(value)]
        try:
            settings = build(with_routes(value))
        except ValidationError as error:
            errors += [_again(details) for details in error.errors(include_url=False)]
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return settings


def _error(path: KeyPath, message: str) -> InitErrorDetails:
    error = ValueError(message)
    return InitErrorDetails(type="value_error", loc=path, input=None, ctx={"error": error})


def _again(details: ErrorDetails) -> InitErrorDetails:
    """Return an error in the form from which pydantic builds a new report."""
    return InitErrorDetails(
        type=details["type"],
        loc=details["loc"],
        input=details["input"],
        ctx=details.get("ctx", {}),
    )
