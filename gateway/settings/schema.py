"""The settings of a gateway as one model, and their JSON Schema.

Checks raise ValueError with a message for the operator. ``load`` adds the position in the file, and
replaces the messages of pydantic itself.
"""

from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    StrictBool,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails, InitErrorDetails

from gateway.settings.admin import Admin, as_admin_section
from gateway.settings.api_keys import ApiKeys
from gateway.settings.cross_checks import cross_check, with_default_route
from gateway.settings.forwarded import Forwarded
from gateway.settings.limits import Concurrency, Limits
from gateway.settings.log import Log
from gateway.settings.models import Model
from gateway.settings.routes import Route
from gateway.settings.tracing import Tracing
from gateway.settings.upstreams import Upstream
from gateway.settings.values.addresses import TcpAddress
from gateway.settings.values.fields import Check, File, ListenAddress, OneOrMore, Section, count_or
from gateway.settings.values.units import Bounded, BoundedOr
from gateway.settings.values.wording import KeyPath


class ClientTls(Section):
    """TLS with clients, on all TCP addresses."""

    certificate: File = Field(
        description="PEM file of the gateway's certificate, followed by those of its issuers."
    )
    key: File = Field(description="PEM file of the certificate's key, without a password.")
    client_ca: File | None = Field(
        default=None,
        description="PEM file of the certificates of those who issue certificates to clients."
        " Without it, clients need none.",
    )
    client_certificates: Literal["required", "optional"] | None = Field(
        default=None,
        description="Whether clients must show a certificate. With client_ca, the default is"
        " required.",
    )


class Settings(Section):
    """All settings of a gateway."""

    listen: OneOrMore[ListenAddress] = Field(
        default=(TcpAddress("127.0.0.1", 8080),),
        min_length=1,
        description="Addresses for clients: HOST:PORT, [IPv6]:PORT or unix:/PATH. One, or a list.",
        json_schema_extra={"default": "127.0.0.1:8080"},
    )
    admin: Annotated[
        Admin, BeforeValidator(as_admin_section, json_schema_input_type=str | Admin | None)
    ] = Field(
        default=Admin.model_construct(),
        description="The address for operators, and what they may do there. An address alone is"
        " short for its listen.",
    )
    tls: ClientTls | None = Field(
        default=None,
        description="TLS with clients on the TCP addresses of listen. Unix sockets have none.",
    )
    workers: Annotated[int | Literal["auto"], count_or("auto", "1", "256")] = Field(
        default=1,
        description="Number of worker processes. auto is one for each usable core.",
    )
    offload: Annotated[int | Literal["auto"], count_or("auto", "0", "64")] = Field(
        default="auto",
        description="Number of threads with which each worker converts large JSON bodies on other"
        " cores. auto is its share of the cores beyond those of the workers, at most 4. It takes"
        " the compiled gateway.",
    )
    watch: StrictBool = Field(
        default=True,
        description="Whether the gateway reloads this file and the upstreams' certificates when"
        " they change. SIGHUP reloads them in any case.",
    )
    upstreams: Mapping[str, Upstream] = Field(
        min_length=1, description="Groups of servers, by name."
    )
    api_keys: Mapping[str, ApiKeys] = Field(
        default={}, description="Groups of API keys that routes require, by name."
    )
    routes: tuple[Route, ...] = Field(
        default=(),
        min_length=1,
        description="Routes of requests to upstreams; the first that matches is taken. With one"
        " upstream, the default is a route of all requests to it.",
    )
    models: Mapping[str, Model] = Field(
        default={},
        description="Declared models, by the names that servers know. The gateway checks requests"
        " against them, and makes raw binary requests by them where a server has no metadata.",
    )
    forwarded: Forwarded = Field(
        default=Forwarded.model_construct(), description="Headers that tell servers about clients."
    )
    request_id: StrictBool = Field(
        default=True,
        description="Whether each request has an id, in X-Request-Id and in the log. The gateway"
        " keeps the client's own id, or makes one.",
    )
    expose_endpoints: StrictBool = Field(
        default=False,
        description="Whether errors tell clients the addresses of servers. If not, they tell the"
        " name of the upstream. The log has the addresses in any case.",
    )
    concurrency: Concurrency = Field(
        default=Concurrency.model_construct(),
        description="How many calls may be at servers at a time. An upstream can have such a limit"
        " of its own.",
    )
    limits: Limits = Field(
        default=Limits.model_construct(),
        description="What one call, one connection and the gateway may take.",
    )
    log: Log = Field(default=Log.model_construct(), description="What the gateway logs.")
    tracing: Tracing | None = Field(
        default=None,
        description="Traces of calls, over OpenTelemetry's OTLP. Without it, there are none. It"
        " takes the extra tensorgate[otel].",
    )

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
        type=details["type"],
        loc=details["loc"],
        input=details["input"],
        ctx=details.get("ctx", {}),
    )


# --- JSON Schema, by which editors complete and check a settings file

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
    for model in _models(Settings):
        part = schema if model is Settings else schema["$defs"][model.__name__]
        for name, field in model.model_fields.items():
            part["properties"][name]["description"] = describe_field(field)
    schema["$defs"] = {name: _allow_references(each) for name, each in schema["$defs"].items()}
    schema["properties"] = {
        name: _allow_references(each) for name, each in schema["properties"].items()
    }
    schema["$defs"][_FROM_ENVIRONMENT] = _DEFINITION
    return {"$schema": _WithoutTitles.schema_dialect, "title": "Settings of Tensorgate", **schema}


def describe_field(field: FieldInfo) -> str:
    """Return what a setting means, its bounds and its default, in plain sentences."""
    bounded = next(_bounds((field.annotation, *field.metadata)), None)
    parts = [field.description or ""]
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


def _bounds(kind: object) -> Iterator[Bounded[Any] | BoundedOr]:
    """Yield the bounds that a type and its metadata name, however deep."""
    if isinstance(kind, Check):
        if isinstance(kind.func, Bounded | BoundedOr):
            yield kind.func
        return
    for each in kind if isinstance(kind, tuple) else get_args(kind):
        if each is not NoneType and not isinstance(each, str):
            yield from _bounds(each)


def _models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield a model and all models of its sections."""
    yield model
    for field in model.model_fields.values():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _models(kind)


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
