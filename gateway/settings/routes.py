"""The settings of a route: which requests it takes, where to, and what is done with them."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from gateway.settings.values.fields import (
    BodyGrace,
    BodyRate,
    HeaderBytes,
    IdleTime,
    Inflation,
    JsonDepth,
    MaxTensors,
    OneOrMore,
    Percentage,
    RequestBytes,
    Section,
    SpoolBytes,
    TotalTime,
    count,
)
from gateway.settings.values.patterns import (
    parse_header_name,
    parse_path_part,
    parse_pattern,
    with_header_names,
)
from gateway.settings.values.wording import describe

OperationName = Literal[
    "infer",
    "generate",
    "health",
    "metadata",
    "config",
    "statistics",
    "repository",
    "trace",
    "logging",
    "shared_memory",
    "other",
]
"""What a request may ask for."""

_Pattern = Annotated[str, PlainValidator(parse_pattern, json_schema_input_type=str | int)]
_PathPart = Annotated[str, PlainValidator(parse_path_part, json_schema_input_type=str | int)]
_HeaderName = Annotated[str, PlainValidator(parse_header_name, json_schema_input_type=str)]
_Repeated = Literal["unanswered", 500, 502, 503, 504]
_Coding = Literal["gzip", "deflate"]
_NonFinite = Literal["literal", "null", "string", "error"]


class Match(Section):
    """Say what requests have to have in common; what is not said does not count."""

    model: _Pattern | None = Field(
        default=None, description="The model: a name, a glob, or re: and a regular expression."
    )
    version: _Pattern | None = Field(default=None, description="The model's version, likewise.")
    headers: Annotated[Mapping[str, _Pattern], BeforeValidator(with_header_names)] = Field(
        default={}, description="The values of HTTP headers, likewise, by name."
    )
    operations: OneOrMore[OperationName] | None = Field(
        default=None, min_length=1, description="What is asked for: one of these."
    )


class WeightedUpstream(Section):
    """Give an upstream a share of a route's requests."""

    name: str = Field(description="The name of an upstream.")
    weight: Annotated[int, count("0", "1000000")] = Field(
        description="Its share, of the sum of all weights."
    )


class Rewrite(Section):
    """Say which model the server is asked for instead."""

    model: _PathPart = Field(description="The model's name in the path to the server.")
    version: _PathPart | None = Field(
        default=None, description="The version there; the client's own, if none is given."
    )


class Mirror(Section):
    """Send copies of requests to an upstream whose answers nobody sees."""

    upstream: str = Field(description="The name of the upstream.")
    percent: Percentage = Field(
        default=100.0,
        description="The share of the requests that are copied.",
        json_schema_extra={"default": "100%"},
    )
    max_concurrent: Annotated[int, count("1", "10000")] = Field(
        default=64, description="How many copies may be under way at a time."
    )


class RouteLimits(Section):
    """Bound what one exchange of a route may take; what is not said is as for all routes."""

    request_bytes: RequestBytes | None = Field(
        default=None, description="The largest request body."
    )
    max_decompression_ratio: Inflation | None = Field(
        default=None, description="How many times larger than it came a body may become."
    )
    header_bytes: HeaderBytes | None = Field(
        default=None, description="The largest JSON part of a request or of an answer."
    )
    json_depth: JsonDepth | None = Field(
        default=None, description="How deep the JSON of a request may nest."
    )
    max_tensors: MaxTensors | None = Field(
        default=None, description="How many inputs a request may have, and outputs ask for."
    )
    spool_bytes: SpoolBytes | None = Field(
        default=None, description="What is held of a body or of an answer."
    )
    idle_timeout: IdleTime | None = Field(default=None, description="How long no byte may move.")
    request_timeout: TotalTime | None = Field(
        default=None, description="How long one exchange may take."
    )
    min_body_rate: BodyRate | None = Field(
        default=None, description="How many bytes a second a client's body has to come at."
    )
    min_body_rate_grace: BodyGrace | None = Field(
        default=None, description="How long a client's body has to gather speed."
    )


def _shares(value: object) -> object:
    """Return the shares that are meant by the name of an upstream."""
    if isinstance(value, str):
        return (WeightedUpstream(name=value, weight=1),)
    if not isinstance(value, list | tuple):
        wanted = "the name of an upstream, or a list of {name, weight}"
        raise ValueError(f"expected {wanted}, got {describe(value)}")
    return value


def _some_weight(shares: tuple[WeightedUpstream, ...]) -> tuple[WeightedUpstream, ...]:
    names = [share.name for share in shares]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the upstream {describe(name)} is named twice")
    if not any(share.weight for share in shares):
        raise ValueError("at least one weight must be above 0")
    return shares


def _null_by_name(value: object) -> object:
    # Unquoted, YAML reads the policy's name as its null value.
    return "null" if value is None else value


class Route(Section):
    """Send requests to an upstream, and say how its answers become JSON."""

    match: Match = Field(default=Match(), description="Which requests take this route.")
    upstream: Annotated[
        tuple[WeightedUpstream, ...],
        Field(min_length=1),
        BeforeValidator(_shares, json_schema_input_type=str | list[WeightedUpstream]),
        AfterValidator(_some_weight),
    ] = Field(description="The name of an upstream, or several with their weights.")
    sticky_header: _HeaderName | None = Field(
        default=None,
        description="The header of which every value stays with one of several upstreams.",
    )
    rewrite: Rewrite | None = Field(
        default=None, description="Which model the server is asked for instead."
    )
    auth: OneOrMore[str] = Field(
        default=(),
        description="The groups of keys of which a client must show one; none, where every client"
        " is let in.",
    )
    deny_operations: OneOrMore[OperationName] = Field(
        default=(), description="What is refused on this route."
    )
    retry_on: OneOrMore[_Repeated] = Field(
        default=(),
        description="What is sent again to another server, beyond what cannot have had an effect:"
        " what a server closes on without an answer (unanswered), and what it answers with one of"
        " these statuses.",
    )
    mirror: Mirror | None = Field(
        default=None, description="Where copies of infer and generate requests go."
    )
    compression: OneOrMore[_Coding] = Field(
        default=(),
        description="How answers are compressed for clients that accept it, the first of what they"
        " like as well; none, where answers stay as they are.",
    )
    nonfinite: Annotated[
        _NonFinite, BeforeValidator(_null_by_name, json_schema_input_type=_NonFinite | None)
    ] = Field(
        default="literal",
        description="What NaN and infinities become in JSON, for clients and for servers that take"
        " JSON only: the bare tokens that Triton writes (literal), null, a string, or an error.",
    )
    bytes: Literal["utf8", "base64"] = Field(
        default="utf8",
        description="What BYTES elements become in JSON, for clients and for servers that take JSON"
        " only: text, which is an error for a tensor that is not UTF-8, or base64.",
    )
    limits: RouteLimits = Field(
        default=RouteLimits(), description="Where the limits differ from those of all routes."
    )
