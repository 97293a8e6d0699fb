"""The settings of an upstream: its servers, and how they are spoken to."""

from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, PlainValidator, StrictBool

from gateway.settings.limits import Concurrency
from gateway.settings.values.addresses import parse_endpoint, parse_host, parse_path
from gateway.settings.values.fields import File, OneOrMore, Percentage, Section, count, time
from gateway.settings.values.patterns import parse_header_name
from gateway.settings.values.wording import describe, did_you_mean

_Endpoint = Annotated[str, PlainValidator(parse_endpoint, json_schema_input_type=str)]
_EjectionTime = Annotated[float, time("1ms", "24h")]
_ProbeTime = Annotated[float, time("1ms", "1h")]


class UpstreamTls(Section):
    """Say how TLS is spoken to the endpoints that are https."""

    ca: File | None = Field(
        default=None,
        description="The file of the certificates, PEM, that are trusted instead of the system's.",
    )
    certificate: File | None = Field(
        default=None,
        description="The file of the certificate, PEM, that the gateway shows to servers, followed"
        " by those of its issuers.",
    )
    key: File | None = Field(
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


_By = Literal["least_request", "round_robin"]


class LoadBalancing(Section):
    """Say which endpoint takes a request."""

    policy: _By = Field(
        default="least_request",
        description="The one with the fewest requests under way, or each in turn.",
    )
    hash_header: (
        Annotated[str, PlainValidator(parse_header_name, json_schema_input_type=str)] | None
    ) = Field(
        default=None,
        description="The header of which every value stays with one endpoint.",
    )


def _balance(value: object) -> object:
    """Return what is meant by the one word that is needed most."""
    if isinstance(value, str) and value in get_args(_By):
        return LoadBalancing.model_validate({"policy": value})
    if isinstance(value, Mapping | LoadBalancing):
        return value
    wanted = "least_request, round_robin or {hash_header: HEADER}"
    hint = did_you_mean(value, get_args(_By))
    raise ValueError(f"expected {wanted}, got {describe(value)}{hint}")


class RetryBudget(Section):
    """Bound how many requests are sent again, so that retries do not multiply an outage."""

    percent: Percentage = Field(
        default=50.0,
        description="How many there may be, of the requests to the upstream.",
        json_schema_extra={"default": "50%"},
    )
    min_concurrency: Annotated[int, count("0", "1000000")] = Field(
        default=20,
        description="How many there may be at once when all was well before, beside that share of"
        " what is under way.",
    )


class OutlierDetection(Section):
    """Say when endpoints that fail are left out, and for how long."""

    consecutive_failures: Annotated[int, count("0", "1000")] = Field(
        default=5, description="After how many failures in a row; 0 is never."
    )
    base_ejection_time: _EjectionTime = Field(
        default=10.0, description="For how long the first time; each time in a row it doubles."
    )
    max_ejection_time: _EjectionTime = Field(default=300.0, description="For how long at most.")
    max_ejection_percent: Percentage = Field(
        default=50.0,
        description="How many of the upstream's endpoints at a time, as a share of all.",
        json_schema_extra={"default": "50%"},
    )
    failure_statuses: OneOrMore[Annotated[int, count("400", "599")]] = Field(
        default=(502, 503, 504),
        description="The statuses of a server's own answers that are failures, too.",
    )


class HealthCheck(Section):
    """Say how endpoints are asked whether they are well."""

    path: Annotated[str, PlainValidator(parse_path, json_schema_input_type=str)] = Field(
        default="/v2/health/ready", description="What is asked for; an answer of 2xx is a good one."
    )
    interval: Annotated[float, time("10ms", "1h")] = Field(
        default=5.0, description="How often each endpoint is asked."
    )
    timeout: _ProbeTime = Field(default=2.0, description="How long the answer may take.")
    healthy_threshold: Annotated[int, count("1", "1000")] = Field(
        default=1,
        description="How many good answers in a row make an endpoint healthy that was not.",
    )
    unhealthy_threshold: Annotated[int, count("1", "1000")] = Field(
        default=2,
        description="How many bad answers in a row make an endpoint unhealthy that was healthy.",
    )


class Upstream(Section):
    """Name a group of servers that answer alike."""

    endpoints: OneOrMore[_Endpoint] = Field(
        min_length=1,
        description="The servers, each as http://host:port, https://host:port or unix:/path."
        " One, or a list.",
    )
    tls: UpstreamTls | None = Field(
        default=None, description="How TLS is spoken to the endpoints that are https."
    )
    dialect: Literal["auto", "triton", "kserve", "openvino", "json"] = Field(
        default="auto",
        description="How the servers speak the protocol: as Triton does, KServe, OpenVINO Model"
        " Server, or a server without the binary form (json); auto is what they say themselves.",
    )
    load_balancing: Annotated[
        LoadBalancing, BeforeValidator(_balance, json_schema_input_type=_By | LoadBalancing)
    ] = Field(default=LoadBalancing(), description="Which endpoint takes a request.")
    retry_budget: RetryBudget = Field(
        default=RetryBudget(), description="How many requests to these servers are sent again."
    )
    concurrency: Concurrency = Field(
        default=Concurrency(), description="How many requests may be at these servers at a time."
    )
    outlier_detection: OutlierDetection = Field(
        default=OutlierDetection(),
        description="When endpoints that fail are left out, and for how long.",
    )
    health_check: HealthCheck | None = Field(
        default=None,
        description="How endpoints are asked whether they are well, if they are; {} is as above.",
    )
    idle_timeout: Annotated[float, time("0s", "24h")] = Field(
        default=4.0,
        description="How long a connection to a server is kept for its next request; 0 for none.",
    )
    dns_refresh: Annotated[float, time("10ms", "24h")] | None = Field(
        default=None,
        description="How often host names are looked up, if each of their addresses is to be an"
        " endpoint of its own.",
    )
    model_discovery: StrictBool = Field(
        default=False,
        description="Whether endpoints are asked which models they have ready, so that a request"
        " goes where its model is.",
    )
    required: StrictBool = Field(
        default=True, description="Whether the gateway is ready only if this upstream is."
    )
