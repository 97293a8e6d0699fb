"""The settings of a gateway as one model, and the keys of each section of it.

Checks raise ValueError with a message for the operator. ``load`` adds the position in the file, and
replaces the messages of pydantic itself.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, Field, StrictBool, ValidationError, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import ErrorDetails, InitErrorDetails

from gateway.settings.cross_checks import cross_check, with_default_route
from gateway.settings.limits import Concurrency, Limits
from gateway.settings.log import Log
from gateway.settings.models import Model
from gateway.settings.routes import Route
from gateway.settings.sections import Admin, ApiKeys, Forwarded, Tracing, as_admin_section
from gateway.settings.upstreams import Upstream
from gateway.settings.values.addresses import TcpAddress
from gateway.settings.values.fields import File, ListenAddress, OneOrMore, Section, count_or
from gateway.settings.values.wording import KeyPath


class ClientTls(Section):
    """TLS with clients, on all TCP addresses."""

    certificate: File
    """PEM file of the gateway's certificate, followed by those of its issuers."""
    key: File
    """PEM file of the certificate's key, without a password."""
    client_ca: File | None = None
    """PEM file of the certificates of those who issue certificates to clients. Without it, clients
    need none."""
    client_certificates: Literal["required", "optional"] | None = None
    """Whether clients must show a certificate. With client_ca, the default is required."""


class Settings(Section):
    """All settings of a gateway."""

    listen: OneOrMore[ListenAddress] = Field(
        default=(TcpAddress("127.0.0.1", 8080),),
        min_length=1,
        json_schema_extra={"default": "127.0.0.1:8080"},
    )
    """Addresses for clients: HOST:PORT, [IPv6]:PORT or unix:/PATH. One, or a list."""
    admin: Annotated[
        Admin, BeforeValidator(as_admin_section, json_schema_input_type=str | Admin | None)
    ] = Admin.model_construct()
    """The address for operators, and what they may do there. An address alone is short for its
    listen."""
    tls: ClientTls | None = None
    """TLS with clients on the TCP addresses of listen. Unix sockets have none."""
    workers: Annotated[int | Literal["auto"], count_or("auto", "1", "256")] = 1
    """Number of worker processes. auto is one for each usable core."""
    offload: Annotated[int | Literal["auto"], count_or("auto", "0", "64")] = "auto"
    """Number of threads with which each worker converts large JSON bodies on other cores. auto is
    its share of the cores beyond those of the workers, at most 4. It takes the compiled gateway."""
    watch: StrictBool = True
    """Whether the gateway reloads this file and the upstreams' certificates when they change.
    SIGHUP reloads them in any case."""
    upstreams: Mapping[str, Upstream] = Field(min_length=1)
    """Groups of servers, by name."""
    api_keys: Mapping[str, ApiKeys] = {}
    """Groups of API keys that routes require, by name."""
    routes: tuple[Route, ...] = Field(default=(), min_length=1)
    """Routes of requests to upstreams; the first that matches is taken. With one upstream, the
    default is a route of all requests to it."""
    models: Mapping[str, Model] = {}
    """Declared models, by the names that servers know. The gateway checks requests against them,
    and makes raw binary requests by them where a server has no metadata."""
    forwarded: Forwarded = Forwarded.model_construct()
    """Headers that tell servers about clients."""
    request_id: StrictBool = True
    """Whether each request has an id, in X-Request-Id and in the log. The gateway keeps the
    client's own id, or makes one."""
    expose_endpoints: StrictBool = False
    """Whether errors tell clients the addresses of servers. If not, they tell the name of the
    upstream. The log has the addresses in any case."""
    concurrency: Concurrency = Concurrency.model_construct()
    """How many calls may be at servers at a time. An upstream can have such a limit of its own."""
    limits: Limits = Limits.model_construct()
    """What one call, one connection and the gateway may take."""
    log: Log = Log.model_construct()
    """What the gateway logs."""
    tracing: Tracing | None = None
    """Traces of calls, over OpenTelemetry's OTLP. Without it, there are none. It takes the extra
    tensorgate[otel]."""

    @model_validator(mode="wrap")
    @classmethod
    def _check_across_sections(
        cls, value: Any, build: ModelWrapValidatorHandler["Settings"]
    ) -> "Settings":
        """Report the errors across sections together with those within them."""
        errors = [_as_error(path, message) for path, message in cross_check(value)]
        try:
            settings = build(with_default_route(value))
        except ValidationError as error:
            errors += [_as_new(details) for details in error.errors(include_url=False)]
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return settings


def _as_error(path: KeyPath, message: str) -> InitErrorDetails:
    error = ValueError(message)
    return InitErrorDetails(type="value_error", loc=path, input=None, ctx={"error": error})


def _as_new(details: ErrorDetails) -> InitErrorDetails:
    """Return an error in the form from which pydantic builds a new report."""
    return InitErrorDetails(
        type=details["type"], loc=details["loc"], input=details["input"], ctx=details.get("ctx", {})
    )


def section_keys(path: KeyPath) -> tuple[str, ...] | None:
    """Return the keys of a section; None where there is no section.

    There are none where the operator chooses them, as the names of upstreams.
    """
    for steps, model in all_sections():
        fits = (step in (part, _ITEM, _NAME) for step, part in zip(steps, path, strict=False))
        if len(steps) == len(path) and all(fits):
            return () if model is None else tuple(model.model_fields)
    return None


def sections_with_key(key: str) -> list[str]:
    """Return the paths of the sections that have a key."""
    return [
        ".".join(steps).replace(f".{_ITEM}", _ITEM)
        for steps, model in all_sections()
        if model is not None and key in model.model_fields
    ]


_Section = tuple[tuple[str, ...], type[BaseModel] | None]
"""The path and the model of a section; no model if the operator chooses the keys."""
_ITEM, _NAME = "[]", "NAME"
"""The steps of such paths to an item of a list, and to what the operator names."""


@cache
def all_sections() -> tuple[_Section, ...]:
    """Return all sections."""
    return tuple(_sections((), Settings))


def _sections(steps: tuple[str, ...], kind: type[BaseModel]) -> Iterator[_Section]:
    yield steps, kind
    for name, field in kind.model_fields.items():
        declared, at = _if_given(field.annotation), (*steps, name)
        if _is_model(declared):
            yield from _sections(at, declared)
        elif (inner := _model_in(declared)) is not None:
            is_list = getattr(declared, "__origin__", None) is tuple
            if not is_list:
                yield at, None
            yield from _sections((*at, _ITEM if is_list else _NAME), inner)


def _model_in(kind: Any) -> type[BaseModel] | None:
    """Return the section that a type holds, or one of the types that it is made of."""
    for each in get_args(kind):
        if found := each if _is_model(each) else _model_in(each):
            return found
    return None


def _if_given(kind: Any) -> Any:
    """Return the type of a value that is not null."""
    kinds = get_args(kind)
    return next(each for each in kinds if each is not NoneType) if NoneType in kinds else kind


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
