"""The settings of a gateway: names, types, defaults, bounds.

Values are checked by functions that speak to the operator: each raises ValueError with a message
that stands as it is. ``load`` adds the place in the file and words what pydantic itself refuses.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    StrictBool,
    ValidationError,
    model_validator,
)
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import ErrorDetails, InitErrorDetails

from gateway.settings.addresses import (
    Address,
    TcpAddress,
    parse_address,
    parse_endpoint,
    parse_host,
)
from gateway.settings.fields import (
    HeaderBytes,
    IdleTime,
    JsonDepth,
    RequestBytes,
    Section,
    SpoolBytes,
    TotalTime,
    count,
    time,
)
from gateway.settings.quantities import Between, parse_count
from gateway.settings.routes import Route
from gateway.settings.whole import faults, with_routes
from gateway.settings.words import KeyPath, describe

_MIB = 2**20
_DIALECTS_TO_COME = ("auto", "kserve", "openvino", "json")


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


def _file(value: object) -> object:
    if value == "":
        raise ValueError("expected the name of a file, got ''")
    return value


def _several(value: object) -> object:
    return value if isinstance(value, list | tuple) else (parse_address(value),)


_Listen = Annotated[
    Address,
    PlainValidator(parse_address, json_schema_input_type=str),
    PlainSerializer(str, return_type=str),
]
_File = Annotated[str, BeforeValidator(_file)]
_Endpoint = Annotated[str, PlainValidator(parse_endpoint, json_schema_input_type=str)]


class UpstreamTls(Section):
    """Say how TLS is spoken to the endpoints that are https."""

    ca: _File | None = Field(
        default=None,
        description="The file of the certificates, PEM, that are trusted instead of the system's.",
    )
    certificate: _File | None = Field(
        default=None,
        description="The file of the certificate, PEM, that the gateway shows to servers, followed"
        " by those of its issuers.",
    )
    key: _File | None = Field(
        default=None,
        description="The file of the certificate's key, PEM, without a password.",
    )
    server_name: Annotated[str, PlainValidator(parse_host, json_schema_input_type=str)] | None = (
        Field(
            default=None,
            description="What the servers' certificates must name; the endpoint's host, if nothing"
            " is said.",
        )
    )
    verify: StrictBool = Field(
        default=True,
        description="Whether the servers' certificates are checked. Without that, anybody on the"
        " way can read and change what is sent.",
    )


class Upstream(Section):
    """Name a group of servers that answer alike."""

    endpoints: tuple[_Endpoint, ...] = Field(
        min_length=1,
        description="The servers, each as http://host:port, https://host:port or unix:/path.",
    )
    tls: UpstreamTls | None = Field(
        default=None, description="How TLS is spoken to the endpoints that are https."
    )
    dialect: Annotated[Literal["triton"], BeforeValidator(_known_dialect)] = Field(
        default="triton", description="How the servers speak the protocol."
    )


class ClientTls(Section):
    """Speak TLS with clients, on all TCP addresses."""

    certificate: _File = Field(
        description="The file of the gateway's certificate, PEM, followed by those of its issuers."
    )
    key: _File = Field(description="The file of the certificate's key, PEM, without a password.")
    client_ca: _File | None = Field(
        default=None,
        description="The file of the certificates, PEM, of those who issue certificates to"
        " clients.",
    )
    client_certificates: Literal["required", "optional"] | None = Field(
        default=None,
        description="Whether clients must show a certificate, where client_ca is given: required,"
        " if nothing is said.",
    )


class Limits(Section):
    """Bound what one exchange may take: sizes in bytes, times in seconds."""

    request_bytes: RequestBytes = Field(default=64 * _MIB, description="The largest request body.")
    header_bytes: HeaderBytes = Field(
        default=1 * _MIB,
        description="The largest JSON part of a request, its data arrays cut out, or of an answer.",
    )
    json_depth: JsonDepth = Field(
        default=64, description="How deep the JSON of a request may nest."
    )
    spool_bytes: SpoolBytes = Field(
        default=64 * _MIB,
        description="What is held of a body whose length is not known, or of an answer in mixed"
        " form.",
    )
    connect_time: Annotated[float, time("1ms", "1h")] = Field(
        default=5.0, description="How long connecting to a server may take."
    )
    idle_time: IdleTime = Field(
        default=300.0, description="How long no byte may move in a direction where one should."
    )
    total_time: TotalTime = Field(default=3600.0, description="How long one exchange may take.")
    drain_time: Annotated[float, time("1ms", "24h")] = Field(
        default=30.0, description="How long running exchanges may go on after SIGTERM."
    )
    metadata_time: Annotated[float, time("1ms", "24h")] = Field(
        default=60.0,
        description="How long a model's metadata is used before it is asked for again.",
    )
    metadata_models: Annotated[int, count("1", "1000000")] = Field(
        default=1024, description="How many models' metadata is kept."
    )


class Log(Section):
    """Say what is logged."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The least severity that is logged."
    )
    access: StrictBool = Field(
        default=True, description="Whether each exchange is logged with one line."
    )


class Settings(Section):
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
    tls: ClientTls | None = Field(
        default=None,
        description="TLS on the TCP addresses, if it is given; Unix sockets stay as they are.",
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
