"""The settings of a gateway: names, types, defaults, bounds.

Values are checked by functions that speak to the operator: each raises ValueError with a message
that stands as it is. ``load`` adds the place in the file and words what pydantic itself refuses.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    StrictBool,
    ValidationError,
    model_validator,
)
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import ErrorDetails, InitErrorDetails

from gateway.settings.api_keys import ApiKeys
from gateway.settings.cross_checks import cross_check, with_default_route
from gateway.settings.forwarded import Forwarded
from gateway.settings.limits import Concurrency, Limits
from gateway.settings.models import Model
from gateway.settings.routes import Route
from gateway.settings.upstreams import Upstream
from gateway.settings.values.addresses import Address, TcpAddress, parse_address
from gateway.settings.values.fields import File, OneOrMore, Section
from gateway.settings.values.units import Bounded, parse_count
from gateway.settings.values.wording import KeyPath, describe, did_you_mean

_WORKERS = Bounded(parse_count, "1", "256")


def _workers(value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    try:
        return _WORKERS(value)
    except ValueError:
        hint = did_you_mean(value, ["auto"])
        raise ValueError(f"expected 1 to 256, or auto, got {describe(value)}{hint}") from None


_Listen = Annotated[
    Address,
    PlainValidator(parse_address, json_schema_input_type=str),
    PlainSerializer(str, return_type=str),
]


def _known_port(address: Address) -> Address:
    if isinstance(address, TcpAddress) and address.port == 0:
        raise ValueError("expected a port from 1 to 65535, got 0")
    return address


_Admin = Annotated[_Listen, AfterValidator(_known_port)]


class ClientTls(Section):
    """Speak TLS with clients, on all TCP addresses."""

    certificate: File = Field(
        description="The file of the gateway's certificate, PEM, followed by those of its issuers."
    )
    key: File = Field(description="The file of the certificate's key, PEM, without a password.")
    client_ca: File | None = Field(
        default=None,
        description="The file of the certificates, PEM, of those who issue certificates to"
        " clients.",
    )
    client_certificates: Literal["required", "optional"] | None = Field(
        default=None,
        description="Whether clients must show a certificate, where client_ca is given: required,"
        " if nothing is said.",
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

    listen: OneOrMore[_Listen] = Field(
        default=(TcpAddress("127.0.0.1", 8080),),
        min_length=1,
        description="Where clients connect: host:port, [IPv6]:port or unix:/path, one or a list.",
        json_schema_extra={"default": "127.0.0.1:8080"},
    )
    admin: _Admin | None = Field(
        default=None,
        description="Where operators read how the gateway does, over plain HTTP: host:port,"
        " [IPv6]:port or unix:/path.",
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
    offload: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Whether each process has another one beside it that converts half of the "
        "numbers of large JSON bodies, started when the first of those comes; auto is where there "
        "are more cores than workers.",
    )
    watch: StrictBool = Field(
        default=True,
        description="Whether this file, and those of certificates for servers, are looked at every"
        " few seconds, and used when they have changed; SIGHUP has them read in any case.",
    )
    upstreams: Mapping[str, Upstream] = Field(
        min_length=1, description="The groups of servers, by name."
    )
    api_keys: Mapping[str, ApiKeys] = Field(
        default={}, description="The groups of keys that routes ask clients for, by name."
    )
    routes: tuple[Route, ...] = Field(
        default=(),
        min_length=1,
        description="Which upstream answers; where there is just one, it need not be said.",
    )
    models: Mapping[str, Model] = Field(
        default={},
        description="What models take and give, by the names that servers know: requests are held"
        " to it, and raw binary ones are made of it where a server does not say it.",
    )
    forwarded: Forwarded = Field(
        default=Forwarded(), description="What servers are told of clients."
    )
    request_id: StrictBool = Field(
        default=True,
        description="Whether each request has an id, in X-Request-Id and in the log: the client's"
        " own, or one that is made.",
    )
    concurrency: Concurrency = Field(
        default=Concurrency(),
        description="How many requests may be at servers at a time; an upstream can have such a"
        " limit of its own.",
    )
    limits: Limits = Field(default=Limits(), description="What one exchange may take.")
    log: Log = Field(default=Log(), description="What is logged.")

    @model_validator(mode="wrap")
    @classmethod
    def _hold_together(cls, value: Any, build: ModelWrapValidatorHandler["Settings"]) -> "Settings":
        """Report what only the whole can show together with the faults of its parts."""
        errors = [_error(path, message) for path, message in cross_check(value)]
        try:
            settings = build(with_default_route(value))
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
