"""Settings of an upstream: its servers, and how the gateway speaks to them."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self, get_args

from pydantic import BeforeValidator, Field, PlainValidator, StrictBool, model_validator

from gateway.settings.limits import Concurrency
from gateway.settings.values.addresses import (
    TcpAddress,
    address_of,
    parse_endpoint,
    parse_endpoint_over,
    parse_host,
    parse_path,
)
from gateway.settings.values.fields import Check, File, OneOrMore, Percentage, Section, count, time
from gateway.settings.values.fields import size as byte_size
from gateway.settings.values.patterns import parse_header_name
from gateway.settings.values.wording import describe, did_you_mean


class EndpointUrls(Section):
    """The URLs of a server that speaks both protocols."""

    http: Annotated[str, Check(parse_endpoint_over("http"), str)]
    """Address over HTTP: http://HOST:PORT or https://HOST:PORT."""
    grpc: Annotated[str, Check(parse_endpoint_over("grpc"), str)]
    """Address over gRPC: grpc://HOST:PORT or grpcs://HOST:PORT, on the same host."""

    @model_validator(mode="after")
    def _check_host(self) -> Self:
        hosts = [_host_of(url) for url in (self.http, self.grpc)]
        if hosts[0] != hosts[1]:
            got = " and ".join(map(describe, hosts))
            raise ValueError(f"both addresses are those of one server, on one host, got {got}")
        return self

    def __str__(self) -> str:
        return f"{self.http} + {self.grpc}"


Endpoint = str | EndpointUrls
"""A server: its URL, or one for each protocol."""


def urls_of(endpoint: Endpoint) -> tuple[str, ...]:
    """Return the URLs of an endpoint."""
    return (endpoint,) if isinstance(endpoint, str) else (endpoint.http, endpoint.grpc)


def _host_of(url: str) -> str:
    address = address_of(url)
    assert isinstance(address, TcpAddress)
    return address.host.lower().rstrip(".")


def _parse_endpoint(value: object) -> Endpoint:
    is_both = isinstance(value, Mapping)
    return EndpointUrls.model_validate(value) if is_both else parse_endpoint(value)


_Endpoint = Annotated[
    Endpoint, PlainValidator(_parse_endpoint, json_schema_input_type=str | EndpointUrls)
]
_Host = Annotated[str, Check(parse_host, str)]
_HeaderName = Annotated[str, Check(parse_header_name, str)]
_RequestTarget = Annotated[str, Check(parse_path, str)]
_EjectionTime = Annotated[float, time("1ms", "24h")]
_Policy = Literal["least_request", "round_robin"]


class UpstreamTls(Section):
    """TLS to the endpoints of an upstream that are https or grpcs."""

    ca: File | None = None
    """PEM file of the certificates that the gateway trusts. Without it, the gateway trusts those
    that the system trusts."""
    certificate: File | None = None
    """PEM file of the certificate that the gateway shows to servers, followed by those of its
    issuers."""
    key: File | None = None
    """PEM file of the certificate's key, without a password."""
    server_name: _Host | None = None
    """Name that the servers' certificates must have. Without it, that is the endpoint's host."""
    verify: StrictBool = True
    """Whether the gateway checks the servers' certificates. With false, anybody on the way can read
    and change what is sent."""


class LoadBalancing(Section):
    """How the gateway chooses the endpoint for a call."""

    policy: _Policy = "least_request"
    """least_request takes the endpoint with the fewest calls, round_robin takes each in turn."""
    hash_header: _HeaderName | None = None
    """Name of a request header. All requests with the same value go to the same endpoint while it
    can be used. Requests without the header follow the policy."""


def _load_balancing(value: object) -> object:
    """Return a policy's name as the section with that policy."""
    if isinstance(value, str) and value in get_args(_Policy):
        return LoadBalancing.model_construct(policy=value)
    if isinstance(value, Mapping):
        return value
    expected = "least_request, round_robin or {hash_header: HEADER}"
    hint = did_you_mean(value, get_args(_Policy))
    raise ValueError(f"expected {expected}, got {describe(value)}{hint}")


class RetryBudget(Section):
    """How many calls may be retried, so that retries do not multiply an outage."""

    percent: Percentage = Field(default=50.0, json_schema_extra={"default": "50%"})
    """Most retries, as a percentage of the calls to the upstream."""
    min_concurrency: Annotated[int, count("0", "1000000")] = 20
    """Retries that are allowed at once, beside that percentage of the calls in progress."""


class OutlierDetection(Section):
    """When the gateway ejects an endpoint whose calls fail, and for how long."""

    consecutive_failures: Annotated[int, count("0", "1000")] = 5
    """Failures in a row after which an endpoint is ejected. With 0, none is."""
    base_ejection_time: _EjectionTime = 10.0
    """How long the first ejection lasts. Each further one in a row lasts twice as long."""
    max_ejection_time: _EjectionTime = 300.0
    """How long an ejection lasts at most."""
    max_ejection_percent: Percentage = Field(default=50.0, json_schema_extra={"default": "50%"})
    """Most endpoints that are ejected at a time, as a percentage of all."""
    failure_statuses: OneOrMore[Annotated[int, count("400", "599")]] = (502, 503, 504)
    """Statuses of responses that count as failures, beside connections that fail."""
    latency_factor: Annotated[int, count("3", "1000")] | None = None
    """An endpoint is ejected if its calls of a model take so many times as long as at the other
    endpoints (median). Without it, none is ejected for that: log, metrics and page only name it."""


