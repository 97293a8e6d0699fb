"""Settings of the sections ``concurrency`` and ``limits``."""

from typing import Annotated, Literal

from pydantic import create_model

from gateway.settings.values.fields import Section, count, count_or, size, time

_MIB = 2**20
_GIB = 2**30


class Concurrency(Section):
    """How many calls may be at servers at a time, and how many more may wait."""

    max_requests: Annotated[
        int | Literal["unlimited"],
        count_or("unlimited", "1", "1000000"),
    ] = "unlimited"
    """Most calls that may be at servers at a time. Further calls wait in a queue."""
    max_queue: Annotated[int, count("0", "1000000")] = 100
    """Most calls that may wait. The gateway answers further calls with 503 and Retry-After."""
    queue_timeout: Annotated[float, time("1ms", "1h")] = 1.0
    """How long a call may wait. Then the gateway answers it with 503 and Retry-After."""


class CallLimits(Section):
    """What one call may take, and one connection for it."""

    max_request_bytes: Annotated[int, size("1KiB", "1TiB")] = 64 * _MIB
    """Largest request body, as received and after decompression. The gateway answers a larger one
    with 413."""
    max_decompression_ratio: Annotated[int, count("1", "10000")] = 100
    """How many times larger a compressed request body may become. The first mebibyte of it is
    exempt. The gateway answers 413 above it."""
    max_inference_header_bytes: Annotated[int, size("1KiB", "1GiB")] = 1 * _MIB
    """Largest JSON part of a request, without its data arrays, or of a response."""
    max_json_depth: Annotated[int, count("1", "200")] = 64
    """How deep the JSON of a request may nest."""
    max_tensors: Annotated[int, count("1", "65536")] = 1024
    """Most inputs of a request, and most outputs that it may request."""
    max_buffered_body_bytes: Annotated[int, size("1KiB", "1TiB")] = 64 * _MIB
    """Most bytes that the gateway buffers of one body. It buffers bodies without a length, and
    bodies for several servers. It buffers responses in mixed form, and binary responses that it
    makes of JSON."""
    min_body_rate: Annotated[int, size("0", "1GiB")] = 240
    """Average number of bytes per second at which a client must send a body. The gateway answers
    slower clients with 408. With 0, any rate is allowed."""
    min_body_rate_grace: Annotated[float, time("0s", "1h")] = 10.0
    """How long a body may fall behind min_body_rate, at its beginning or in a pause."""
    idle_timeout: Annotated[float, time("1ms", "24h")] = 300.0
    """How long a call may go without a byte from the side that should send."""
    request_timeout: Annotated[float, time("1ms", "168h")] = 3600.0
    """How long one call may take in all."""


class Limits(CallLimits):
    """What one call, one connection and the whole gateway may take."""

    max_buffered_bytes: Annotated[int, size("1MiB", "1TiB")] = 1 * _GIB
    """Most bytes that the gateway buffers of all requests and responses together. The gateway
    answers 503 and Retry-After above it."""
    request_header_timeout: Annotated[float, time("1ms", "1h")] = 60.0
    """How long a client may take to send the head of a request. It also limits a TLS handshake,
    which may take 10 s at most."""
    keep_alive_timeout: Annotated[float, time("1s", "24h")] = 3600.0
    """How long a client's connection may stay open between requests."""
    connect_timeout: Annotated[float, time("1ms", "1h")] = 5.0
    """How long connecting to a server may take."""
    drain_timeout: Annotated[float, time("1ms", "24h")] = 30.0
    """How long calls in progress may go on after SIGTERM."""
    drain_grace: Annotated[float, time("0s", "1h")] = 1.0
    """How long connections without a call stay open after SIGTERM, but no longer than
    drain_timeout."""
    metadata_ttl: Annotated[float, time("1ms", "24h")] = 60.0
    """How long a model's metadata is cached."""
    metadata_cache_size: Annotated[int, count("1", "1000000")] = 1024
    """Most models whose metadata is cached, for each upstream."""


RouteLimits = create_model(
    "RouteLimits",
    __base__=CallLimits,
    __doc__="Limits of the calls of one route; each defaults to that of the whole gateway.",
    **{  # type: ignore[call-overload]  # the fields are known only here
        name: (Annotated[field.annotation, *field.metadata] | None, None)
        for name, field in CallLimits.model_fields.items()
    },
)
