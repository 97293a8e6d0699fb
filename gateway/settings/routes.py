"""Settings of a route: which requests it takes, their upstream, and how they are treated."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool

from gateway.settings.limits import RouteLimits
from gateway.settings.values.fields import Check, OneOrMore, Percentage, Section, count
from gateway.settings.values.patterns import (
    parse_header_name,
    parse_path_part,
    parse_pattern,
    pattern_warning,
    with_header_names,
)
from gateway.settings.values.wording import KeyPath, SettingWarning, describe

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
"""Groups of operations, as operators name them."""

_Pattern = Annotated[str, Check(parse_pattern, str, int)]
_PathPart = Annotated[str, Check(parse_path_part, str, int)]
_HeaderName = Annotated[str, Check(parse_header_name, str)]
_RetryReason = Literal["no_response", 500, 502, 503, 504]
_Coding = Literal["gzip", "deflate"]
_NonFinite = Literal["literal", "null", "string", "error"]


class Match(Section):
    """Which requests a route takes: those that fit all that is given here."""

    model: _Pattern | None = None
    """The model: a name, a glob, or re: and a regular expression."""
    version: _Pattern | None = None
    """The model's version, written as the model is."""
    headers: Annotated[Mapping[str, _Pattern], BeforeValidator(with_header_names)] = {}
    """Values of request headers by name, written as the model is."""
    operations: OneOrMore[OperationName] | None = Field(default=None, min_length=1)
    """Operations of the protocol. One has to fit."""


def describe_match(match: Match) -> str:
    """Describe the requests that a route takes."""
    parts = [f"model {match.model}"] if match.model else []
    parts += [f"version {match.version}"] if match.version else []
    parts += [f"{name}: {value}" for name, value in match.headers.items()]
    parts += [" or ".join(match.operations)] if match.operations else []
    return ", ".join(parts) or "every request"


class WeightedUpstream(Section):
    """One of several upstreams that share the requests of a route."""

    name: str
    """Name of an upstream."""
    weight: Annotated[int, count("0", "1000000")]
    """Its share of the requests, of the sum of all weights."""


class Rewrite(Section):
    """The model that the server is asked for instead of the client's."""

    model: _PathPart
    """Name of the model in the path to the server."""
    version: _PathPart | None = None
    """Version of the model there. Without it, the client's own version stays."""


class Mirror(Section):
    """Copies of requests for an upstream whose responses are dropped."""

    upstream: str
    """Name of the upstream that gets the copies."""
    percent: Percentage = Field(default=100.0, json_schema_extra={"default": "100%"})
    """Percentage of the requests that are copied."""
    max_concurrent: Annotated[int, count("1", "10000")] = 64
    """Most copies at a time, in each worker. Further requests are not copied."""


def _as_weighted(value: object) -> object:
    """Return the name of one upstream as the list of it."""
    if isinstance(value, str):
        return (WeightedUpstream.model_construct(name=value, weight=1),)
    if not isinstance(value, list | tuple):
        expected = "the name of an upstream, or a list of {name, weight}"
        raise ValueError(f"expected {expected}, got {describe(value)}")
    return value


def _check_weights(upstreams: tuple[WeightedUpstream, ...]) -> tuple[WeightedUpstream, ...]:
    names = [upstream.name for upstream in upstreams]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the upstream {describe(name)} is named twice")
    if not any(upstream.weight for upstream in upstreams):
        raise ValueError("at least one weight must be above 0")
    return upstreams


def _null_by_name(value: object) -> object:
    # Unquoted, YAML reads the policy's name as its null value.
    return "null" if value is None else value


class Route(Section):
    """Where requests go, and what the gateway does with them and their responses."""

    name: str | None = None
    """Name in the access log and in metrics. The default is the route's number."""
    match: Match = Match.model_construct()
    """Which requests take this route. Without it, all do."""
    upstream: Annotated[
        tuple[WeightedUpstream, ...],
        Field(min_length=1),
        BeforeValidator(_as_weighted, json_schema_input_type=str | list[WeightedUpstream]),
        AfterValidator(_check_weights),
    ]
    """Name of an upstream, or a list of several with their weights."""
    sticky_header: _HeaderName | None = None
    """Name of a request header. All requests with the same value go to the same one of several
    upstreams."""
    rewrite: Rewrite | None = None
    """The model that the server is asked for instead."""
    auth: OneOrMore[str] = ()
    """Groups of API keys. A client must show a key of one of them. Without groups, no key is
    needed."""
    deny_operations: OneOrMore[OperationName] = ()
    """Operations that the gateway answers with 403 on this route."""
    retry_on: OneOrMore[_RetryReason] = ()
    """When a call is retried on another endpoint, beside failed connections. no_response: the
    server closed the connection without a response. A status: the server answered with it."""
    mirror: Mirror | None = None
    """Upstream that gets copies of infer and generate requests."""
    compression: OneOrMore[_Coding] = ()
    """Content codings for responses to clients that accept them, the preferred one first. Without
    any, responses stay as they are."""
    server_timing: StrictBool = False
    """Whether responses say in a Server-Timing header how long the call was queued, converted and
    at the server."""
    nonfinite: Annotated[
        _NonFinite, BeforeValidator(_null_by_name, json_schema_input_type=_NonFinite | None)
    ] = "literal"
    """What NaN and infinities become in JSON: the bare tokens that Triton writes (literal), null, a
    string, or an error."""
    bytes: Literal["utf8", "base64"] = "utf8"
    """What BYTES elements become in JSON: UTF-8 text or base64. A tensor that is not UTF-8 is an
    error with utf8."""
    limits: RouteLimits = RouteLimits.model_construct()
    """Limits that differ from those of the whole gateway."""


def pattern_warnings(routes: Sequence[Route]) -> Iterator[SettingWarning]:
    """Yield the patterns that may not mean what was meant, each with why."""
    for i, route in enumerate(routes):
        match = route.match
        patterns: dict[KeyPath, str | None] = {("model",): match.model, ("version",): match.version}
        patterns |= {("headers", name): value for name, value in match.headers.items()}
        for path, pattern in patterns.items():
            if pattern is not None and (warning := pattern_warning(pattern)):
                yield ("routes", i, "match", *path), warning