class HealthCheck(Section):
    """How the gateway checks whether endpoints are healthy."""

    path: _RequestTarget = "/v2/health/ready"
    """Path of the check. A response with a status of 200 to 299 is a success."""
    interval: Annotated[float, time("10ms", "1h")] = 5.0
    """How often each endpoint is checked."""
    timeout: Annotated[float, time("1ms", "1h")] = 2.0
    """How long a response to a check may take."""
    healthy_threshold: Annotated[int, count("1", "1000")] = 1
    """Successes in a row that make an unhealthy endpoint healthy."""
    unhealthy_threshold: Annotated[int, count("1", "1000")] = 2
    """Failures in a row that make a healthy endpoint unhealthy. The very first check decides
    alone."""


class SharedMemory(Section):
    """Memory that the gateway shares with servers on the same machine."""

    size: Annotated[int, byte_size("1MiB", "1TiB")] | None = None
    """Memory of each endpoint and worker at most, beside limits.max_buffered_bytes. It is taken
    from /dev/shm as calls need it. Without it, that is 256MiB, and all of it counts towards
    max_buffered_bytes: endpoints take a quarter of that together at most."""
    min_bytes: Annotated[int, byte_size("0", "1TiB")] = 128 * 2**10
    """Tensors of a request, or of a response, that have fewer bytes in all go over the socket."""


def _shared_memory(value: object) -> object:
    """Return ``auto`` as the section with its defaults."""
    if value == "auto":
        return SharedMemory.model_construct()
    if value is None or isinstance(value, Mapping):
        return value
    raise ValueError(f"expected auto, or {{size: SIZE, min_bytes: SIZE}}, got {describe(value)}")


def _endpoints(value: object) -> object:
    """Return a single endpoint with two addresses as a list of one."""
    return (value,) if isinstance(value, Mapping) else value


class Upstream(Section):
    """A group of servers that answer alike."""

    endpoints: Annotated[OneOrMore[_Endpoint], BeforeValidator(_endpoints)] = Field(min_length=1)
    """The servers, each as http://HOST:PORT or unix:/PATH for HTTP, or as grpc://HOST:PORT for
    gRPC; https and grpcs are these over TLS. A server that speaks both is {http: URL, grpc: URL}.
    One, or a list."""
    tls: UpstreamTls | None = None
    """TLS to the endpoints that are https or grpcs."""
    dialect: Literal["auto", "triton", "kserve", "openvino", "torchserve", "json"] = "auto"
    """How the servers speak the protocol. json is for servers without the binary form over HTTP.
    With auto, the gateway asks each server; it cannot detect torchserve."""
    inference_protocol: Literal["auto", "http", "grpc"] = "auto"
    """The protocol in which inference of HTTP clients goes to servers with both addresses. With
    auto, that is grpc for dialects that are faster over gRPC (kserve, json), and http for
    others."""
    grpc_cancellation: Literal["auto", "forward", "drain"] = "auto"
    """What servers learn of gRPC calls that clients cancel, that miss their deadline or that the
    gateway gives up. With forward, they are told. With drain, they are not: the gateway keeps the
    deadline itself, reads the call to its end and drops it. With auto, that is drain for Triton
    before 2.59, which dies of cancellations, and forward for others."""
    load_balancing: Annotated[
        LoadBalancing,
        BeforeValidator(_load_balancing, json_schema_input_type=_Policy | LoadBalancing),
    ] = LoadBalancing.model_construct()
    """How the gateway chooses the endpoint for a call."""
    retry_budget: RetryBudget = RetryBudget.model_construct()
    """How many calls to these servers may be retried."""
    concurrency: Concurrency = Concurrency.model_construct()
    """How many calls may be at these servers at a time."""
    outlier_detection: OutlierDetection = OutlierDetection.model_construct()
    """When the gateway ejects an endpoint whose calls fail, and for how long."""
    health_check: HealthCheck | None = None
    """How the gateway checks whether endpoints are healthy. Without this section it does not; with
    {} it does, by the defaults."""
    idle_timeout: Annotated[float, time("0s", "24h")] | None = None
    """How long a connection to a server stays open for its next call. With 0, each call takes a new
    one. Without it, that is 4s, and 3m for gRPC."""
    retry_stale: Literal["safe", "infer", "all"] = "infer"
    """Which requests are sent again if the server closes a reused HTTP/1.1 connection without a
    response, within a second. It may have executed them. With safe, that is GET, HEAD and OPTIONS.
    With infer, also infer requests without sequence parameters, and the repository index. With all,
    every request: then a server may execute a load or a generate twice."""
    dns_refresh: Annotated[float, time("10ms", "24h")] | None = None
    """How often host names are looked up, where each of their addresses is an endpoint. Without it,
    a host name is one endpoint."""
    model_discovery: StrictBool = False
    """Whether the gateway asks endpoints for their ready models, and sends a request where its
    model is."""
    shared_memory: Annotated[
        SharedMemory | None,
        BeforeValidator(_shared_memory, json_schema_input_type=Literal["auto"] | SharedMemory),
    ] = None
    """Shared memory for large tensors, in front of a Triton on the same machine. The endpoint's
    addresses are on loopback or a Unix socket. With auto, it has the defaults below. Where it
    cannot be, the log says why, and tensors go over the socket."""
    required: StrictBool = True
    """Whether the gateway is ready only if this upstream is."""
